"""Processes of a running system are killed and hung: what follows is recovery or a clear failure, never a hang, a
process that nobody owns, or a failure that looks like success."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from areal_core.controller.core.ledger import TrajectoryLedger
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
