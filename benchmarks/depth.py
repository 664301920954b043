"""How far ahead of training must generation be? `rollout.pipeline_depth` under one staleness bound.

    python -m benchmarks.depth [--seeds 1,2,3] [field=value ...]

Under a bound of four versions it compares the depths 4 (the default: staleness reaches the bound), 2, 1 and 1/2:

- `default`: asynchronous runs of the default task on the cores of this machine, which differ only in depth;
- `emulated`: the paper's clusters by the time model, in virtual time (`_step_times.py`), independent of this machine.

For each depth, `over_4` is tokens/s, or steps in the time, over those at depth 4: the median over seeds of the ratio
within a seed. `staleness_mean` and `staleness_max` are in versions, of the oldest token of a group or a completion.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks import _harness
from benchmarks._step_times import asynchronous
from benchmarks.sync_vs_async import command, run_arms, speeds
from flows.comparison.intervals import paired_ratio
from flows.compose import compose

BOUND = 4
DEPTHS = (4, 2, 1, 0.5)
MODELS = ("1.5b", "7b", "14b", "32b")
_STEPS = 16  # in virtual time, half of them counted


def main() -> None:
    command(__doc__ or "", measure, seeds=[1, 2, 3])


def measure(seeds: Sequence[int], overrides: Sequence[str]) -> dict[str, Any]:
    emulated = {model: in_virtual_time(model, seeds) for model in MODELS}
    _harness.tell(f"{emulated}")
    arms = {_name(depth): ["mode=async", *_arm(depth)] for depth in DEPTHS}
    runs = run_arms("cpu-async", arms, seeds, overrides)
    default = {
        depth: {
            f"over_{BOUND}": round(paired_ratio(speeds(of_seed), speeds(runs[_name(BOUND)])).median, 3),
            "staleness_mean": round(statistics.median(run.staleness_mean for run in of_seed.values()), 2),
            "staleness_max": max(run.staleness_max for run in of_seed.values()),
            "accuracy": [run.accuracy_after for run in of_seed.values()],
        }
        for depth, of_seed in runs.items()
    }
    return {"default": default, "emulated": emulated, "seeds": list(seeds)}


def in_virtual_time(model: str, seeds: Sequence[int]) -> dict[str, dict[str, float]]:
    """Emulate a cluster of the paper: time and staleness by depth."""
    found: dict[str, dict[str, float]] = {}
    deepest: dict[int, float] = {}
    for depth in DEPTHS:
        arm = ["mode=async", *_arm(depth)]
        runs = {seed: asynchronous(compose(f"emulated-{model}", [*arm, f"seed={seed}"]), _STEPS) for seed in seeds}
        deepest = deepest or {seed: step_s for seed, (step_s, _) in runs.items()}
        found[f"{depth}"] = {
            f"over_{BOUND}": round(statistics.median(deepest[seed] / step_s for seed, (step_s, _) in runs.items()), 3),
            "staleness_mean": round(statistics.fmean(lag for _, lags in runs.values() for lag in lags), 2),
            "staleness_max": max(max(lags) for _, lags in runs.values()),
        }
    return found


def _name(depth: float) -> str:
    """Name of an arm; 0-5 stands for a half."""
    return f"{depth:g}".replace(".", "-")


def _arm(depth: float) -> list[str]:
    return [f"rollout.max_staleness={BOUND}", f"rollout.pipeline_depth={depth}"]


if __name__ == "__main__":
    main()
