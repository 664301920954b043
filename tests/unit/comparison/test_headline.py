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
        },
        {
            "arm": "async-1",
            "effective tokens/s": "250 [150, 8,000]",
            "against sync": "1.50x [1.25, 2.00] higher",
            "final score": "0.920 [0.910, 0.930]",
            "succeeded": "3 of 3",
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


def test_arm_without_a_trial_has_dashes() -> None:
    results = [failed(result.trial, "lost") for result in _results()]
    assert [row["effective tokens/s"] for row in result_table(_ARMS, results)] == ["-", "-"]
    assert [row["succeeded"] for row in result_table(_ARMS, results)] == ["0 of 3"] * 2
    assert metrics(_ARMS, results) == {}


def test_one_seed_gives_no_verdict() -> None:
    results = [result for result in _results() if result.trial.seed == 1]
    assert result_table(_ARMS, results)[1]["against sync"] == "1.50x (one seed)"


def test_title_says_how_far_the_intervals_can_be_trusted() -> None:
    results = _results()
    assert result_title("study", _ARMS, results) == "Result of study: medians over 3 seeds, intervals of 75 %"
    two = [failed(result.trial, "lost") if result.trial.run_id == "study-sync-s3" else result for result in results]
    assert result_title("study", _ARMS, two) == "Result of study: medians over 2 seeds, intervals of 50 %"
    assert result_title("study", _ARMS, results[:2]) == "Result of study"


def test_metrics_hold_ratios_and_differences_with_their_intervals() -> None:
    found = metrics(_ARMS, _results())
    speed = "comparison/async-1.effective_tokens_per_s.ratio"
    assert [found[key] for key in (speed, f"{speed}.low", f"{speed}.high")] == [1.5, 1.25, 2.0]
    assert found["comparison/async-1.final_score.difference"] == pytest.approx(0.0)
    assert "comparison/async-1.wall_time.ratio" in found
    assert {key.partition("/")[0] for key in found} == {"comparison"}
    assert not any("sync." in key.removeprefix("comparison/async-1.") for key in found)
