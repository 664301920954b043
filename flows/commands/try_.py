"""`areal try`: sample the base model before training, and say whether a run can learn from it."""

from __future__ import annotations

from collections.abc import Sequence

from areal_core.errors import ConfigError, ProcessError, printable_lines
from areal_core.run.tryout import try_out
from flows import cli
from flows.compose import compose, split_experiment

_SHOWN = 3  # rollouts


def main(arguments: Sequence[str]) -> None:
    parser = cli.parser("try", "", "experiment=smollm2 task.max_new_tokens=24", "experiment=own.yaml --prompts 32")
    parser.add_argument("--prompts", type=int, default=16, help="training prompts to sample; default: 16")
    cli.add_settings(parser, " of the run")
    options = parser.parse_intermixed_args(arguments)
    if options.prompts < 1:
        raise ConfigError(f"--prompts: must be at least 1, got {options.prompts}")
    report = try_out(compose(*split_experiment(options.settings)), prompts=options.prompts, log=print)
    first = report.result.records[0]
    print(f"\nThe first prompt, as it is fed:\n{_indented(first.prompt)}")
    for number, sample in enumerate(first.samples[:_SHOWN], 1):
        reward = "no result" if sample.score is None else f"reward {sample.score:g}"
        print(f"\nRollout {number} ({sample.outcome}, {reward}, {sample.tokens} tokens):\n{_indented(sample.text)}")
    print()
    for name, value in [*report.figures.rows(), ("memory", report.memory), ("all rollouts", str(report.result.page))]:
        print(f"{name:22} {value}")
    print()
    for _, problem in report.problems:
        print(problem)
    if any(fatal for fatal, _ in report.problems):
        raise ProcessError("this run can't learn: see above")
    print(f"This run can learn{', but slowly, because of the fields above' if report.problems else ''}.")


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in printable_lines(text).splitlines())
