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


@pytest.mark.nightly
def test_a_stopped_process_of_each_role_is_started_again(tmp_path: Path) -> None:
    """Also the evaluator's server, which nobody else would miss."""
    config = tiny(
        tmp_path,
        training={"steps": 200, "checkpoint_every": 20},
        evaluation={"servers": 2, "every": 50},
        launch={"liveness_timeout_s": 4.0},
    )
    stopped = ("trainer", 0), ("controller", 0), ("evaluator", 0), ("evaluation", 1)
    with Launched(config, "stopped") as run:
        pids = {process: run.pid(*process) for process in reversed(stopped)}
        for process in stopped:
            os.kill(pids[process], signal.SIGSTOP)
        for role, index in stopped:
            assert run.pid(role, index, but=pids[role, index])
        run.finished()
        for role, index in stopped:
            diagnosis = (
                rf"{role}-{index} has given no sign of life for 4 s \(launch.liveness_timeout_s\): T \(stopped\); "
            )
            assert re.search(rf"{diagnosis}.*; its stacks can't be told: killed: restart 1 of 2", run.output())
