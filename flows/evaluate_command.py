"""`make evaluate`: one flow run of `areal-evaluate/evaluate`, watched to its end, and its scores; see flows.watch."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from areal_core.config.fields import check_file_name
from flows import watch
from flows.compose import benchmark_configs


def main() -> int:
    parser = argparse.ArgumentParser(prog="make evaluate", description=__doc__, argument_default=argparse.SUPPRESS)
    parser.add_argument("--model", required=True, help="a model folder, a GGUF file, or the name of a run")
    parser.add_argument("--benchmarks", required=True, type=str.split, help="files of conf/task, or name=path")
    parser.add_argument("--samples", type=int, help="of every problem, beside its greedy completion")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--name", help="of the evaluation; one that exists goes on")
    parser.add_argument("--reference", help="the name of an earlier evaluation, to compare with")
    parser.add_argument("overrides", nargs="*", default=[], metavar="field=value")
    arguments = vars(parser.parse_intermixed_args())  # what isn't given is left to the flow's defaults

    def checked() -> dict[str, Any]:
        for field in arguments.keys() & {"name", "reference"}:
            check_file_name(field, arguments[field])
        benchmark_configs(**{key: value for key, value in arguments.items() if key not in ("name", "reference")})
        return arguments

    return watch.run_command("evaluate", "areal-evaluate/evaluate", checked)


if __name__ == "__main__":
    sys.exit(main())
