"""Processes that are started together, watched together and ended in order.

Everything that they start in turn carries a mark in its environment, however deep and in whatever session, by which
`areal_core.launch.sweeper` finds it: nothing outlives them, whoever is killed.
"""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from areal_core.errors import ProcessError
from areal_core.launch import children
from areal_core.launch.logs import LogFile
from areal_core.launch.sweeper import end_marked, poll

MARK = "AREAL_STACK"  # in the environment of everything that is started, however deep
GRACE_S = 10.0
ORPHAN_GRACE_S = 20.0  # of a process whose supervisor was killed
_START_TIMEOUT_S = 120.0
_PROBE_INTERVAL_S = 0.1  # a foreign server does not say when it is ready: it is polled
_LOOK_INTERVAL_S = 10.0  # at the logs, for their rotation


@dataclass(frozen=True)
class _Service:
    process: children.Child
    grace_s: float
    sessions: bool  # what it starts has sessions of its own
    needed: bool  # all ends with it
    again: Callable[[], None] | None  # starts it once more; None: not any more

    def obituary(self) -> str:
        name, log = self.process.name, self.process.log
        how = children.how_it_ended(self.process.status())
        return f"{name} {how}: {log.last_lines(name, 1)} ({log.path})"


def log_file(folder: Path, name: str) -> LogFile:
    return LogFile(folder / f"{name}.log")


class _StopAsked(Exception):  # noqa: N818 - an ending, not a failure
    """This process was sent a signal to end."""


class Services:
    """Supervisor of processes that also watches for the request to stop (SIGTERM, SIGINT, SIGHUP).

    MARK must be set in this process's environment. The end of the block ends them all, last started first.
    """

    def __init__(self, *, cwd: Path, logs: Path) -> None:
        self._cwd, self._logs = cwd, logs
        self._services: list[_Service] = []
        self._asked, self._ask = os.pipe()

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
        """End a service with all that it has started. What one that was killed has left in sessions of its own is given
        the time to end in order."""
        self._services.remove(service)
        ending = service.process
        ending.send(signal.SIGTERM)
        poll([ending.pidfd], service.grace_s)
        if service.sessions:
            others = {os.getpid(), *(left.process.pid for left in self._services)}
            end_marked(f"{MARK}={os.environ[MARK]}", service.grace_s, others)
        ending.reap()

    def start(
        self,
        name: str,
        argv: list[str],
        environment: Mapping[str, str],
        grace_s: float = GRACE_S,
        *,
        needed: bool = True,
        sessions: bool = False,
        restarts: int = 0,
    ) -> None:
        """`restarts`: how often it is started again. After that all ends with one that is `needed`."""
        options: dict[str, Any] = {"needed": needed, "sessions": sessions, "restarts": restarts - 1}
        again = functools.partial(self.start, name, argv, environment, grace_s, **options) if restarts else None
        log = log_file(self._logs, name)
        # Foreign programs don't call `process.adopt`. Safe here: no thread of this process holds a lock. A service that
        # is not needed (MLflow) takes the last words of runs first; the sweeper ends it.
        started = children.start(
            name, argv, log=log, environment=environment, grace_s=ORPHAN_GRACE_S, cwd=self._cwd, foreign=needed
        )
        self._services.append(_Service(started, grace_s, sessions, needed, again))

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
        """Until asked to stop: how services ended. Raises ProcessError once a needed one ends for good."""
        while True:
            for service in self._ended(_LOOK_INTERVAL_S):
                obituary = service.obituary()
                if service.again is None and service.needed:
                    raise ProcessError(obituary)
                place = self._services.index(service)
                self._end(service)
                if service.again is None:
                    yield f"{obituary}; runs go on without it, what they would send waits"
                    continue
                service.again()
                self._services.insert(place, self._services.pop())  # its turn at the end stays the same
                yield f"{obituary}; it is started again, runs go on meanwhile"
            for service in self._services:
                service.process.log.new_lines()  # a look rotates it
            children.sweeper.check()

    def _ended(self, timeout_s: float | None) -> list[_Service]:
        """The services that have ended by themselves; waits up to `timeout_s` for one, or for the request to stop."""
        ended = poll([self._asked, *(service.process.pidfd for service in self._services)], timeout_s)
        if self._asked in ended:
            raise _StopAsked
        return [service for service in self._services if service.process.pidfd in ended]
