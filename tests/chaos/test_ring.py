"""Processes of a running system are killed and hung: what follows is recovery or a clear failure, never a hang, a
process that nobody owns, or a failure that looks like success."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from areal_core.controller.core.ledger import TrajectoryLedger
from areal_core.types import PolicyVersion
from tests.support.runs import Launched, tiny

T = TypeVar("T")

pytestmark = [pytest.mark.chaos, pytest.mark.slow]


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One state folder, so that the base model is made once."""
    return tmp_path_factory.mktemp("state")


def in_ledger(run: Launched, look: Callable[[TrajectoryLedger], T]) -> T:
    ledger = TrajectoryLedger(run.run.ledger, group_size=run.config.algorithm.group_size)
    try:
        return look(ledger)
    finally:
        ledger.close()


def versions(ledger: TrajectoryLedger) -> dict[int, PolicyVersion]:
    return {version.version: version for version in ledger.versions.loadable()}


def reward_worker(run: Launched) -> int:
    (worker,) = [
        pid for pid in run.children(run.pid("controller")) if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    return worker


def test_a_run_survives_the_death_of_every_process(state: Path) -> None:
    from mlflow import MlflowClient

    config = tiny(
        state,
        training={"steps": 200, "checkpoint_every": 5},
        evaluation={"servers": 2},  # one alone is the evaluator's own engine
        tracking={"enabled": True},
    )
    with Launched(config, "each") as run:
        for role in ("generation", "controller", "evaluator", "evaluation", "trainer", "tracker"):
            pid = run.pid(role)
            if role != "tracker":  # which starts slowly; all steps may be done by then
                run.until_step(run.step() + 1)
            before = in_ledger(run, versions)
            os.kill(pid, signal.SIGKILL)
            assert run.pid(role, but=pid)
            if role == "controller":
                os.kill(reward_worker(run), signal.SIGKILL)
            run.until_step(
                min(max(before, default=0) + 1, config.training.steps)
            )  # beyond what was there: the trainer has made it again by then
            now = in_ledger(run, versions)
            assert all(
                now.get(number, version) == version for number, version in before.items()
            )  # the oldest are folded
        summary = run.finished()
        assert len(re.findall(r"\w-0 was killed by SIGKILL: restart 1 of 2", run.output())) == 6
        assert "trainer-0: resumed from the checkpoint of step " in run.output()
        info = run.run.info()
        assert info.tracking_uri
        assert info.tracking_run_id
        mlflow = MlflowClient(info.tracking_uri)
        assert mlflow.get_run(info.tracking_run_id).info.status == "FINISHED"
        steps = range(1, summary.steps + 1)
        for key, wanted in {
            "loss/policy": [*steps],  # the trainer's
            "reward/mean": [*steps],  # the controller's, when a batch is fixed
            "time/step_s": [*steps],  # the controller's, when a version is published
        }.items():
            points = mlflow.get_metric_history(info.tracking_run_id, key)
            assert sorted(point.step for point in points) == wanted
        scored = sorted(point.step for point in mlflow.get_metric_history(info.tracking_run_id, "heldout/accuracy"))
        due = [0, *steps[4::5]]  # of which only the last counts once the trainer has ended
        assert scored == [*due[: len(scored) - 1], summary.steps]


def test_an_evaluator_that_dies_when_all_wait_for_it(state: Path) -> None:
    with Launched(tiny(state), "evaluator") as run:
        evaluator = run.pid("evaluator")
        os.kill(evaluator, signal.SIGSTOP)
        run.wait_for("the trainer has finished", lambda: in_ledger(run, lambda ledger: ledger.notes.ending))
        os.kill(evaluator, signal.SIGKILL)
        run.finished()


def test_a_launcher_that_is_told_to_stop_while_it_makes_the_base_model(state: Path) -> None:
    with Launched(tiny(state, warm=False, warmup={"worked_steps": 100_000}), "warming") as run:
        run.wait_for("the warm-up is under way", lambda: "completions, step 200 of" in run.output())
        run.launcher.send_signal(signal.SIGINT)
        assert run.end() == 130
        assert not run.run.root.exists()
