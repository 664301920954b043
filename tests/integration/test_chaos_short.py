"""The short form of tests/chaos: a run loses its trainer, its controller and its generation server, and ends as if it
had not."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.support.runs import Launched, tiny

pytestmark = [pytest.mark.slow, pytest.mark.recovery]

ROLES = ("trainer", "controller", "generation")


def test_a_run_recovers_from_the_death_of_each_of_its_processes(tmp_path: Path) -> None:
    config = tiny(tmp_path, training={"steps": 12, "checkpoint_every": 2}, evaluation={"enabled": False})
    with Launched(config, "short") as run:
        for role in ROLES:
            pid = run.pid(role)
            run.until_step(run.step() + 2)
            os.kill(pid, signal.SIGKILL)
            assert run.pid(role, but=pid)
        tokens = run.finished().tokens
        assert tokens.allowance <= 2 * 32 * 24 * len(ROLES)  # of what died: what it was asked for, at most
        for role in ROLES:
            assert run.output().count(f"{role}-0 was killed by SIGKILL: restart 1 of 2") == 1


@pytest.mark.nightly
def test_a_controller_that_was_stopped_takes_out_no_healthy_server(tmp_path: Path) -> None:
    """The server stands still until a health check waits for it, and goes on while the controller stands still: what it
    responds lies there, later than the check may take, when the controller goes on."""
    config = tiny(tmp_path, training={"steps": 12}, evaluation={"enabled": False})
    with Launched(config, "stopped") as run:
        run.until_step(2)
        server, controller = run.pid("generation"), run.pid("controller")
        os.kill(server, signal.SIGSTOP)
        time.sleep(6)  # a check every 5 s, for 10 s at most
        os.kill(controller, signal.SIGSTOP)
        os.kill(server, signal.SIGCONT)
        time.sleep(11)
        os.kill(controller, signal.SIGCONT)
        run.finished()
        assert "taken out" not in run.run.log_file("controller").read_text()
        assert run.last_pid("generation") == server
