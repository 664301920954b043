"""Process control on the parent's side: start child processes, tie them to this process, and end them.

`areal_core.launch.process` is the child's side. `supervisor` runs the roles of a run with this module. `flows.services`
runs the servers behind the web pages with it.
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

sweeper = Sweeper()  # the sweeper of this process; ends its leftover children


@dataclass(frozen=True)
class Child:
    """A process that leads its own session and logs to a file. The parent calls `reap` once."""

    name: str
    popen: subprocess.Popen[bytes]
    pidfd: int
    log: LogFile

    @property
    def pid(self) -> int:
        return self.popen.pid

    def send(self, signum: signal.Signals) -> None:
        """Send a signal without reaping the process, as `Popen.send_signal` might: its pid stays valid."""
        with contextlib.suppress(ProcessLookupError):  # the process has already ended
            signal.pidfd_send_signal(self.pidfd, signum)

    def status(self) -> int:
        """Exit status of an ended process, without reaping it."""
        ended = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def reap(self) -> int:
        """Kill the rest of the process group, collect the process and return its exit status."""
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
    """Start a child process with `environment` added to this process's own. Raises OSError.

    `grace_s` is the child's time to end in order, in seconds, once this process is gone. The sweeper leaves a child
    that `outlives` this process alone. A `foreign` program does not call `process.tie_to_parent`, so its PDEATHSIG is
    set here. Then this process must have a single thread.
    """
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
    """Describe an exit status of `subprocess` in words."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
