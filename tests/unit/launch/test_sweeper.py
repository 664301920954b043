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


def test_what_carries_the_mark_is_ended_but_for_the_groups_left_alone(marked: list[subprocess.Popen[bytes]]) -> None:
    lost, kept = marked
    end_marked("MARK=test-sweeper", 0.0, {kept.pid})
    assert lost.wait() == -signal.SIGKILL
    assert kept.poll() is None


def test_one_that_is_just_being_executed_is_not_overlooked() -> None:
    """Every tenth of them has no environment yet when it is first looked at."""
    for _ in range(60):
        made = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env={"MARK": "x", **os.environ})
        made.send_signal(signal.SIGSTOP)
        found = environment_of(Path(f"/proc/{made.pid}"))
        made.kill()
        made.wait()
        assert b"MARK=x" in found


def test_one_that_was_given_no_environment_has_none() -> None:
    made = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env={})
    try:
        assert environment_of(Path(f"/proc/{made.pid}")) == [b""]
    finally:
        made.kill()
        made.wait()


def test_a_mark_is_a_whole_variable(marked: list[subprocess.Popen[bytes]]) -> None:
    end_marked("MARK=test", 0.0)
    assert [each.poll() for each in marked] == [None, None]


def test_what_carries_the_mark_has_time_to_end_in_order(marked: list[subprocess.Popen[bytes]]) -> None:
    for each in marked:
        each.send_signal(signal.SIGCONT)
        each.terminate()
    end_marked("MARK=test-sweeper", PATIENCE_S)
    assert [each.wait() for each in marked] == [-signal.SIGTERM] * 2
