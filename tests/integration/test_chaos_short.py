"""The short form of tests/chaos: a run loses its trainer, its controller and its generation server, and ends as if it
had not."""

from __future__ import annotations

import os
import signal
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
