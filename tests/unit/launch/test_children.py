"""Child processes: their exit status, and how long their number stays theirs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from areal_core.launch import children
from areal_core.launch.logs import LogFile

PATIENCE_S = 30.0


def start(folder: Path, code: str) -> children.Child:
    log = LogFile(folder / "x.log", 10**6, 1)
    return children.start("x", [sys.executable, "-c", code], log=log, environment={"EXTRA": "yes"}, grace_s=1.0)


def exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize(
    ("code", "status", "words"),
    [
        ("raise SystemExit(3)", 3, "exited with code 3"),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL, "was killed by SIGKILL"),
    ],
)
def test_an_end_can_be_told_before_the_process_is_collected(tmp_path: Path, code: str, status: int, words: str) -> None:
    child = start(tmp_path, code)
    assert child.status() == status
    assert exists(child.pid)
    assert children.how_it_ended(child.reap()) == words
    assert not exists(child.pid)


def test_a_process_that_has_ended_keeps_its_number_until_it_is_reaped(tmp_path: Path) -> None:
    """Else the group that is killed with it could be another one by then."""
    child = start(tmp_path, "print('done')")
    child.status()
    child.terminate()
    assert exists(child.pid)
    assert child.reap() == 0
    assert child.log.path.read_text() == "done\n"


def test_what_is_alive_at_the_deadline(tmp_path: Path) -> None:
    ends, stays = start(tmp_path, ""), start(tmp_path, "import time; time.sleep(60)")
    assert children.alive([ends.pidfd, stays.pidfd], time.monotonic() + 3.0) == {stays.pidfd}
    assert children.poll([ends.pidfd, stays.pidfd], None) == {ends.pidfd}
    stays.terminate()
    assert children.alive([stays.pidfd], time.monotonic() + PATIENCE_S) == set()
    assert (ends.reap(), stays.reap()) == (0, -signal.SIGTERM)


def test_a_program_that_is_absent_leaves_no_descriptor_open(tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError):
        children.start("x", ["/nowhere"], log=LogFile(tmp_path / "x.log", 10**6, 1), environment={}, grace_s=1.0)
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def marked() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two processes with a mark, in sessions of their own; the first is stopped."""
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    environment = {**os.environ, "MARK": "test-children"}
    made = [subprocess.Popen(command, env=environment, start_new_session=True) for _ in range(2)]
    made[0].send_signal(signal.SIGSTOP)
    yield made
    for each in made:
        each.kill()
        each.wait()


def test_what_carries_the_mark_is_ended_but_for_the_groups_left_alone(marked: list[subprocess.Popen[bytes]]) -> None:
    lost, kept = marked
    children.end_marked("MARK=test-children", 0.0, {kept.pid})
    assert lost.wait() == -signal.SIGKILL
    assert kept.poll() is None


def test_one_that_is_just_being_executed_is_not_overlooked() -> None:
    """Every tenth of them has no environment yet when it is first looked at."""
    for _ in range(60):
        made = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env={"MARK": "x", **os.environ})
        made.send_signal(signal.SIGSTOP)
        found = children.environment_of(Path(f"/proc/{made.pid}"))
        made.kill()
        made.wait()
        assert b"MARK=x" in found


def test_one_that_was_given_no_environment_has_none() -> None:
    made = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env={})
    try:
        assert children.environment_of(Path(f"/proc/{made.pid}")) == [b""]
    finally:
        made.kill()
        made.wait()


def test_a_mark_is_a_whole_variable(marked: list[subprocess.Popen[bytes]]) -> None:
    children.end_marked("MARK=test", 0.0)
    assert [each.poll() for each in marked] == [None, None]


def test_what_carries_the_mark_has_time_to_end_in_order(marked: list[subprocess.Popen[bytes]]) -> None:
    for each in marked:
        each.send_signal(signal.SIGCONT)
        each.terminate()
    children.end_marked("MARK=test-children", PATIENCE_S)
    assert [each.wait() for each in marked] == [-signal.SIGTERM] * 2
