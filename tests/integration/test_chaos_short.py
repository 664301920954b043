"""The short form of tests/chaos: a run loses its trainer and its generation server, and ends as if it had not."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.support.runs import Launched, tiny

pytestmark = pytest.mark.slow


def test_run_recovers_from_the_death_of_its_trainer_and_of_its_generation_server(tmp_path: Path) -> None:
    with Launched(tiny(tmp_path, training={"steps": 12, "checkpoint_every": 2}), "short") as run:
        for role in ("trainer", "generation"):
            pid = run.pid(role)
            run.until_step(run.step() + 2)
            os.kill(pid, signal.SIGKILL)
            assert run.pid(role, but=pid)
        run.finished()
        for role in ("trainer", "generation"):
            assert run.output().count(f"{role}-0 was killed by SIGKILL: restart 1 of 2") == 1
