"""What does a staleness bound for every token cost? The three values of `rollout.batch_selection`.

    python -m benchmarks.policies [--seeds 1,2,3] [field=value ...]

`admit` takes ready groups in order of admission. `wait` takes the groups with the oldest tokens, and waits if the bound
requires it. `drop` drops groups that exceed the bound. The arms are asynchronous runs of the default task and of
`experiment=long-tail` that differ only in this field, interleaved. For each task and value:

- `over_admit`: effective tokens/s over those of `admit`, the median over seeds of the ratio within a seed;
- `staleness_max`, `staleness_mean`: of the oldest token of a group, in versions; the worst seed, and the median;
- `dropped_share`: share of the generated tokens that were dropped, the median.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from areal_core.types import RunSummary
from benchmarks.sync_vs_async import command, run_arms, shown, speeds
from flows.comparison.intervals import paired_ratio

TASKS = {"default": "cpu-async", "long_tail": "long-tail"}
REFERENCE = "admit"
POLICIES = (REFERENCE, "wait", "drop")


def main() -> None:
    command(__doc__ or "", measure, seeds=[1, 2, 3])


def measure(seeds: Sequence[int], overrides: Sequence[str]) -> dict[str, Any]:
    arms = {policy: ["mode=async", f"rollout.batch_selection={policy}"] for policy in POLICIES}
    tasks = {task: run_arms(experiment, arms, seeds, overrides) for task, experiment in TASKS.items()}
    return {task: report(runs) for task, runs in tasks.items()} | {"seeds": list(seeds)}


def report(runs: Mapping[str, Mapping[int, RunSummary]]) -> dict[str, Any]:
    """Results of one task: policy -> seed -> run."""
    return {
        policy: {
            "over_admit": shown(paired_ratio(speeds(of_seed), speeds(runs[REFERENCE]))),
            "effective_tokens_per_s": {seed: round(speed) for seed, speed in speeds(of_seed).items()},
            "staleness_max": max(run.staleness_max for run in of_seed.values()),
            "staleness_mean": round(statistics.median(run.staleness_mean for run in of_seed.values()), 2),
            "dropped_share": round(
                statistics.median(run.tokens.dropped / run.tokens.generated for run in of_seed.values()), 4
            ),
        }
        for policy, of_seed in runs.items()
    }


if __name__ == "__main__":
    main()
