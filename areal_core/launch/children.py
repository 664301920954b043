"""The parent's side of process control: child processes, tied to this process, waited for and ended as a whole.

`areal_core.launch.process` has the child's side. `supervisor` runs the roles of a run with
this, `flows.services` the servers behind the pages.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from areal_core.launch import process
from areal_core.launch.logs import LogFile
from areal_core.launch.sweeper import Sweeper

sweeper = Sweeper()  # of this process: for what it has started and leaves behind


@dataclass(frozen=True)
class Child:
    """A process that leads a session of its own and logs to a file. The parent calls `reap` once."""

    name: str
    popen: subprocess.Popen[bytes]
    pidfd: int
    log: LogFile

    @property
    def pid(self) -> int:
        return self.popen.pid

    def send(self, signum: signal.Signals) -> None:
        """A signal. Not `Popen.send_signal`, which may collect it: its number must stay its own until `reap`."""
        with contextlib.suppress(ProcessLookupError):  # it has ended
            signal.pidfd_send_signal(self.pidfd, signum)

    def status(self) -> int:
        """Its exit status, once it has ended; it is still to be reaped."""
        ended = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def reap(self) -> int:
        """Kill what is left of its process group, and collect it; returns its exit status."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        sweeper.remove(self.pid)
        code = self.popen.wait()
        os.close(self.pidfd)
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
    outlives: bool = False,
) -> Child:
    """Start a process. `environment` is added to this process's; `grace_s` is its time to end in order once this
    process is gone. One that `outlives` this process is nobody's to sweep away. One of a `foreign` program, which knows
    nothing of `process.adopt`, gets its first tie here: then this process must have a single thread. Raises OSError."""
    mark = {} if outlives else sweeper.mark
    if not outlives:
        sweeper.check()
    with log.path.open("ab") as output:
        popen = subprocess.Popen(
            argv,
            cwd=cwd,
            env={**os.environ, **environment, **mark},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=pass_fds,
            preexec_fn=(lambda: process.die_with_parent(signal.SIGTERM)) if foreign else None,
        )
    if not outlives:
        sweeper.add(popen.pid, grace_s)
    return Child(name, popen, os.pidfd_open(popen.pid), log)


def how_it_ended(code: int) -> str:
    """An exit status of `subprocess`, in words."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
