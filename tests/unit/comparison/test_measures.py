"""Numbers of a trial, by hand on made-up data; intervals have the coverage that they claim, paired by seed."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

from areal_core.config.schema import RunConfig, load
from flows.comparison.design import Trial
from flows.comparison.intervals import Interval, median_interval, paired_difference, paired_ratio, verdict
from flows.comparison.measures import (
    common_target,
    effect_of,
    measures,
    time_to_score,
    unreached,
    values_by_seed,
    weighted_by_time,
)
from flows.comparison.trials import TrialResult
from tests.support.comparison import failed, made_up


def _trial(arm: str = "sync", seed: int = 1, config: RunConfig | None = None) -> Trial:
    return Trial(arm=arm, seed=seed, run_id=f"t.{arm}.s{seed}", config=config or RunConfig())


def _result(trial: Trial | None = None, *, known: Any = (), **curves: Any) -> TrialResult:
    result = made_up(trial or _trial(), **{"accuracy_before": 0.1, **dict(known)})
    return dataclasses.replace(result, curves={name.replace("__", "/"): points for name, points in curves.items()})


def _scored(arm: str, seed: int, best: float, base: float = 0.1) -> TrialResult:
    scores, known = [(0, base), (1, best)], {"accuracy_before": base}
    return _result(_trial(arm, seed), known=known, time__elapsed_s=[(1, float(seed))], heldout__accuracy=scores)


def test_shares_of_time_weigh_steps_by_how_long_they_took() -> None:
    result = _result(time__step_s=[(1, 1.0), (2, 3.0), (3, 4.0)], bubble__trainer_wait=[(1, 1.0), (2, 0.2)])
    assert weighted_by_time(result, "bubble/trainer_wait") == pytest.approx((1.0 + 0.6) / 4.0)
    assert weighted_by_time(result, "bubble/generation_idle") is None


def test_time_to_score_is_that_of_the_first_version_that_reached_it() -> None:
    result = _result(
        time__elapsed_s=[(1, 2.0), (2, 3.0), (3, 5.0)], heldout__accuracy=[(0, 0.1), (1, 0.6), (2, 0.9), (3, 0.7)]
    )
    assert [time_to_score(result, target) for target in (0.05, 0.6, 0.7, 0.95)] == [0.0, 2.0, 3.0, None]
    trial = _trial(config=load({"stop": {"score": 0.8}}))  # which the run times itself
    timed = _result(trial, known={"time_to_score_s": 1.5}, time__elapsed_s=[(1, 2.0)], heldout__accuracy=[(1, 0.9)])
    assert (time_to_score(timed, 0.8), common_target([timed])) == (1.5, 0.8)


def test_target_is_the_highest_that_every_trial_reached_by_training() -> None:
    assert common_target([_scored("a", 1, 0.96), _scored("a", 2, 0.91), failed(_trial(seed=3), "dead")]) == 0.9
    assert common_target([_scored("a", 1, 0.96), _scored("a", 2, 0.4)]) is None
    assert common_target([_scored("a", 1, 0.8, base=0.76)]) is None
    assert common_target([failed(_trial(), "dead")]) is None


def test_emulated_and_unscored_runs_have_no_scores() -> None:
    unscored = load({"evaluation": {"enabled": False}})
    shown = {row.name for row in measures([made_up(_trial(config=unscored))])}
    assert not {"time to score 0.75", "final score"} & shown
    emulated = {"generation": {"engine": "emulated"}, "training": {"engine": "emulated"}, "emulation": {"speed": 50.0}}
    result = made_up(_trial(config=load(emulated)))
    rows = {row.name: row for row in measures([result])}
    assert {row.name for row in measures([made_up(_trial())])} - rows.keys() == {"time to score 0.75", "final score"}
    assert rows["effective tokens/s"].label == "effective tokens/s, emulated"
    assert rows["wall time"].label == "wall time, emulated s"
    assert values_by_seed(rows["wall time"], [result], "sync") == {1: 50.0 * 25}


def test_nothing_is_compared_with_an_arm_that_did_not_reach_it() -> None:
    reached = [_scored("sync", 1, 0.95), _scored("sync", 2, 0.95), _scored("async", 1, 0.95), _scored("async", 2, 0.95)]
    (timed,) = [row for row in measures(reached) if row.name == "time to score 0.95"]
    assert effect_of(timed, reached, "async", "sync") is not None
    for index, result in enumerate(reached):
        missed = [*reached]
        missed[index] = _scored(result.trial.arm, result.trial.seed, 0.4)
        assert effect_of(timed, missed, "async", "sync") is None
        assert unreached(timed, missed, result.trial.arm) == 1
    crashed = [*reached[:3], failed(_trial("async", 2), "dead")]  # which says nothing about its learning
    assert effect_of(timed, crashed, "async", "sync") is not None


@pytest.mark.parametrize(
    ("n", "coverage", "low", "high"),
    [
        (1, 0.0, 1, 1),
        (5, 0.9375, 1, 5),
        (8, 0.9921875, 1, 8),
        (9, 0.9609375, 2, 8),
        (20, 1 - 2 * 21700 / 2**20, 6, 15),  # 1 + 20 + 190 + 1140 + 4845 + 15504 of 2^20 below the 6th
    ],
)
def test_narrowest_interval_that_covers_enough_else_the_whole_range(n: int, coverage: float, low: int, high: int):
    values = list(range(1, n + 1))
    random.Random(n).shuffle(values)
    interval = median_interval(values)
    assert (interval.median, interval.low, interval.high, interval.n) == ((n + 1) / 2, low, high, n)
    assert interval.coverage == pytest.approx(coverage, abs=1e-12)


@pytest.mark.parametrize("values", [[], [1.0, float("nan")], [float("inf")]])
def test_values_without_an_interval_are_refused(values: list[float]) -> None:
    with pytest.raises(ValueError, match="finite"):
        median_interval(values)


def test_ratio_is_the_median_of_ratios_and_not_the_ratio_of_medians() -> None:
    reference = {1: 10.0, 2: 100.0, 3: 20.0}
    values = {1: 20.0, 2: 110.0, 3: 30.0}  # 2, 1.1, 1.5
    interval = paired_ratio(values, reference)
    assert (interval.median, interval.low, interval.high, interval.n) == (1.5, 1.1, 2.0, 3)
    assert interval.coverage == 0.75
    assert paired_ratio({**values, 1: 40.0}, reference).median == 1.5  # the ratio of medians is 2


def test_seeds_without_a_partner_are_left_out_and_counted() -> None:
    interval = paired_difference({1: 5.0, 2: 7.0, 4: 1000.0}, {1: 4.0, 2: 4.0, 3: -1000.0})
    assert (interval.median, interval.low, interval.high, interval.n, interval.coverage) == (2.0, 1.0, 3.0, 2, 0.5)


@pytest.mark.parametrize(
    ("low", "high", "neutral", "expected"),
    [
        (1.01, 1.5, 1.0, "higher"),
        (1.0, 1.5, 1.0, "no difference"),
        (0.0, 0.0, 0.0, "no difference"),
        (-0.002, -0.001, 0.0, "lower"),
    ],
)
def test_no_difference_where_the_neutral_value_lies_inside_or_on_the_edge(
    low: float, high: float, neutral: float, expected: str
) -> None:
    assert verdict(median_interval([2.0]), 1.0) == "no difference"  # one value says nothing
    assert verdict(Interval(median=(low + high) / 2, low=low, high=high, coverage=0.75, n=3), neutral) == expected
