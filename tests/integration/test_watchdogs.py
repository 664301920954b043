"""Processes of real runs are stopped: they are found, named and started again, and outlive no launcher."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.support.runs import Launched, tiny

pytestmark = [pytest.mark.slow, pytest.mark.recovery]


def test_stopped_processes_do_not_outlive_a_killed_launcher_and_the_run_goes_on_later(tmp_path: Path) -> None:
    config = tiny(tmp_path, training={"steps": 6}, evaluation={"enabled": False}, launch={"stop_timeout_s": 2.0})
    with Launched(config, "stopped") as run:
        run.until_step(1)
        for role in ("generation", "controller", "trainer"):
            os.kill(run.last_pid(role), signal.SIGSTOP)
        for worker in run.children(run.last_pid("controller")):
            os.kill(worker, signal.SIGSTOP)
        run.launcher.kill()
        run.gone()
    with Launched(config, "stopped") as run:
        run.finished()


def test_a_stopped_process_of_each_role_is_started_again(tmp_path: Path) -> None:
    """Also the evaluator's server, which nobody else would miss."""
    config = tiny(
        tmp_path,
        training={"steps": 60, "checkpoint_every": 2},
        evaluation={"servers": 2, "every": 5},
        launch={"liveness_timeout_s": 4.0},
    )
    with Launched(config, "stopped") as run:
        for role, index in (("evaluation", 1), ("trainer", 0), ("evaluator", 0), ("controller", 0)):
            pid = run.pid(role, index)
            os.kill(pid, signal.SIGSTOP)
            assert run.pid(role, index, but=pid)
        run.finished()
        for name in ("evaluation-1", "trainer-0", "evaluator-0", "controller-0"):
            diagnosis = (
                rf"{name} has given no sign of life for 4 s \(launch.liveness_timeout_s\): T \(stopped\); .* since"
            )
            assert re.search(rf"{diagnosis} .* its stacks can't be told: killed: restart 1 of 2", run.output())
