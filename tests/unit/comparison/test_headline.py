"""The few figures that a terminal and MLflow's run of the comparison show, against values by hand."""

from __future__ import annotations

import dataclasses

import pytest

from flows.comparison.headline import metrics, result_table, result_title
from flows.comparison.plan import Arm, plan
from flows.comparison.trials import TrialResult
from tests.support.comparison import failed, made_up

_ARMS = (Arm(name="sync", overrides=("mode=sync",)), Arm(name="async-1", overrides=("mode=async",)))
_SPEED = {  # arm -> seed -> effective tokens/s; ratios 1.5, 1.25, 2
    "sync": {1: 100.0, 2: 200.0, 3: 4000.0},
    "async-1": {1: 150.0, 2: 250.0, 3: 8000.0},
}


def _results() -> list[TrialResult]:
    arms = {arm.name: arm.overrides for arm in _ARMS}
    results = []
    for trial in plan("study", "cpu-async", arms, [1, 2, 3], ["training.steps=10"]):
        result = made_up(trial)
        assert result.summary is not None
        known = {"effective_tokens_per_s": _SPEED[trial.arm][trial.seed], "accuracy_after": 0.9 + trial.seed / 100}
        results.append(dataclasses.replace(result, summary=dataclasses.replace(result.summary, **known)))
    return results


def test_table_has_speed_ratio_score_and_trials_of_every_arm() -> None:
    assert result_table(_ARMS, _results()) == [
        {
            "arm": "sync",
            "effective tokens/s": "200 [100, 4,000]",
            "against sync": "reference",
            "final score": "0.920 [0.910, 0.930]",
            "succeeded": "3 of 3",
            "intervals": "75 %",
        },
        {
            "arm": "async-1",
            "effective tokens/s": "250 [150, 8,000]",
            "against sync": "1.50x [1.25, 2.00] higher",
            "final score": "0.920 [0.910, 0.930]",
            "succeeded": "3 of 3",
            "intervals": "75 %; against sync 75 %",
        },
    ]


def test_failed_trials_are_said_and_leave_their_pair_out() -> None:
    results = [
        failed(result.trial, "lost") if (result.trial.arm, result.trial.seed) == ("sync", 3) else result
        for result in _results()
    ]
    sync, other = result_table(_ARMS, results)
    assert (sync["succeeded"], other["succeeded"]) == ("2 of 3", "3 of 3")
    assert other["against sync"] == "1.38x [1.25, 1.50] higher"
    assert (sync["intervals"], other["intervals"]) == ("50 %", "75 %; against sync 50 %")


def test_arm_without_a_trial_has_dashes() -> None:
    results = [failed(result.trial, "lost") for result in _results()]
    assert [row["effective tokens/s"] for row in result_table(_ARMS, results)] == ["-", "-"]
    assert [row["succeeded"] for row in result_table(_ARMS, results)] == ["0 of 3"] * 2
    assert metrics(_ARMS, results) == {}


def test_one_seed_gives_no_verdict() -> None:
    results = [result for result in _results() if result.trial.seed == 1]
    assert result_table(_ARMS, results)[1]["against sync"] == "1.50x (one seed)"


def test_title_says_how_to_read_the_table() -> None:
    results = _results()
    assert result_title("study", _ARMS, results) == (
        "Result of study: medians [intervals]; at the end how probably these hold the true median"
    )
    assert result_title("study", _ARMS, results[:2]) == "Result of study"


def test_metrics_hold_ratios_and_differences_with_their_intervals() -> None:
    found = metrics(_ARMS, _results())
    speed = "comparison/async-1.effective_tokens_per_s.ratio"
    assert [found[key] for key in (speed, f"{speed}.low", f"{speed}.high")] == [1.5, 1.25, 2.0]
    assert found["comparison/async-1.final_score.difference"] == pytest.approx(0.0)
    assert "comparison/async-1.wall_time.ratio" in found
    assert {key.partition("/")[0] for key in found} == {"comparison"}
    assert not any("sync." in key.removeprefix("comparison/async-1.") for key in found)


def test_score_that_a_trial_never_reached_is_no_metric() -> None:
    arms = {arm.name: arm.overrides for arm in _ARMS}
    trials = plan("study", "cpu-async", arms, [1, 2, 3], ["stop.score=0.8"])
    timed = [_timed(made_up(trial), 5.0) for trial in trials]
    assert metrics(_ARMS, timed)["comparison/async-1.time_to_score_0_8.ratio"] == 1.0
    timed[0] = _timed(timed[0], None)
    assert not [key for key in metrics(_ARMS, timed) if "time_to_score" in key]


def test_emulated_times_are_metrics_too() -> None:
    arms = {arm.name: arm.overrides for arm in _ARMS}
    trials = plan("study", "cpu-async", arms, [1], ["generation.engine=emulated", "training.engine=emulated"])
    assert "comparison/async-1.wall_time.ratio" in metrics(_ARMS, [made_up(trial) for trial in trials])


def _timed(result: TrialResult, time_to_score_s: float | None) -> TrialResult:
    assert result.summary is not None
    return dataclasses.replace(result, summary=dataclasses.replace(result.summary, time_to_score_s=time_to_score_s))
