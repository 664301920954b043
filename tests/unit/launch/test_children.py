"""Child processes: their exit status, and how long their number stays theirs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
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
        ("print('done', flush=True); raise SystemExit(3)", 3, "exited with code 3"),
        ("print('done', flush=True); import os; os.kill(os.getpid(), 9)", -signal.SIGKILL, "was killed by SIGKILL"),
    ],
)
def test_ended_process_keeps_its_number_until_it_is_reaped(tmp_path: Path, code: str, status: int, words: str) -> None:
    """Else the group that is killed with it could be another one by then."""
    child = start(tmp_path, code)
    assert child.status() == status
    child.terminate()
    assert exists(child.pid)
    assert children.how_it_ended(child.reap()) == words
    assert not exists(child.pid)
    assert child.log.path.read_text() == "done\n"


def test_absent_program_leaves_no_descriptor_open(tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError):
        children.start("x", ["/nowhere"], log=LogFile(tmp_path / "x.log", 10**6, 1), environment={}, grace_s=1.0)
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_process_that_outlives_its_launcher_is_not_swept_away(tmp_path: Path) -> None:
    """As what `make up` leaves running does; one of the usual kind goes with it."""
    code = f"""
import subprocess
import sys
from pathlib import Path
from areal_core.launch import children
from areal_core.launch.logs import LogFile
for name in ("server_sessions", "goes"):
    log = LogFile(Path({str(tmp_path)!r}) / name, 10**6, 1)
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
