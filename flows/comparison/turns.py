"""Which trials really were neighbours in time: what a plan says about turns holds for what was run together only."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from flows.comparison.trials import TrialResult


def apart(results: Sequence[TrialResult], reference: str) -> dict[str, list[int]]:
    """Arm -> seeds whose trial did not run beside the reference's of the same seed.

    Beside: between the starts of the two no trial of another seed began, and the machine never stood still for longer
    than the longest trial took. Trials without spans say nothing.
    """
    when = {(r.trial.arm, r.trial.seed): _when(r) for r in results if r.spans}
    if not when:
        return {}
    patience_s = max(end - start for start, end in when.values())
    found: dict[str, list[int]] = {}
    for arm, seed in when:
        if arm == reference or (reference, seed) not in when:
            continue
        first, last = sorted((when[arm, seed][0], when[reference, seed][0]))
        others = [start for (_, other), (start, _) in when.items() if other != seed]
        own = sorted(times for (_, other), times in when.items() if other == seed and first <= times[0] <= last)
        pause_s = max((after[0] - before[1] for before, after in pairwise(own)), default=0.0)
        if any(first < start < last for start in others) or pause_s > patience_s:
            found.setdefault(arm, []).append(seed)
    return {arm: sorted(seeds) for arm, seeds in found.items()}


def _when(result: TrialResult) -> tuple[float, float]:
    """First start and last end, seconds since the epoch."""
    return min(span.start_s for span in result.spans), max(span.end_s for span in result.spans)
