"""What a run writes down: rates, stop conditions, the summary; and that it survives a restart of the controller."""

from __future__ import annotations

import math
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from areal_core.config.schema import load
from areal_core.controller.core.ledger import Selection, TrajectoryLedger
from areal_core.controller.core.tables import Ending, Place
from areal_core.controller.recorder import BatchMetrics, Recorder
from areal_core.errors import RewardTimeoutError, RewardWorkerError
from areal_core.tracking.outbox import Outbox
from areal_core.types import PolicyVersion
from tests.support.records import evaluation, summary
from tests.support.servers import server_load

CONFIG = load(
    {
        "algorithm": {"group_size": 2},
        "rollout": {"batch_size": 2, "max_staleness": 1},
        "training": {"minibatches": 1, "steps": 4},
        "stop": {"score": 0.8, "minutes": 1.0},
        "tracking": {"table_every": 2},
    }
)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[TrajectoryLedger]:
    opened = TrajectoryLedger(tmp_path / "ledger.sqlite", group_size=2)
    opened.publish(PolicyVersion(version=0, path="base", digest="0"))
    yield opened
    opened.close()


@pytest.fixture
def outbox(tmp_path: Path) -> Iterator[Outbox]:
    opened = Outbox(tmp_path / "outbox.sqlite", "r")
    yield opened
    opened.close()


def train(ledger: TrajectoryLedger, step: int) -> None:
    """A batch of one group with 10 tokens, sampled by version 0, and the version that it makes."""
    group = ledger.admit(version=0)
    metrics = {"environment/turns": (1.0, 2.0), "environment/found": (5.0,)}
    its = summary(lengths=(7, 3), tokens=10, truncated=(False, True), metrics=metrics, task="t")
    ledger.ready(group.group_id, its, Place(segment="a", start=0, bytes=0, crc32=0), version=0)
    assert ledger.fix_batch(step, Selection(groups=1, rule="admit", max_staleness=1, max_requeues=0))
    ledger.publish(PolicyVersion(version=step, path=f"v{step}", digest=str(step)))


def publish(recorder: Recorder, ledger: TrajectoryLedger, step: int) -> None:
    train(ledger, step)
    recorder.record_step(step, [])


def ending(version: int) -> Ending:
    return Ending(reason="steps", version=version, model_url="final")


def test_a_step_is_written_down(ledger: TrajectoryLedger, outbox: Outbox) -> None:
    clock = Clock()
    recorder = Recorder(CONFIG, ledger, outbox, clock=clock)
    recorder.start_clock()
    ledger.counters.join("a", "http://a", 0)
    for kind in (RewardTimeoutError, RewardTimeoutError, RewardWorkerError):
        ledger.drop(ledger.admit(version=0).group_id, kind.drop_reason)
    for step, generated, idle_s in ((1, 10, 0.0), (2, 40, 1.0)):
        clock.now += 2.0
        train(ledger, step)
        manifest = ledger.batch(step)
        assert manifest is not None
        recorder.record_batch(manifest)
        ledger.counters.report("a", 12 * step, 0)
        recorder.record_step(step, [server_load(generated, idle_s)])
    logged = {(key, step): value for key, points in outbox.history().items() for step, value in points}
    assert logged["reward/mean", 2] == 0.5
    assert logged["completion/tokens_mean", 2] == 5.0
    for key in ("reward/mean", "reward/correct", "completion/tokens_mean"):
        assert logged[f"{key}/t", 2] == logged[key, 2]
    assert logged["completion/truncated", 2] == 0.5
    assert (logged["environment/turns", 2], logged["environment/found", 2]) == (1.5, 5.0)
    assert logged["staleness/oldest_token_max", 2] == 1  # sampled by version 0, trained on version 1
    assert logged["staleness/groups_over_bound", 2] == 0
    assert logged["throughput/effective_tokens_per_s", 2] == 5.0
    assert logged["throughput/generated_tokens_per_s", 2] == 15.0
    assert logged["bubble/generation_idle", 2] == 0.5
    assert logged["ledger/consumed_tokens", 2] == 20
    assert logged["ledger/generated_tokens", 2] == 24
    assert logged["ledger/in_flight_tokens", 2] == 24 - 20
    assert logged["weights/recomputed_tokens", 2] == 3
    assert logged["time/elapsed_s", 2] == 4.0
    counted = {key: value for (key, step), value in logged.items() if key.endswith("_groups") and step == 2}
    assert counted == {
        "rollout/dropped_groups": 3,
        "rollout/zero_variance_groups": 0,
        "rollout/reward_failed_groups": 0,
        "rollout/reward_timeout_groups": 2,
        "rollout/reward_worker_died_groups": 1,
    }
    assert [step for step in range(1, 6) if recorder.records_tables(step)] == [1, 2, 4]


