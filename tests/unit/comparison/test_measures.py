"""Numbers of a trial, by hand on made-up data; intervals have the coverage that they claim, paired by seed; the report
says what was compared, what failed, what differs and how sure that is."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import pytest

from areal_core.config.schema import RunConfig, load
from flows.comparison.design import Comparison, Trial
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
from flows.comparison.report import EMULATED, metrics, report_page, result_table, result_title
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


_ARMS = {"sync": ["mode=sync"], "async-1": ["mode=async", "rollout.max_staleness=1"]}


def _trials(seeds: Sequence[int] = (1, 2, 3), *overrides: str) -> list[Trial]:
    return Comparison("study", "cpu-async", _ARMS, seeds, ["training.steps=10", *overrides]).trials()


def _known(trial: Trial, **known: float) -> TrialResult:
    """Throughputs of 100, 200, 400 by seed; the other arm is faster by 1.5, 1.25, 2; the scores straddle."""
    base = {1: 100.0, 2: 200.0, 3: 400.0}[trial.seed]
    factor = 1.0 if trial.arm == "sync" else {1: 1.5, 2: 1.25, 3: 2.0}[trial.seed]
    score = 0.9 if trial.arm == "sync" else {1: 0.89, 2: 0.9, 3: 0.92}[trial.seed]
    return made_up(trial, **{"effective_tokens_per_s": base * factor, "accuracy_after": score, **known})


def _row(page: str, start: str) -> list[str]:
    """Cells of the table of results in the row that starts so."""
    (line,) = [line for line in page.split("## Results")[1].splitlines() if line.startswith(f"| {start} |")]
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_table_holds_medians_intervals_ratios_and_verdicts() -> None:
    page = report_page("study", _ARMS, [_known(trial) for trial in _trials()])
    assert _row(page, "effective tokens/s") == ["200 [100, 400]", "250 [150, 800]; 1.50x [1.25, 2.00] higher"]
    assert _row(page, "final score, held-out accuracy") == [
        "0.900 [0.900, 0.900]",
        "0.900 [0.890, 0.920]; +0.000 [-0.010, +0.020] no difference",
    ]
    assert _row(page, "trainer waits, % of time")[1] == "30.0 [30.0, 30.0]; -30.0 [-30.0, -30.0] lower"
    assert "An interval of 3 values contains the true median with 75 %" in page
    assert "Seeds 1, 2, 3, the same in every arm; 6 trials." in page
    assert "5,120 trajectories a trial" in page
    assert "| sync | mode=sync |  | 2 + 2 | 3 of 3 |" in page
    settings = r"mode=async rollout.max\_staleness=1 | mode, rollout.max\_staleness"
    assert f"| async-1 | {settings} | 2 + 2 | 3 of 3 |" in page
    assert "Failed" not in page
    assert EMULATED not in page


def test_failed_and_resumed_trials_come_first_and_an_arm_speaks_of_fewer_seeds() -> None:
    results = [_known(trial, starts=1 + (trial.run_id == "study.sync.s2")) for trial in _trials()]
    results = [failed(r.trial, "no new_step") if r.trial.run_id == "study.async-1.s3" else r for r in results]
    page = report_page("study", _ARMS, results)
    assert page.index(r"- async-1, seed 3: no new\_step") < page.index("## Results")
    assert page.index("- sync, seed 2: resumed: its times include repeated work") < page.index("## Results")
    fewer = "200 [150, 250] (n=2: 50 %); 1.38x [1.25, 1.50] (n=2: 50 %) higher"
    assert _row(page, "effective tokens/s") == ["200 [100, 400]", fewer]


@pytest.mark.parametrize(
    ("lost", "cells"),
    [
        ({("sync", 1), ("async-1", 2)}, "475 [150, 800] (n=2: 50 %); 2.00x (n=1)"),  # two seeds each, and one pair
        ({("sync", seed) for seed in (1, 2, 3)}, "250 [150, 800]"),
        ({("async-1", seed) for seed in (1, 2, 3)}, "-"),
    ],
)
def test_only_pairs_are_compared(lost: set[tuple[str, int]], cells: str) -> None:
    results = [failed(t, "dead") if (t.arm, t.seed) in lost else _known(t) for t in _trials()]
    assert _row(report_page("study", _ARMS, results), "effective tokens/s")[1] == cells


def test_difference_too_small_to_be_shown_has_no_sign_and_ratio_to_nothing_is_left_out() -> None:
    def cell(row: str, field: str, sync: float, other: float) -> str:
        results = [_known(trial, **{field: sync if trial.arm == "sync" else other}) for trial in _trials()]
        return _row(report_page("study", _ARMS, results), row)[1]

    score = "final score, held-out accuracy"
    assert "+0.000 [+0.000, +0.000]" in cell(score, "accuracy_after", 0.9, 0.8999999)
    assert "-0.100 [-0.100, -0.100] lower" in cell(score, "accuracy_after", 0.9, 0.8)
    assert cell("effective tokens/s", "effective_tokens_per_s", 0.0, 1.0) == "1.00 [1.00, 1.00]"


def test_emulated_accelerators_are_announced_before_anything_else() -> None:
    trials = _trials([1, 2], "generation.engine=emulated", "training.engine=emulated")
    results = [made_up(trial) for trial in trials]
    page = report_page("study", _ARMS, results)
    assert page.index(EMULATED) < page.index("Experiment cpu")
    assert "score" not in page.split("## Results")[1].split("\n\n")[1]
    assert "qwen-1.5b on 2 h800" in page
    assert result_title("study", _ARMS, results).startswith(EMULATED)


def test_headline_has_speed_ratio_score_and_trials_of_every_arm() -> None:
    results = [_known(trial) for trial in _trials()]
    headline = result_table(_ARMS, results)[1]
    assert (headline["arm"], headline["succeeded"]) == ("async-1", "3 of 3")
    assert headline["effective tokens/s"] == "250 [150, 800]; 1.50x [1.25, 2.00] higher"
    assert headline["time to score 0.75, s"] == "8.0 [8.0, 8.0]; 1.00x [1.00, 1.00] no difference"
    assert result_table(_ARMS, results[:2])[1]["effective tokens/s"] == "150; 1.50x"  # one seed gives no verdict
    assert "One seed gives no interval and no verdict" in result_title("study", _ARMS, results[:2])


def test_metrics_hold_ratios_and_differences_with_their_intervals() -> None:
    found = metrics(_ARMS, [_known(trial) for trial in _trials()])
    speed = "comparison/async-1.effective_tokens_per_s.ratio"
    assert [found[key] for key in (speed, f"{speed}.low", f"{speed}.high")] == [1.5, 1.25, 2.0]
    assert found["comparison/async-1.final_score.difference"] == pytest.approx(0.0)
    assert not any("sync." in key and "async" not in key for key in found)
