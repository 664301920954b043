"""Child processes: their exit status and number, their restarts, and what is left of a launcher."""

from __future__ import annotations

import math
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
from areal_core.launch.supervisor import RestartBudget
from areal_core.launch.sweeper import end_marked, environment_of

PATIENCE_S = 30.0


def start(folder: Path, code: str) -> children.Child:
    log = LogFile(folder / "x.log")
    return children.start("x", [sys.executable, "-c", code], log=log, environment={"EXTRA": "yes"}, grace_s=1.0)


def exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize(
    ("code", "status", "words"),
    [
        ("print('done', flush=True); raise SystemExit(3)", 3, "exited with code 3"),
        ("print('done', flush=True); import os; os.kill(os.getpid(), 9)", -signal.SIGKILL, "was killed by SIGKILL"),
    ],
)
def test_ended_process_keeps_its_number_until_it_is_reaped(tmp_path: Path, code: str, status: int, words: str) -> None:
    """Else the group that is killed with it could be another one by then."""
    child = start(tmp_path, code)
    assert child.status() == status
    child.send(signal.SIGTERM)
    assert exists(child.pid)
    assert children.how_it_ended(child.reap()) == words
    assert not exists(child.pid)
    assert child.log.path.read_text() == "done\n"


def test_a_process_that_outlives_its_launcher_is_not_swept_away(tmp_path: Path) -> None:
    """As what `make up` leaves running does; one of the usual kind goes with it."""
    code = f"""
import subprocess
import sys
from pathlib import Path
from areal_core.launch import children
from areal_core.launch.logs import LogFile
for name in ("server_sessions", "goes"):
    log = LogFile(Path({str(tmp_path)!r}) / name)
    argv = [sys.executable, "-c", "import time; time.sleep(600)"]
    child = children.start(name, argv, log=log, environment={{}}, grace_s=0.1, outlives=name == "server_sessions")
    print(child.pid, flush=True)
"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=PATIENCE_S)
    stays, goes = map(int, told.stdout.split())
    deadline = time.monotonic() + PATIENCE_S
    while exists(goes) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not exists(goes)
    assert exists(stays)
    os.kill(stays, signal.SIGKILL)


def test_restarts_come_back_one_by_one_and_no_more_than_there_were() -> None:
    now = [0.0]
    budget = RestartBudget(2, 8.0, lambda: now[0])
    assert [budget.take() for _ in range(3)] == [True, True, False]
    assert (budget.spent, budget.total, budget.next_s()) == (2, 2, 8.0)
    now[0] = 4.0
    assert not budget.take()
    assert budget.next_s() == 4.0
    now[0] = 8.0
    assert budget.next_s() == 0.0
    assert [budget.take() for _ in range(2)] == [True, False]
    now[0] = 1000.0
    assert [budget.take() for _ in range(3)] == [True, True, False]
    assert budget.total == 5
    none = RestartBudget(0, 10.0, lambda: now[0])
    assert (none.take(), none.next_s()) == (False, math.inf)


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
