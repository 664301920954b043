"""The parent's side of process control: child processes, tied to this process, waited for and ended as a whole.

`areal_core.launch.process` has the two ties and the child's side of them. `supervisor` runs the roles of a run with
this, `flows.services` the servers behind the pages.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from areal_core.launch import process
from areal_core.launch.logs import LogFile

_KILL_S = 10.0  # for killed processes to be gone
_EXECUTE_S = 1.0  # for a process to have an environment


@dataclass(frozen=True)
class Child:
    """A process that leads a session of its own and logs to a file. The parent calls `reap` once."""

    name: str
    popen: subprocess.Popen[bytes]
    pidfd: int
    lifeline: int  # write end: its descendants read end-of-file when we close it or die
    log: LogFile

    @property
    def pid(self) -> int:
        return self.popen.pid

    def terminate(self) -> None:
        """SIGTERM. Not `Popen.terminate`, which may collect it: its number must stay its own until `reap`."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGTERM)

    def status(self) -> int:
        """Its exit status, once it has ended; it is still to be reaped."""
        ended = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def reap(self) -> int:
        """Kill what is left of its process group, collect it, and close the lifeline of its descendants in other
        sessions;
        returns its exit status."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        code = self.popen.wait()
        os.close(self.pidfd)
        os.close(self.lifeline)
        return code


def start(
    name: str,
    argv: list[str],
    *,
    log: LogFile,
    environment: Mapping[str, str],
    grace_s: float,
    cwd: Path | None = None,
    pass_fds: tuple[int, ...] = (),
    foreign: bool = False,
) -> Child:
    """Start a process. `environment` is added to this process's; `grace_s` is its time to end in order once this
    process is gone. One of a `foreign` program, which knows nothing of `process.adopt`, gets its first tie here: then
    this process must have a single thread. Raises OSError."""
    read_end, write_end = os.pipe()
    try:
        with log.path.open("ab") as output:
            popen = subprocess.Popen(
                argv,
                cwd=cwd,
                env={**os.environ, **environment, **process.tie(read_end, grace_s)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(read_end, *pass_fds),
                preexec_fn=(lambda: process.die_with_parent(signal.SIGTERM)) if foreign else None,
            )
    except OSError:
        os.close(write_end)
        raise
    finally:
        os.close(read_end)
    return Child(name, popen, os.pidfd_open(popen.pid), write_end, log)


def how_it_ended(code: int) -> str:
    """An exit status of `subprocess`, in words."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


def poll(fds: Iterable[int], timeout_s: float | None) -> set[int]:
    """Those of `fds` that are readable, as soon as one is; the empty set after `timeout_s` (None: no limit)."""
    waiting = select.poll()
    for fd in fds:
        waiting.register(fd, select.POLLIN)
    return {fd for fd, _ in waiting.poll(None if timeout_s is None else timeout_s * 1000)}


def end_marked(mark: str, grace_s: float, groups_left_alone: Collection[int] = ()) -> None:
    """Wait for every process that has `mark` ("NAME=value") in its environment, in whatever session, but for those of
    some process groups; SIGKILL to what is there after `grace_s`, which not even one that is stopped outlives.

    Environments are inherited: this finds the descendants of a killed process at any depth.
    """
    deadline = time.monotonic() + grace_s
    while left := _marked(mark.encode(), groups_left_alone):
        try:
            for pidfd in alive(left, deadline):
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            if alive(left, time.monotonic() + _KILL_S):
                return  # the kernel holds it: nothing more can be done
        finally:
            for pidfd in left:
                os.close(pidfd)


def alive(pidfds: Iterable[int], deadline: float) -> set[int]:
    """Those of these processes that have not ended at `deadline`, in monotonic time."""
    left = set(pidfds)
    while left and (ended := poll(left, max(0.0, deadline - time.monotonic()))):
        left -= ended
    return left


def _marked(mark: bytes, groups_left_alone: Collection[int]) -> list[int]:
    found: list[int] = []
    for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            pidfd = os.pidfd_open(pid)
            try:
                if mark in environment_of(Path(f"/proc/{pid}")) and os.getpgid(pid) not in groups_left_alone:
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
