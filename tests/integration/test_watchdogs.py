"""Processes of real runs are stopped: they are found, named and started again, and outlive no launcher."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from areal_core.storage.rundir import RunDir
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


@pytest.mark.nightly
def test_an_evaluation_that_takes_longer_than_the_stall_timeout_fails_no_run_whose_steps_are_done(
    tmp_path: Path,
) -> None:
    """Nothing else is left to do; a shorter pause than that of the liveness watchdog stands for its slowness."""
    stall_s = 8.0
    with Launched(tiny(tmp_path, launch={"stall_timeout_s": stall_s}), "slow") as run:
        evaluator = run.pid("evaluator")
        os.kill(evaluator, signal.SIGSTOP)
        run.wait_for("the last step is made", lambda: has_finished(run.run))
        time.sleep(1.5 * stall_s)  # nothing may come of it
        os.kill(evaluator, signal.SIGCONT)
        run.finished()


def has_finished(run: RunDir) -> bool:
    """Whether the trainer has saved its model."""
    return (run.root / "final" / "model.safetensors").exists()
