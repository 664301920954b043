"""End the processes that a launcher leaves behind, including stopped ones, which only SIGKILL ends.

Every launcher has one *sweeper*, a process that runs this file alone and outlives the launcher:

    launcher --stdin: one line per change: sessions of its processes, and their seconds to end in order--> sweeper
    end-of-file, for whatever reason the launcher ended --> wait for the longest of these times, then SIGKILL

The sweeper finds processes by their session, or by a mark ("NAME=value") in their environment. Descendants inherit the
mark at any depth and in any session. A sweeper has its own session and ignores signals of a terminal or service
manager. The launcher replaces a killed sweeper. If both are killed at once, stopped processes stay.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterable
from pathlib import Path

MARK = "AREAL_LAUNCHER"  # in the environment of all descendants of a launcher
_KILL_S = 10.0  # time for killed processes to disappear
_EXECUTE_S = 1.0  # time for a new process to get its environment
_KEPT = ("LD_LIBRARY_PATH",)  # environment variables that the sweeper's interpreter may need


class Sweeper:
    """The launcher's handle on its sweeper process. Thread-safe. Raises OSError if the start fails."""

    def __init__(self) -> None:
        self.mark = {MARK: secrets.token_hex(8)}  # environment variable of the processes to sweep
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._sessions: dict[int, float] = {}  # session -> seconds to end in order

    def check(self) -> None:
        """Start the sweeper process if it is not running."""
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                return
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, f"{MARK}={self.mark[MARK]}"],
                # No mark: the sweeper must not be swept itself.
                env={name: os.environ[name] for name in _KEPT if name in os.environ},
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
            )
            self._tell()

    def add(self, session: int, grace_s: float) -> None:
        """Add a session to sweep, whose processes have at least `grace_s` seconds to end in order."""
        self.check()
        with self._lock:
            self._sessions[session] = grace_s
            self._tell()

    def remove(self, session: int) -> None:
        """Forget an ended session, as its number may be reused."""
        with self._lock:
            if self._sessions.pop(session, None) is not None:
                self._tell()

    def _tell(self) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the sweeper was just killed: the next check starts another one
            os.write(self._process.stdin.fileno(), json.dumps(self._sessions).encode() + b"\n")


def poll(fds: Iterable[int], timeout_s: float | None) -> set[int]:
    """The readable ones of `fds`, as soon as there is one; empty after `timeout_s` (None: no limit)."""
    waiting = select.poll()
    for fd in fds:
        waiting.register(fd, select.POLLIN)
    return {fd for fd, _ in waiting.poll(None if timeout_s is None else timeout_s * 1000)}


def alive(pidfds: Iterable[int], deadline: float) -> set[int]:
    """Processes that are still running at `deadline`, in monotonic time."""
    left = set(pidfds)
    while left and (ended := poll(left, max(0.0, deadline - time.monotonic()))):
        left -= ended
    return left


def end_marked(
    mark: str, grace_s: float, groups_left_alone: Collection[int] = (), *, sessions: Collection[int] = ()
) -> None:
    """Wait until no process has `mark` ("NAME=value") in its environment; kill the rest after `grace_s`.

    Processes of `groups_left_alone` are ignored. Environments are inherited, so this finds the descendants of a killed
    process at any depth and in any session. Some processes write a title over their environment, as vLLM's engines do.
    They are found by `sessions`.
    """
    deadline = time.monotonic() + grace_s
    while left := _found(mark.encode(), groups_left_alone, sessions):
        try:
            for pidfd in alive(left, deadline):
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            if alive(left, time.monotonic() + _KILL_S):
                return  # blocked in the kernel: nothing more can be done
        finally:
            for pidfd in left:
                os.close(pidfd)


def _found(mark: bytes, groups_left_alone: Collection[int], sessions: Collection[int]) -> list[int]:
    found: list[int] = []
    for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
        with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
            pidfd = os.pidfd_open(pid)
            try:
                its = mark in environment_of(Path(f"/proc/{pid}")) or os.getsid(pid) in sessions
                if its and os.getpgid(pid) not in groups_left_alone:
                    found.append(os.dup(pidfd))
            finally:
                os.close(pidfd)
    return found


def environment_of(proc: Path) -> list[bytes]:
    """The environment of a process, from its folder in /proc. Raises OSError.
    During exec, a process has neither environment nor command line for a moment; this waits for them."""
    deadline = time.monotonic() + _EXECUTE_S
    while not (found := (proc / "environ").read_bytes()) and time.monotonic() < deadline:
        if (proc / "cmdline").read_bytes():
            return (proc / "environ").read_bytes().split(b"\0")
        (proc / "exe").readlink()  # raises for kernel threads and ended processes
        time.sleep(0.001)
    return found.split(b"\0")


def main() -> None:
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    *_, last = "{}", *sys.stdin  # end-of-file: the launcher is gone
    sessions = {int(session): grace_s for session, grace_s in json.loads(last).items()}
    end_marked(sys.argv[1], max(sessions.values(), default=0.0), sessions=sessions)


if __name__ == "__main__":
    main()
