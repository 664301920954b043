"""Numbers of a trial, by hand on made-up data."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from areal_core.config.schema import RunConfig, load
from areal_core.tracking.timeline import Span
from flows.comparison.measures import (
    common_target,
    devices_idle,
    effect_of,
    in_ring_order,
    measures,
    rl_window,
    succeeded,
    time_to_score,
    unreached,
    values_by_seed,
    weighted_by_time,
)
from flows.comparison.plan import Trial
from flows.comparison.trials import TrialResult
from tests.support.comparison import failed, made_up


def _trial(arm: str = "sync", seed: int = 1, **groups: Any) -> Trial:
    return Trial(arm=arm, seed=seed, run_id=f"t.{arm}.s{seed}", config=dataclasses.replace(RunConfig(), **groups))


def _result(*, trial: Trial | None = None, spans: Any = (), wall_s: float = 10.0, **curves: Any) -> TrialResult:
    known = made_up(trial or _trial())
    assert known.summary is not None
    return dataclasses.replace(
        known,
        summary=dataclasses.replace(known.summary, rl_wall_s=wall_s, accuracy_before=0.1),
        curves={name.replace("__", "/"): points for name, points in curves.items()},
        spans=[Span(process=p, kind=k, start_s=a, end_s=b) for p, k, a, b in spans],
    )


def test_shares_of_time_weigh_steps_by_how_long_they_took() -> None:
    result = _result(time__step_s=[(1, 1.0), (2, 3.0), (3, 4.0)], bubble__trainer_wait=[(1, 1.0), (2, 0.2)])
    assert weighted_by_time(result, "bubble/trainer_wait") == pytest.approx((1.0 + 0.6) / 4.0)
    assert weighted_by_time(result, "bubble/generation_idle") is None


def test_time_to_score_is_that_of_the_first_version_that_reached_it() -> None:
    result = _result(
        time__elapsed_s=[(1, 2.0), (2, 3.0), (3, 5.0)],
        heldout__accuracy=[(0, 0.1), (1, 0.6), (2, 0.9), (3, 0.7)],
    )
    assert [time_to_score(result, target) for target in (0.05, 0.6, 0.7, 0.95)] == [0.0, 2.0, 3.0, None]


def test_a_stop_score_is_timed_by_the_run_itself() -> None:
    trial = _trial(stop=dataclasses.replace(RunConfig().stop, score=0.8))
    result = _result(trial=trial, time__elapsed_s=[(1, 2.0)], heldout__accuracy=[(1, 0.9)])
    assert result.summary is not None
    timed = dataclasses.replace(result, summary=dataclasses.replace(result.summary, time_to_score_s=1.5))
    assert time_to_score(timed, 0.8) == 1.5
    assert common_target([timed]) == 0.8


def test_target_is_the_highest_that_every_trial_reached() -> None:
    def run(seed: int, best: float) -> TrialResult:
        scores = [(0, 0.1), (1, best)]
        return _result(trial=_trial(seed=seed), time__elapsed_s=[(1, 2.0)], heldout__accuracy=scores)

    assert common_target([run(1, 0.96), run(2, 0.91)]) == 0.9
    assert common_target([run(1, 0.96), run(2, 0.91), failed(_trial(seed=3), "dead")]) == 0.9
    assert common_target([run(1, 0.96), run(2, 0.4)]) is None
    assert common_target([failed(_trial(), "dead")]) is None
    base_has_it = run(1, 0.8)
    assert base_has_it.summary is not None
    known = dataclasses.replace(base_has_it.summary, accuracy_before=0.76)
    assert common_target([dataclasses.replace(base_has_it, summary=known)]) is None  # nothing was learnt for 0.75


_WINDOW = ("trainer-0", "publish", 109.0, 110.0)  # wall time 10 s: from 100 to 110


def test_devices_are_idle_where_nobody_is_busy() -> None:
    """2 devices x 10 s = 20; busy: 4 + 3 + 2 = 9."""
    result = _result(
        spans=[
            ("generation-0", "generate", 98.0, 104.0),  # 4 s of it in the window
            ("generation-1", "generate", 101.0, 104.0),
            ("generation-0", "wait", 104.0, 110.0),
            ("generation-1", "update", 104.0, 110.0),
            ("trainer-1", "train", 107.0, 109.0),
            ("evaluator-0", "evaluate", 100.0, 110.0),  # beside the devices
            _WINDOW,
            ("trainer-0", "checkpoint", 110.0, 115.0),  # after the end
        ]
    )
    assert rl_window(result) == (100.0, 110.0)
    assert devices_idle(result) == pytest.approx(0.55)


def test_more_work_than_devices_is_not_less_than_no_idleness() -> None:
    crowd = [(f"generation-{index}", "generate", 100.0, 110.0) for index in range(4)]
    assert devices_idle(_result(spans=[*crowd, _WINDOW])) == 0.0
    first = [(process, kind, start, 105.0) for process, kind, start, _ in crowd]  # four at two devices, then nobody
    assert devices_idle(_result(spans=[*first, ("trainer-0", "publish", 109.999, 110.0)])) == pytest.approx(
        0.5, abs=1e-3
    )
    assert devices_idle(_result(spans=crowd)) is None  # no version, hence no window


def test_values_are_by_seed_and_leave_out_what_is_missing() -> None:
    config = RunConfig()
    results = [made_up(_trial("sync", 1)), made_up(_trial("async", 1)), failed(_trial("sync", 2), "dead")]
    results.append(dataclasses.replace(made_up(_trial("sync", 3)), curves={"time/step_s": [(1, float("nan"))]}))
    assert [r.trial.seed for r in succeeded(results, "sync")] == [1, 3]
    assert len(succeeded(results)) == 3
    by_name = {row.name: row for row in measures(config, 0.9)}
    assert set(values_by_seed(by_name["wall time"], results, "sync")) == {1, 3}
    assert set(values_by_seed(by_name["time to score 0.9"], results, "sync")) == {1}
    assert set(values_by_seed(by_name["trainer waits"], results, "sync")) == {1}
    summary = results[0].summary
    assert summary is not None
    assert values_by_seed(by_name["effective tokens/s"], results, "sync")[1] == summary.effective_tokens_per_s
    assert (
        values_by_seed(by_name["generated tokens/s per device"], results, "sync")[1]
        == summary.generated_tokens_per_s / 2
    )


_EMULATED = load(
    {
        "generation": {"engine": "emulated"},
        "training": {"engine": "emulated", "ranks": 2},
        "launch": {"devices": 4},
        "emulation": {"speed": 50.0},
    }
)


def test_runs_that_nobody_scores_have_no_scores() -> None:
    config = load({"evaluation": {"enabled": False}})
    assert {row.name for row in measures(RunConfig(), 0.9)} - {row.name for row in measures(config, None)} == {
        "time to score 0.9",
        "final score",
    }
    assert common_target([made_up(Trial(arm="a", seed=1, run_id="r", config=config))]) is None


def test_emulated_runs_have_no_scores_and_the_time_of_their_cluster() -> None:
    rows = {row.name: row for row in measures(_EMULATED, None)}
    assert {row.name for row in measures(RunConfig(), 0.9)} - rows.keys() == {"time to score 0.9", "final score"}
    assert rows["wall time"].label == "wall time, emulated s"
    assert rows["effective tokens/s"].label == "effective tokens/s, emulated"
    result = made_up(Trial(arm="a", seed=1, run_id="r", config=_EMULATED))
    assert common_target([result]) is None
    assert result.summary is not None
    assert values_by_seed(rows["wall time"], [result], "a") == {1: 50.0 * result.summary.rl_wall_s}


def test_an_emulated_trainer_stands_for_all_of_its_ranks() -> None:
    """4 devices x 10 s; the trainer's 4 s are those of 2 ranks, and a server has 10: 18 of 40 device-seconds."""
    spans = [("generation-0", "generate", 100.0, 110.0), ("trainer-0", "train", 105.0, 109.0), _WINDOW]
    trial = Trial(arm="a", seed=1, run_id="r", config=_EMULATED)
    assert devices_idle(_result(trial=trial, spans=spans)) == pytest.approx(0.55)


