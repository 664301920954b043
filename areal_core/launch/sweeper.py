"""Ends what a launcher leaves behind, stopped processes too: in these a SIGTERM stays pending, while SIGKILL ends them.

Every launcher has one *sweeper*, a process that runs this file alone, and outlives it:

    launcher --stdin: a line for each change, the sessions of its processes and their seconds to end in order--> sweeper
    end-of-file, however the launcher went --> what is left has the longest of these, then SIGKILL

Processes are found by their session, or by a mark ("NAME=value") in their environment, which descendants inherit at any
depth, in whatever session. A sweeper has a session of its own and ignores what a terminal or a service manager sends.
One that is killed is replaced by its launcher; where both are killed at once, a process that was stopped stays.
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

MARK = "AREAL_LAUNCHER"  # in the environment of everything that a launcher starts, however deep
_KILL_S = 10.0  # for killed processes to be gone
_EXECUTE_S = 1.0  # for a process to have an environment
_KEPT = ("LD_LIBRARY_PATH",)  # of the launcher's environment: its interpreter may need it


class Sweeper:
    """The sweeper of this process, seen from here. Thread-safe. Raises OSError where it can't be started."""

    def __init__(self) -> None:
        self.mark = {MARK: secrets.token_hex(8)}  # environment of what it is for
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._sessions: dict[int, float] = {}  # seconds to end in order

    def check(self) -> None:
        """Start one where there is none, or none any more."""
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                return
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, f"{MARK}={self.mark[MARK]}"],
                # No mark: nobody may sweep it away.
                env={name: os.environ[name] for name in _KEPT if name in os.environ},
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
            )
            self._tell()

    def add(self, session: int, grace_s: float) -> None:
        """From now on it is for the processes of this session, too, which have `grace_s` at least to end in order."""
        self.check()
        with self._lock:
            self._sessions[session] = grace_s
            self._tell()

    def remove(self, session: int) -> None:
        """A session has ended: another one may get its number."""
        with self._lock:
            if self._sessions.pop(session, None) is not None:
                self._tell()

    def _tell(self) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it was killed just now: the next check starts another one
            os.write(self._process.stdin.fileno(), json.dumps(self._sessions).encode() + b"\n")


def poll(fds: Iterable[int], timeout_s: float | None) -> set[int]:
    """Those of `fds` that are readable, as soon as one is; the empty set after `timeout_s` (None: no limit)."""
    waiting = select.poll()
    for fd in fds:
        waiting.register(fd, select.POLLIN)
    return {fd for fd, _ in waiting.poll(None if timeout_s is None else timeout_s * 1000)}


def alive(pidfds: Iterable[int], deadline: float) -> set[int]:
    """Those of these processes that have not ended at `deadline`, in monotonic time."""
    left = set(pidfds)
    while left and (ended := poll(left, max(0.0, deadline - time.monotonic()))):
        left -= ended
    return left


def end_marked(
    mark: str, grace_s: float, groups_left_alone: Collection[int] = (), *, sessions: Collection[int] = ()
) -> None:
    """Wait until no process has `mark` ("NAME=value") in its environment; after `grace_s`, kill the rest with SIGKILL.

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
                return  # the kernel holds it: nothing more can be done
        finally:
            for pidfd in left:
                os.close(pidfd)


def _found(mark: bytes, groups_left_alone: Collection[int], sessions: Collection[int]) -> list[int]:
    found: list[int] = []
    for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            pidfd = os.pidfd_open(pid)
            try:
                its = mark in environment_of(Path(f"/proc/{pid}")) or os.getsid(pid) in sessions
                if its and os.getpgid(pid) not in groups_left_alone:
                    found.append(os.dup(pidfd))
            finally:
                os.close(pidfd)
    return found


def environment_of(proc: Path) -> list[bytes]:
    """The environment of the process of this folder of /proc. One that is just becoming another program has none for a
    moment, like those that were given none, but no command line either. Raises OSError."""
    deadline = time.monotonic() + _EXECUTE_S
    while not (found := (proc / "environ").read_bytes()) and time.monotonic() < deadline:
        if (proc / "cmdline").read_bytes():
            return (proc / "environ").read_bytes().split(b"\0")
        (proc / "exe").readlink()  # kernel threads, and processes that have ended, have none
        time.sleep(0.001)
    return found.split(b"\0")


def main() -> None:
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    *_, last = "{}", *sys.stdin  # read to its end: the launcher is gone
    sessions = {int(session): grace_s for session, grace_s in json.loads(last).items()}
    end_marked(sys.argv[1], max(sessions.values(), default=0.0), sessions=sessions)


if __name__ == "__main__":
    main()