def test_metrics_of_ones_own_become_plain_numbers(ledger: TrajectoryLedger, outbox: Outbox) -> None:
    recorder = Recorder(CONFIG, ledger, outbox, clock=Clock())
    own = {"own/single": np.float32(0.5), "own/count": np.int64(3), "own/tensor": torch.tensor(2), "own/nan": np.nan}
    recorder._batch_metrics = lambda groups: own
    train(ledger, 1)
    recorder.record_batch(ledger.batch(1))
    found = {key: value for key, ((_, value),) in outbox.history().items() if key.startswith("own/")}
    assert math.isnan(found.pop("own/nan"))
    assert [(type(value), value) for value in found.values()] == [(float, 3.0), (float, 0.5), (float, 2.0)]


@pytest.mark.parametrize(
    ("own", "said"),
    [
        (lambda groups: {"own/good": 1.0, "own/bad": None}, "metric 'own/bad': must be a number, got None"),
        (
            lambda groups: {}["own"],
            "tracking.batch_metrics: None must return a mapping of names to numbers, without an error, "
            "got KeyError('own')",
        ),
    ],
)
def test_a_metric_of_ones_own_that_is_no_number_is_named_and_ends_nothing(
    ledger: TrajectoryLedger, outbox: Outbox, caplog: pytest.LogCaptureFixture, own: BatchMetrics, said: str
) -> None:
    recorder = Recorder(CONFIG, ledger, outbox, clock=Clock())
    recorder._batch_metrics = own
    train(ledger, 1)
    recorder.record_batch(ledger.batch(1))
    assert f"tracking: could not record metrics: {said}" in caplog.text
    assert outbox.history()["reward/mean"] == [(1, 0.5)]


def test_messages_of_folded_steps_that_come_once_more_change_nothing(ledger: TrajectoryLedger, outbox: Outbox) -> None:
    recorder = Recorder(CONFIG, ledger, outbox, clock=Clock())
    for step in (1, 2, 3, 4):
        publish(recorder, ledger, step)
        recorder.record_staleness(step, {"0": 10})
    ledger.free(4)
    while ledger.prune():
        pass
    assert [ledger.notes.published_s(step) is None for step in (1, 2, 3, 4)] == [True, True, False, False]
    assert all(recorder.has_recorded_step(step) for step in (1, 2, 3, 4))
    recorder.record_staleness(1, {"0": 10})
    recorder.record_staleness(4, {"0": 10})
    assert ledger.notes.staleness() == {"0": 40}


def test_the_run_stops_at_its_score_or_after_its_minutes(ledger: TrajectoryLedger, outbox: Outbox) -> None:
    clock = Clock()
    recorder = Recorder(CONFIG, ledger, outbox, clock=clock)
    recorder.start_clock()
    recorder.record_evaluation(evaluation(0, 0.79))
    assert recorder.reason_to_stop() is None
    clock.now += 60.0
    assert recorder.reason_to_stop() == "minutes"
    recorder.record_evaluation(evaluation(1, 0.8))
    assert recorder.reason_to_stop() == "score"


