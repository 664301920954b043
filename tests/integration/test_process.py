"""The child's side: each tie to the parent must hold alone."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from areal_core.launch import process

PATIENCE_S = 120.0

# A parent that starts a child, which calls `{call}` and then sleeps; the parent prints the child's pid once it is tied.
PARENT = """
import os, subprocess, sys, time
read_end, write_end = os.pipe()
env = dict(os.environ, AREAL_GRACE_S="0.2")
if {lifeline}:
    env["AREAL_LIFELINE"] = f"{{read_end}}:{{os.fstat(read_end).st_ino}}"
child = subprocess.Popen([sys.executable, "-c", {child!r}], env=env, pass_fds=(read_end,), stdout=subprocess.PIPE,
                         start_new_session=True)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(600)
"""
IGNORE_TERM = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
TIED = "print('tied', flush=True); import time; time.sleep(600)"


def start_family(child: str, *, lifeline: bool) -> tuple[subprocess.Popen[str], int]:
    """A parent in this test's hands and the pidfd of its child."""
    script = PARENT.format(child=child, lifeline=lifeline)
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    return parent, os.pidfd_open(int(parent.stdout.readline()))


def ends(pidfd: int) -> bool:
    """Whether the process behind `pidfd` ends within our patience; it is killed if it doesn't."""
    ended = bool(select.select([pidfd], [], [], PATIENCE_S)[0])
    if not ended:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    os.close(pidfd)
    return ended


def test_pdeathsig_alone_ends_the_child() -> None:
    parent, child = start_family(f"from areal_core.launch import process; process.adopt(); {TIED}", lifeline=False)
    parent.kill()
    parent.wait()
    assert ends(child)


def test_lifeline_alone_ends_the_child_even_one_that_ignores_sigterm() -> None:
    without_pdeathsig = "process.die_with_parent = lambda signum: None"
    child_code = f"from areal_core.launch import process; {without_pdeathsig}; {IGNORE_TERM}; process.adopt(); {TIED}"
    parent, child = start_family(child_code, lifeline=True)
    parent.kill()
    parent.wait()
    assert ends(child)


def test_lifeline_fds_refuses_a_number_that_means_another_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(process.LIFELINE, raising=False)
    assert process.lifeline_fds() == ()
    with (tmp_path / "other").open("w") as other:
        inode = os.fstat(other.fileno()).st_ino
        monkeypatch.setenv(process.LIFELINE, f"{other.fileno()}:{inode}")
        assert process.lifeline_fds() == (other.fileno(),)
        monkeypatch.setenv(process.LIFELINE, f"{other.fileno()}:{inode + 1}")
        assert process.lifeline_fds() == ()
    monkeypatch.setenv(process.LIFELINE, f"{other.fileno() if not other.closed else 999}:{inode}")
    assert process.lifeline_fds() == ()


# A process in between, like torchrun's agent: it holds the lifeline and starts its child in another session without it.
BETWEEN = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {child!r}], stdout=subprocess.PIPE, start_new_session=True)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(600)
"""


def test_a_lifeline_that_was_not_passed_on_is_borrowed_from_the_parent() -> None:
    """What launched the process in between is gone, that process itself is not: only the lifeline can tell."""
    without_pdeathsig = "process.die_with_parent = lambda signum: None"
    child_code = f"from areal_core.launch import process; {without_pdeathsig}; process.adopt(); {TIED}"
    read_end, write_end = os.pipe()
    env = dict(os.environ, AREAL_GRACE_S="0.2", AREAL_LIFELINE=f"{read_end}:{os.fstat(read_end).st_ino}")
    between = subprocess.Popen(
        [sys.executable, "-c", BETWEEN.format(child=child_code)],
        env=env,
        pass_fds=(read_end,),
        stdout=subprocess.PIPE,
        text=True,
    )
    os.close(read_end)
    assert between.stdout is not None
    child = os.pidfd_open(int(between.stdout.readline()))
    assert not select.select([child], [], [], 0.5)[0]  # while the launcher is there
    os.close(write_end)
    assert ends(child)
    assert between.poll() is None
    between.kill()
    between.communicate()


def test_a_lifeline_that_nobody_holds_any_more_ends_the_process() -> None:
    read_end, write_end = os.pipe()
    env = dict(os.environ, AREAL_LIFELINE=f"{read_end}:{os.fstat(read_end).st_ino}")
    os.close(read_end)
    os.close(write_end)
    code = "from areal_core.launch import process; process.adopt(); print('went on')"
    child = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert child.returncode == 128 + signal.SIGTERM
    assert (child.stdout, child.stderr) == ("", "areal: the lifeline is gone, this process ends\n")


# A thread inside torch's native code, which wants the interpreter back while that is being torn down.
IN_NATIVE_CODE = """
import threading, time
from datetime import timedelta
from torch.distributed import HashStore
from areal_core.launch import process
threading.Thread(target=HashStore().wait, args=(["never"], timedelta(seconds=3)), daemon=True).start()
class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(6)
slow = Slow()
time.sleep(0.1)
def main():
    print("done")
    return 3
"""


def ended(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def test_threads_of_torch_abort_no_process_that_ends() -> None:
    child = ended(f"{IN_NATIVE_CODE}\nprocess.end_with(main)")
    assert (child.returncode, child.stdout, child.stderr) == (3, "done\n", "")


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ("return 2", 2, ""),
        ("raise SystemExit(4)", 4, ""),
        ("raise ValueError('a bug')", 1, "ValueError: a bug"),
    ],
)
def test_end_with_keeps_the_exit_status_and_what_was_said(body: str, status: int, said: str) -> None:
    code = f"import atexit; from areal_core.launch import process; atexit.register(print, 'end')\ndef main(): {body}\n"
    child = ended(f"{code}process.end_with(main)")
    assert (child.returncode, child.stdout) == (status, "end\n")
    assert said in child.stderr
