"""`areal evaluate`: run the deployment `areal-evaluate/evaluate` and print its scores (flows.watch)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from areal_core.config.fields import check_file_name
from flows import cli, watch
from flows.compose import benchmark_configs


def main(arguments: Sequence[str]) -> int:
    parser = cli.parser(
        "evaluate",
        "MY-RUN --benchmark arithmetic",
        "models/Qwen2.5-0.5B --benchmark gsm8k=test.jsonl evaluation.samples=8 generation=vllm",
    )
    parser.add_argument("model", help="model folder, GGUF file, hub:OWNER/NAME, or name of a run")
    parser.add_argument(
        *("--benchmark", "-b"),
        action="append",
        dest="benchmarks",
        required=True,
        metavar="NAME[=FILE]",
        help="name of a file of conf/task, or name and file of prompts; repeat for several benchmarks",
    )
    parser.add_argument("--name", help="name of the evaluation; the name of an existing one resumes it")
    parser.add_argument("--reference", metavar="NAME", help="name of an earlier evaluation to compare with")
    cli.add_settings(parser)

    def checked() -> dict[str, Any]:
        options = {key: value for key, value in vars(parser.parse_intermixed_args(arguments)).items() if value}
        options["overrides"] = options.pop("settings", [])
        for field in options.keys() & {"name", "reference"}:
            check_file_name(field, options[field])
        benchmark_configs(options["model"], options["benchmarks"], overrides=options["overrides"])
        return options

    return watch.run_command("evaluate", "areal-evaluate/evaluate", checked)
