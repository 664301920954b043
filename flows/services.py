"""Supervise a set of processes: start, watch, restart, and end them in order.

Each process and all its descendants, in any session, carry a mark in their environment. The sweeper
(`areal_core.launch.sweeper`) finds them by the mark. So no process outlives the supervisor, even if it is killed.
"""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_core.errors import ProcessError
from areal_core.launch import children
from areal_core.launch.logs import LogFile
from areal_core.launch.supervisor import StopSignal
from areal_core.launch.sweeper import end_marked, poll

MARK = "AREAL_STACK"  # environment variable of all descendants
GRACE_S = 10.0
ORPHAN_GRACE_S = 20.0  # grace of a process whose supervisor was killed
_START_TIMEOUT_S = 120.0
_PROBE_INTERVAL_S = 0.1  # third-party servers don't announce that they are ready
_POLL_INTERVAL_S = 10.0  # interval of log rotation


@dataclass(frozen=True)
class _Service:
    process: children.Child
    grace_s: float
    sessions: bool  # its descendants use other sessions
    needed: bool  # all services end with it
    restart: Callable[[], None] | None  # restarts the service; None: no restarts left

    def exit_message(self) -> str:
        name, log = self.process.name, self.process.log
        how = children.how_it_ended(self.process.status())
        return f"{name} {how}: {log.last_lines(name, 1)} ({log.path})"


class _StopRequested(Exception):  # noqa: N818 - an ending, not a failure
    """This process has received a signal to end."""


class Services:
    """Supervisor of processes that also waits for a stop request (SIGTERM, SIGINT, SIGHUP).

    MARK must be set in this process's environment. On exit of the context all processes end, last started first."""

    def __init__(self, *, cwd: Path, logs: Path) -> None:
        self._cwd, self._logs = cwd, logs
        self._services: list[_Service] = []
        self._stop_requested = StopSignal()

    def __enter__(self) -> Services:
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, lambda *_: self._stop_requested.set())
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        while self._services:
            self._end(self._services[-1])
        return kind is _StopRequested

    def _end(self, service: _Service) -> None:
        """End a service with its descendants.
        Leftovers of a killed service in other sessions get time to end in order."""
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
        """Start a service.
        It is restarted up to `restarts` times; if a `needed` service then ends, all services end."""
        options: dict[str, Any] = {"needed": needed, "sessions": sessions, "restarts": restarts - 1}
        restart = functools.partial(self.start, name, argv, environment, grace_s, **options) if restarts else None
        log = LogFile(self._logs / f"{name}.log")
        # Third-party programs don't call `process.tie_to_parent`. `foreign` is safe: no thread of this process holds a
        # lock. An optional service (MLflow) first receives the last metrics of runs; then the sweeper ends it.
        started = children.start(
            name, argv, log=log, environment=environment, grace_s=ORPHAN_GRACE_S, cwd=self._cwd, foreign=needed
        )
        self._services.append(_Service(started, grace_s, sessions, needed, restart))

    def until_ready(self, probes: Mapping[str, Callable[[], bool]]) -> None:
        """Wait until all probes succeed.
        Raises ProcessError, naming a service that has ended or is not ready in time."""
        deadline = time.monotonic() + _START_TIMEOUT_S
        missing = dict(probes)
        while missing:
            for service in self._ended(_PROBE_INTERVAL_S):
                raise ProcessError(service.exit_message())
            missing = {name: ready for name, ready in missing.items() if not ready()}
            if time.monotonic() > deadline:
                raise ProcessError(
                    f"{', '.join(missing)}: not ready after {_START_TIMEOUT_S:.0f} s; see the logs in {self._logs}"
                )

    def watch(self) -> Iterator[str]:
        """Watch until asked to stop; yield one line per ended service.
        Raises ProcessError once a needed service ends without restarts left."""
        while True:
            for service in self._ended(_POLL_INTERVAL_S):
                exit_message = service.exit_message()
                if service.restart is None and service.needed:
                    raise ProcessError(exit_message)
                place = self._services.index(service)
                self._end(service)
                if service.restart is None:
                    yield f"{exit_message}; runs continue without it and keep their metrics until it is back"
                    continue
                service.restart()
                self._services.insert(place, self._services.pop())  # keeps its place in the order of the end
                yield f"{exit_message}; restarting it while runs continue"
            for service in self._services:
                service.process.log.new_lines()  # reading rotates the log
            children.sweeper.check()

    def _ended(self, timeout_s: float | None) -> list[_Service]:
        """Services that have ended.
        Waits up to `timeout_s` for one, or for the stop request, which raises _StopRequested."""
        ended = poll([self._stop_requested.fileno(), *(service.process.pidfd for service in self._services)], timeout_s)
        if self._stop_requested.fileno() in ended:
            raise _StopRequested
        return [service for service in self._services if service.process.pidfd in ended]
