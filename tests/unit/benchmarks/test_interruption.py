"""The arithmetic of the interruption benchmark: what is run, which steps count."""

from __future__ import annotations

from areal_core.config.schema import load
from benchmarks.interruption import window


def test_a_run_counts_from_its_third_until_nothing_is_admitted() -> None:
    config = load({"training": {"steps": 10}, "rollout": {"max_staleness": 2}})
    ends = {step: float(step) for step in range(1, 11)}
    assert window(config, ends) == (4, 7)  # the version after which nothing is admitted: 7 + 2 + 1 = 10
    assert window(config, {step: ends[step] for step in range(1, 7)}) == (2, 6)
    assert window(config, {}) == (0, 0)
