"""Whose trials ran beside those of the reference, by hand on made-up times."""

from __future__ import annotations

import dataclasses

from areal_core.config.schema import RunConfig
from areal_core.tracking.timeline import Span
from flows.comparison.plan import Trial
from flows.comparison.trials import TrialResult
from flows.comparison.turns import apart
from tests.support.comparison import failed


def _results(*ran: tuple[str, int], pauses: dict[int, float] | None = None) -> list[TrialResult]:
    """Trials (arm, seed) of 10 s one after the other; `pauses` before the trial at an index, seconds."""
    results: list[TrialResult] = []
    now = 1e9
    for index, (arm, seed) in enumerate(ran):
        now += (pauses or {}).get(index, 1.0)
        trial = Trial(arm=arm, seed=seed, run_id=f"t.{arm}.s{seed}", config=RunConfig())
        spans = [Span(process="trainer-0", kind="train", start_s=now, end_s=now + 10.0)]
        results.append(dataclasses.replace(failed(trial, "of no matter"), spans=spans))
        now += 10.0
    return results


def test_trials_in_turns_are_beside_each_other() -> None:
    assert apart(_results(("a", 1), ("b", 1), ("c", 1), ("b", 2), ("c", 2), ("a", 2)), "a") == {}


def test_an_arm_that_was_added_later_is_named_with_its_seeds() -> None:
    both = [("a", 1), ("b", 1), ("b", 2), ("a", 2)]
    assert apart(_results(*both, ("c", 1), ("c", 2)), "a") == {"c": [1, 2]}
    assert apart(_results(*both, ("c", 2), ("c", 1)), "a") == {"c": [1]}  # that of seed 2 came right after the others


def test_a_pause_longer_than_any_trial_parts_what_it_lies_between() -> None:
    ran = (("a", 1), ("b", 1), ("b", 2), ("a", 2))
    assert apart(_results(*ran, pauses={3: 11.0}), "a") == {"b": [2]}
    assert apart(_results(*ran, pauses={2: 1e6}), "a") == {}  # between two seeds, which are not compared
    assert apart(_results(*ran, pauses={3: 9.0}), "a") == {}


def test_trials_without_spans_say_nothing() -> None:
    trial = Trial(arm="b", seed=1, run_id="t.b.s1", config=RunConfig())
    assert apart([*_results(("a", 1)), failed(trial, "never began")], "a") == {}
    assert apart([failed(trial, "never began")], "a") == {}