def test_processes_are_read_in_the_order_of_the_ring() -> None:
    names = ["trainer-0", "evaluator-0", "generation-10", "generation-9"]
    assert sorted(names, key=in_ring_order) == ["generation-9", "generation-10", "trainer-0", "evaluator-0"]


def test_devices_of_a_resumed_run_are_not_judged() -> None:
    result = _result(spans=[("generation-0", "generate", 100.0, 105.0), _WINDOW])
    assert result.summary is not None
    assert devices_idle(result) is not None
    assert devices_idle(dataclasses.replace(result, summary=dataclasses.replace(result.summary, starts=2))) is None


def test_nothing_is_compared_with_an_arm_that_did_not_reach_it() -> None:
    def run(arm: str, seed: int, best: float) -> TrialResult:
        scores = [(0, 0.1), (1, best)]
        return _result(trial=_trial(arm, seed), time__elapsed_s=[(1, float(seed))], heldout__accuracy=scores)

    (timed,) = [row for row in measures(RunConfig(), 0.9) if row.name == "time to score 0.9"]
    reached = [run("sync", 1, 0.95), run("sync", 2, 0.95), run("async", 1, 0.95), run("async", 2, 0.95)]
    assert effect_of(timed, reached, "async", "sync") is not None
    for index, result in enumerate(reached):
        missed = [*reached]
        missed[index] = run(result.trial.arm, result.trial.seed, 0.4)
        assert effect_of(timed, missed, "async", "sync") is None
        assert unreached(timed, missed, result.trial.arm) == 1
    crashed = [*reached[:3], failed(_trial("async", 2), "dead")]  # which says nothing about its learning
    assert effect_of(timed, crashed, "async", "sync") is not None
