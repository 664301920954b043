"""`make train`: one flow run of `areal/train`, watched to its end, and its result; see flows.watch."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from flows import advise, watch
from flows.compose import configure


def main() -> int:
    parameters = _parameters()
    measured = parameters.pop("split", None)

    def checked() -> dict[str, Any]:
        if measured is not None:
            split = advise.best(measured)
            print(f"Split of devices from run {measured}: {split.servers} servers, {split.ranks} ranks.")
            parameters["overrides"] = [*parameters["overrides"], *split.overrides]
        configure(**parameters)
        return parameters

    return watch.run_command("train", "areal/train", checked)


def _parameters() -> dict[str, Any]:
    """The flow's parameters from the command line; what isn't given is left to the flow's defaults."""
    parser = argparse.ArgumentParser(prog="make train", description=__doc__, argument_default=argparse.SUPPRESS)
    parser.add_argument("--experiment", default="cpu-async")
    parser.add_argument("--mode")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--stop-at-score", type=float)
    parser.add_argument("--stop-after-minutes", type=float)
    parser.add_argument("--split", metavar="RUN", help="split devices as this run's rates advise")
    parser.add_argument("overrides", nargs="*", default=[], metavar="field=value")
    return vars(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
