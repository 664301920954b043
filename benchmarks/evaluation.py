"""What does scoring versions beside the training cost the training? Pairs of runs, interleaved in time.

    make bench NAME=evaluation ARGS="--seeds 1,2,3"

`on_over_off`: effective tokens/s of runs that generate and train on one core, with the evaluator on the other one,
against those of runs without evaluation; the median over seeds of the ratio within a seed. A version is scored every
`evaluation.every` steps, on all held-out prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks import sync_vs_async
from flows.comparison.intervals import paired_ratio

OFF = ["evaluation.enabled=false"]
ON = ["evaluation.enabled=true", "evaluation.every=5"]


def main() -> None:
    sync_vs_async.command(__doc__ or "", measure, seeds=[1, 2, 3])


def measure(seeds: Sequence[int], overrides: Sequence[str]) -> dict[str, Any]:
    common = ["launch.devices=1", *overrides]
    arms = sync_vs_async.run_arms("cpu-async", {"off": OFF, "on": ON}, seeds, common)
    speeds = {arm: sync_vs_async.speeds(summaries) for arm, summaries in arms.items()}
    ratio = paired_ratio(speeds["on"], speeds["off"])
    return {
        "on_over_off": round(ratio.median, 3),
        "interval": sync_vs_async.shown(ratio),
        "effective_tokens_per_s": {
            arm: {seed: round(speed) for seed, speed in values.items()} for arm, values in speeds.items()
        },
        "seeds": list(seeds),
    }


if __name__ == "__main__":
    main()
