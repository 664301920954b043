"""Processes of a running system are killed and hung: what follows is recovery or a clear failure, never a hang, a
process that nobody owns, or a failure that looks like success."""

from __future__ import annotations

import os
import signal
from contextlib import closing
from pathlib import Path

import pytest

from areal_core.controller.core.ledger import TrajectoryLedger
from tests.support.runs import Launched, tiny

pytestmark = pytest.mark.chaos


def test_an_evaluator_that_dies_when_all_wait_for_it(tmp_path: Path) -> None:
    with Launched(tiny(tmp_path), "evaluator") as run:

        def ending() -> object:
            with closing(TrajectoryLedger(run.run.ledger, group_size=run.config.algorithm.group_size)) as ledger:
                return ledger.notes.ending

        evaluator = run.pid("evaluator")
        os.kill(evaluator, signal.SIGSTOP)
        run.wait_for("the trainer has finished", ending)
        os.kill(evaluator, signal.SIGKILL)
        run.finished()


def test_a_launcher_that_is_told_to_stop_while_it_makes_the_base_model(tmp_path: Path) -> None:
    with Launched(tiny(tmp_path, warm=False, warmup={"worked_steps": 100_000}), "warming") as run:
        run.wait_for("the warm-up is under way", lambda: "completions, step 200 of" in run.output())
        run.launcher.send_signal(signal.SIGINT)
        assert run.end() == 130
        assert not run.run.root.exists()
