"""Processes that are started together, watched together and ended in order.

Everything that they start in turn carries a mark in its environment, however deep and in whatever session, and holds
the lifeline of `areal_core.launch.process`: nothing outlives them, whoever is killed.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import psutil

from areal_core.errors import ProcessError
from areal_core.launch import process

MARK = "AREAL_STACK"  # in the environment of everything that is started, however deep
GRACE_S = 10.0
ORPHAN_GRACE_S = 20.0  # of a process whose supervisor was killed
_START_TIMEOUT_S = 120.0
_PROBE_INTERVAL_S = 0.1  # a foreign server can only be asked whether it is ready


@dataclass(frozen=True)
class _Service:
    name: str
    popen: subprocess.Popen[bytes]
    pidfd: int
    log: Path
    grace_s: float
    needed: bool
    sessions: bool  # what it starts has sessions of its own

    def obituary(self) -> str:
        code = self.popen.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return f"{self.name} {how}: {_last_line(self.log)}"


class _StopAsked(Exception):  # noqa: N818 - an ending, not a failure
    pass


class Services:
    """Processes, watched together with the request to stop (SIGTERM, SIGINT, SIGHUP).

    MARK must be set in this process's environment. The end of the block ends them all, last started first.
    """

    def __init__(self, *, cwd: Path, logs: Path) -> None:
        self._cwd, self._logs = cwd, logs
        self._services: list[_Service] = []
        self._asked, self._ask = os.pipe()
        self._lifeline, self._our_end = os.pipe()  # never written to

    def __enter__(self) -> Services:
        def ask(_signum: int, _frame: FrameType | None) -> None:
            os.write(self._ask, b"x")

        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, ask)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        while self._services:
            self._end(self._services[-1])
        return kind is _StopAsked

    def _end(self, service: _Service) -> None:
        """End what a service has started too. What one that was killed has left in sessions of its own is given the
        time to end in order."""
        self._services.remove(service)
        service.popen.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            service.popen.wait(service.grace_s)
        if service.sessions:
            end_marked(os.environ[MARK], service.grace_s, {os.getpid(), *(left.popen.pid for left in self._services)})
        else:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(service.popen.pid, signal.SIGKILL)
        service.popen.wait()
        os.close(service.pidfd)

    def start(
        self,
        name: str,
        argv: list[str],
        environment: Mapping[str, str],
        grace_s: float = GRACE_S,
        *,
        needed: bool = True,
        sessions: bool = False,
    ) -> None:
        path = self._logs / f"{name}.log"
        with path.open("w") as log:
            popen = subprocess.Popen(
                argv,
                cwd=self._cwd,
                env={**os.environ, **environment, **tie(self._lifeline, ORPHAN_GRACE_S)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(self._lifeline,),
                start_new_session=True,
                # Foreign programs don't watch the lifeline. Safe here: no thread of this process holds a lock.
                preexec_fn=lambda: process.die_with_parent(signal.SIGTERM),
            )
        self._services.append(_Service(name, popen, os.pidfd_open(popen.pid), path, grace_s, needed, sessions))

    def until_ready(self, probes: Mapping[str, Callable[[], bool]]) -> None:
        """Raises ProcessError naming what was not ready in time or ended before."""
        deadline = time.monotonic() + _START_TIMEOUT_S
        missing = dict(probes)
        while missing:
            for service in self._ended(_PROBE_INTERVAL_S):
                raise ProcessError(service.obituary())
            missing = {name: ready for name, ready in missing.items() if not ready()}
            if time.monotonic() > deadline:
                raise ProcessError(
                    f"{', '.join(missing)}: not ready after {_START_TIMEOUT_S:.0f} s; logs are in {self._logs}"
                )

    def watch(self) -> Iterator[str]:
        """Until asked to stop: how those ended that are not needed. Raises ProcessError once another one ends."""
        while True:
            for service in self._ended(None):
                if service.needed:
                    raise ProcessError(service.obituary())
                self._end(service)
                yield service.obituary()

    def _ended(self, timeout_s: float | None) -> list[_Service]:
        """The services that have ended by themselves; waits up to `timeout_s` for one, or for the request to stop."""
        ended, _, _ = select.select([self._asked, *(service.pidfd for service in self._services)], [], [], timeout_s)
        if self._asked in ended:
            raise _StopAsked
        return [service for service in self._services if service.pidfd in ended]


def end_marked(mark: str, grace_s: float, groups_left_alone: Collection[int] = ()) -> None:
    """Wait for what bears the mark outside of these process groups; what is there after `grace_s` is killed.

    A worker that is killed leaves its flow run, a server its helpers, in whatever session.
    """
    deadline = time.monotonic() + grace_s
    while left := [found for found in _marked(mark) if _group(found.pid) not in groups_left_alone]:
        _, alive = psutil.wait_procs(left, max(0.0, deadline - time.monotonic()))
        for straggler in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                straggler.kill()


def _marked(mark: str) -> list[psutil.Process]:
    found: list[psutil.Process] = []
    for candidate in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # gone meanwhile, or another user's
            if candidate.environ().get(MARK) == mark:
                found.append(candidate)
    return found


def _group(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def tie(lifeline: int, grace_s: float) -> dict[str, str]:
    """What a process that is handed this read end of a lifeline finds it by, in its environment."""
    return {process.LIFELINE: f"{lifeline}:{os.fstat(lifeline).st_ino}", process.GRACE: str(grace_s)}


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"{lines[-1].strip() if lines else 'no word'} ({log})"
