"""What is left of a launcher: found by a mark, and ended, stopped processes too."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from areal_core.launch.sweeper import end_marked, environment_of

PATIENCE_S = 30.0


@pytest.fixture
def marked() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two processes with a mark, in sessions of their own; the first is stopped."""
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    environment = {**os.environ, "MARK": "test-sweeper"}
    made = [subprocess.Popen(command, env=environment, start_new_session=True) for _ in range(2)]
    made[0].send_signal(signal.SIGSTOP)
    yield made
    for each in made:
        each.kill()
        each.wait()


def test_process_with_the_mark_is_ended_unless_its_group_is_left_alone(marked: list[subprocess.Popen[bytes]]) -> None:
    lost, kept = marked
    end_marked("MARK=test", 0.0)  # a mark is a whole variable
    assert [each.poll() for each in marked] == [None, None]
    end_marked("MARK=test-sweeper", 0.0, {kept.pid})
    assert lost.wait() == -signal.SIGKILL
    assert kept.poll() is None


def test_one_that_is_just_being_executed_is_not_overlooked() -> None:
    """Every tenth of them has no environment yet when it is first looked at."""
    for environment in [{"MARK": "x", **os.environ}] * 60 + [{}]:
        made = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env=environment)
        made.send_signal(signal.SIGSTOP)
        found = environment_of(Path(f"/proc/{made.pid}"))
        made.kill()
        made.wait()
        assert found == [b""] if not environment else b"MARK=x" in found