@pytest.mark.parametrize(("early", "restarted"), [(False, False), (False, True), (True, False), (True, True)])
def test_scores_carry_the_publication_time_of_their_version(
    ledger: TrajectoryLedger, outbox: Outbox, monkeypatch: pytest.MonkeyPatch, early: bool, restarted: bool
) -> None:
    clock = Clock()
    monkeypatch.setattr(time, "time", lambda: 1e9 + clock.now)
    recorder = Recorder(CONFIG, ledger, outbox, clock=clock)
    if early:  # version 0 is scored before a server takes work
        recorder.record_evaluation(evaluation(0, 0.0))
        clock.now += 7.0
        if restarted:
            recorder = Recorder(CONFIG, ledger, outbox, clock=clock)
    start = clock.now
    recorder.start_clock()
    for step in (1, 2):
        clock.now += 3.0
        publish(recorder, ledger, step)
    if restarted:
        recorder = Recorder(CONFIG, ledger, outbox, clock=clock)
        recorder.start_clock()
    clock.now += 50.0  # scoring is late, and versions 0 and 1 are scored at once
    for version in (0, 1, 2):
        recorder.record_evaluation(evaluation(version, 0.1 * version))
    rows = [row for row in outbox.attempt_metrics(1000) if row.key.startswith("heldout/")]
    assert {(row.step, row.time_s - 1e9 - start) for row in rows} == {(0, 0.0), (1, 3.0), (2, 6.0)}


def test_time_scores_and_staleness_go_on_after_a_restart(ledger: TrajectoryLedger, outbox: Outbox) -> None:
    clock = Clock()
    before = Recorder(CONFIG, ledger, outbox, clock=clock)
    before.start_clock()
    before.record_evaluation(evaluation(0, 0.1))
    clock.now += 3.0
    publish(before, ledger, 1)
    before.record_staleness(1, {"0": 10})

    clock.now = 0.0
    after = Recorder(CONFIG, ledger, outbox, clock=clock)
    after.start_clock()
    after.record_evaluation(evaluation(0, 0.9))  # handed in again: the first one stands
    after.record_staleness(1, {"0": 10})  # replayed: counted once
    clock.now += 2.0
    publish(after, ledger, 2)
    after.record_staleness(2, {"0": 5, "2": 5})
    after.record_evaluation(evaluation(1, 0.85))
    after.record_evaluation(evaluation(2, 0.7))
    summary = after.summary(run_id="r", ending=ending(2))
    assert (summary.accuracy_before, summary.accuracy_after, summary.best_accuracy) == (0.1, 0.7, 0.85)
    assert summary.rl_wall_s == 5.0
    assert summary.time_to_score_s == 3.0
    assert summary.staleness_mean == 0.5
    assert summary.staleness_max == 2
    assert summary.effective_tokens_per_s == 4.0
    assert summary.starts == 2
    status = after.status(version=2, finished=None, lost_servers=())
    assert (status.step, status.accuracy) == (2, 0.7)


def test_an_incarnation_forgets_the_scores_of_weights_that_are_gone(ledger: TrajectoryLedger, outbox: Outbox) -> None:
    recorder = Recorder(CONFIG, ledger, outbox, clock=Clock())
    recorder.start_clock()
    for version, accuracy in ((0, 0.1), (1, 0.5), (2, 0.9)):
        if version:
            publish(recorder, ledger, version)
            recorder.record_staleness(version, {"0": 10})
        recorder.record_evaluation(evaluation(version, accuracy))
    recorder.forget(2)
    assert not recorder.has_recorded_step(2)
    assert recorder.has_recorded_step(1)
    recorder.record_evaluation(evaluation(2, 0.2))
    recorder.record_staleness(2, {"1": 10})
    summary = recorder.summary(run_id="r", ending=ending(2))
    assert (summary.accuracy_after, summary.best_accuracy) == (0.2, 0.5)
    assert summary.staleness_tokens == {"0": 10, "1": 10}  # of the steps that made the model
    assert summary.staleness_max == 1


def test_an_outbox_that_is_locked_costs_points_and_not_the_run(ledger: TrajectoryLedger, tmp_path: Path) -> None:
    outbox = Outbox(tmp_path / "outbox.sqlite", "r", timeout_s=0.0)
    recorder = Recorder(CONFIG, ledger, outbox, clock=Clock())
    recorder.start_clock()
    with sqlite3.connect(tmp_path / "outbox.sqlite", isolation_level=None) as other:
        other.execute("BEGIN EXCLUSIVE")
        recorder.record_evaluation(evaluation(0, 0.5))
        other.execute("ROLLBACK")
    recorder.record_evaluation(evaluation(1, 0.6))
    assert [known.version for known in recorder.evaluations] == [0, 1]
    assert {step for points in outbox.history().values() for step, _ in points} == {1}
