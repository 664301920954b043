"""How much does concurrent evaluation slow the training? Pairs of runs, interleaved in time.

    make bench NAME=evaluation ARGS="--seeds 1,2,3"

All runs generate and train on one core. `on_over_off` is effective tokens/s of runs whose evaluator scores every fifth
version on all held-out prompts, on the other core, over those of runs without evaluation: the median over seeds of the
ratio within a seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from areal_core.run.launcher import execute
from benchmarks import _harness
from benchmarks.sync_vs_async import command, shown
from flows.comparison.intervals import paired_ratio
from flows.compose import compose

ARMS = {"off": ["evaluation.enabled=false"], "on": ["evaluation.every=5"]}


def main() -> None:
    command(__doc__ or "", measure, seeds=[1, 2, 3])


def measure(seeds: Sequence[int], overrides: Sequence[str]) -> dict[str, Any]:
    speeds: dict[str, dict[int, float]] = {arm: {} for arm in ARMS}
    with _harness.scratch_runs() as scratch:
        for turn, seed in enumerate([seeds[0], *seeds]):  # the first pair warms up the base model, and does not count
            for arm in _harness.in_turns(list(ARMS), turn):
                settings = [*scratch, "launch.devices=1", f"seed={seed}", *ARMS[arm], *overrides]
                summary = execute(compose("cpu-async", settings), run_id=f"{turn}-{arm}", log=_harness.tell)
                speeds[arm][seed] = summary.effective_tokens_per_s
    ratio = paired_ratio(speeds["on"], speeds["off"])
    return {
        "on_over_off": round(ratio.median, 3),
        "interval": shown(ratio),
        "effective_tokens_per_s": {
            arm: {seed: round(speed) for seed, speed in values.items()} for arm, values in speeds.items()
        },
        "seeds": list(seeds),
    }


if __name__ == "__main__":
    main()
