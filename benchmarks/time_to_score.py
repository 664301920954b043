"""How long does the default experiment take to learn its task? Several seeds, each from the same base model.

    python -m benchmarks.time_to_score [--seeds 1,2,3] [field=value ...]

`rl_wall_s` runs from the first ready generation server to the last published version; it excludes the start and the
cached warm-up. Both accuracies are greedy, over all held-out prompts.
"""

from __future__ import annotations

from typing import Any

from areal_core.__main__ import configuration
from areal_core.run.launcher import execute
from areal_core.types import RunSummary
from benchmarks import _harness


def main() -> None:
    parser = _harness.parser(__doc__)
    parser.add_argument("--seeds", type=_harness.numbers, default=[1, 2, 3])
    arguments = parser.parse_intermixed_args()
    _harness.report(lambda: measure(arguments.seeds, arguments.overrides))


def measure(seeds: list[int], overrides: list[str]) -> dict[str, Any]:
    summaries = [_run(seed, overrides) for seed in seeds]
    return {
        "accuracy_before": [_rounded(summary.accuracy_before) for summary in summaries],
        "accuracy_after": [_rounded(summary.accuracy_after) for summary in summaries],
        "rl_wall_s": [round(summary.rl_wall_s, 2) for summary in summaries],
        "steps": [summary.steps for summary in summaries],
        "seeds": seeds,
    }


def _run(seed: int, overrides: list[str]) -> RunSummary:
    config = configuration({}, ["name=time-to-score", f"seed={seed}", *overrides])
    return execute(config, log=lambda line: _harness.tell(f"seed {seed}: {line}"))


def _rounded(score: float | None) -> float | None:
    return None if score is None else round(score, 4)


if __name__ == "__main__":
    main()
