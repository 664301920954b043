"""The controller's pool of reward workers: processes of this machine, and workers of other machines.

    session --finished completions--> the worker of its group
    session <--requests, scored group or error-- the worker of its group

A new group goes to the worker with the fewest groups. If a worker hangs or dies, only the group whose code was running
loses an attempt (RewardError). Its other groups begin again in another worker with their completions
(SessionLostError). The pool replaces lost workers of this machine. A worker of another machine connects to `serve`,
and exists as long as its connection.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from aiohttp import web

from areal_core.api.wire import Arrival
from areal_core.config.schema import RunConfig
from areal_core.environments.environment import Environment
from areal_core.environments.registry import environment_class
from areal_core.errors import RewardError, RewardWorkerError, SessionLostError
from areal_core.rewards.group import OutcomeQueue
from areal_core.rewards.remote import ANSWER_BYTES, SILENT_S, RemoteWorker
from areal_core.rewards.worker import Event, GroupMessage, Groups, WorkerProcess
from areal_core.types import Prompt

logger = logging.getLogger(__name__)
_MAX_MESSAGES = 64  # most messages sent together
_lost = functools.partial(SessionLostError, "the reward worker of this group has exited")
_closed = functools.partial(RewardWorkerError, "the reward workers have stopped")


class RewardPool:
    """The reward workers of a run.

    Create and close the pool in the thread of the event loop, which must outlive it. Worker processes die with the
    thread that started them.
    """

    def __init__(
        self,
        workers: int,
        timeout_s: float,
        *,
        function: Callable[[Any], Any],
        timeline: Callable[[int], Path] | None = None,
        tears_down: bool = False,
    ) -> None:
        """Start `workers` workers on this machine, at places 0 to `workers - 1`.
        `function` handles a message, see WorkerProcess. `timeline` returns the timeline file of a place. With
        `tears_down` workers of this machine get time to end in order. `timeout_s` limits each verdict, in seconds."""
        self._timeout_s = timeout_s
        self._function = function
        self._timeline = timeline
        self._tears_down = tears_down
        self._here = workers
        self._workers: list[_Worker] = []
        self._waiting: list[Session] = []  # for a worker
        self._groups = itertools.count(1)
        self._closed = False
        self._start()

    def begin(self, prompt: Prompt, n: int, *, apart: bool = False, shown: bool = False) -> GroupSession:
        """Create a session for `n` rollouts; its first message begins them.
        `apart` judges each completion in its own process, because this group has killed a worker before. With `shown`
        the scored group has samples."""
        return GroupSession(
            self, next(self._groups), GroupMessage(prompt=prompt, completions=(), apart=apart, n=n, shown=shown)
        )

    async def ask(self, message: Any) -> Any:
        """Return the result of a single message.
        Raises RewardError if the verifier fails, RewardTimeoutError if it exceeds the timeout, and RewardWorkerError if
        the worker dies."""
        while True:
            session = Session(self, next(self._groups))
            try:
                session.send(message)
                return await session.next_outcome()
            except SessionLostError:
                continue  # another message killed the worker
            finally:
                session.close()

    async def serve(self, place: int, request: web.Request) -> web.WebSocketResponse:
        """Run the worker of another machine at `place`, until its WebSocket `request` ends.
        Raises ValueError for an invalid or taken place."""
        if self._closed:
            raise web.HTTPServiceUnavailable(text=str(_closed()))
        if place < self._here:
            raise ValueError(f"place: must be at least {self._here}, the first place for other machines, got {place}")
        if place in {worker.place for worker in self._workers}:
            raise ValueError(f"place: another reward worker has {place}; choose another --first")
        socket = web.WebSocketResponse(heartbeat=SILENT_S, compress=False, max_msg_size=ANSWER_BYTES + 9)
        if not socket.can_prepare(request):
            raise ValueError("the request must open a WebSocket")
        worker = RemoteWorker(place, socket)
        self._workers.append(worker)
        self._place_waiting()
        try:
            await socket.prepare(request)
            logger.info("reward worker %d connected", place)
            await worker.follow(functools.partial(self._handle, worker))
        finally:
            self._remove(worker)
        return socket

    def pids(self) -> list[int]:
        """Process ids of the workers of this machine."""
        return [worker.process.process.pid for worker in self._workers if isinstance(worker, _LocalWorker)]

    async def close(self) -> None:
        """Kill the workers. Unfinished groups end with a RewardError."""
        self._closed = True
        if self._tears_down:
            here = [worker for worker in self._workers if isinstance(worker, _LocalWorker)]
            for worker in here:
                worker.send(0, None)
            await asyncio.gather(*(asyncio.to_thread(worker.process.wait) for worker in here))
        for worker in self._workers[:]:
            self._remove(worker)
        for session in self._waiting:
            session.report(_closed())

    def place(self, session: Session) -> None:
        """Assign a worker to a session, now or once a worker is available."""
        if self._closed:
            session.report(_closed())
            return
        self._start()
        self._waiting.append(session)
        self._place_waiting()

    def abandon(self, session: Session) -> None:
        """Abandon a session's group."""
        if session in self._waiting:
            self._waiting.remove(session)
        if session.worker is not None:
            del session.worker.sessions[session.group]
            session.worker.send(session.group, None)
            session.worker = None

    def _place_waiting(self) -> None:
        while self._workers and self._waiting:
            self._waiting.pop(0).place(min(self._workers, key=lambda worker: len(worker.sessions)))

    def _handle(self, worker: _Worker, event: Event) -> None:
        group, outcome = event
        if session := worker.sessions.get(group):
            if not isinstance(outcome, tuple):  # else they are requests, and the group continues
                del worker.sessions[group]
                session.worker = None
            session.report(outcome)

    def _remove(self, worker: _Worker, error: RewardError | None = None, at_fault: int | None = None) -> None:
        """End a failed worker. The group `at_fault` gets the `error`; None: all its groups get it."""
        if worker not in self._workers:
            return
        self._workers.remove(worker)
        worker.kill()
        for group, session in worker.sessions.items():
            session.worker = None
            mine = error if error is not None and at_fault in (None, group) else None
            session.report(_closed() if self._closed else mine or _lost())
        worker.sessions.clear()
        if not self._closed:
            if isinstance(worker, RemoteWorker):
                logger.warning("reward worker %d disconnected", worker.place)
            elif at_fault is not None:  # it had started, so a replacement will start, too
                self._start()

    def _start(self) -> None:
        """Start the missing workers of this machine."""
        places = range(0 if self._closed else self._here)
        for place in sorted({*places} - {worker.place for worker in self._workers}):
            timeline = None if self._timeline is None else self._timeline(place)
            process = WorkerProcess(self._function, place, timeline, self._timeout_s)
            self._workers.append(_LocalWorker(process, self._handle, self._remove))


def open_rewards(
    config: RunConfig, model_path: str, workers: int, timeline: Callable[[int], Path] | None = None
) -> RewardPool:
    """Start the workers for a run's environment. The folder `model_path` holds the tokenizer."""
    tears_down = any(environment_class(its).teardown is not Environment.teardown for its in config.by_task.values())
    function, limit_s = Groups(config, model_path), config.rollout.reward_timeout_s
    return RewardPool(workers, limit_s, function=function, timeline=timeline, tears_down=tears_down)


class Session(OutcomeQueue):
    """One group in one worker: its messages and its outcomes."""

    def __init__(self, pool: RewardPool, group: int) -> None:
        super().__init__()
        self.group = group
        self.worker: _Worker | None = None  # None once the group has ended
        self._pool = pool
        self._unsent: list[Any] = []

    def send(self, message: Any) -> None:
        if self.worker is not None:
            self.worker.send(self.group, message)
            return
        self._unsent.append(message)  # ignored if the group has ended meanwhile
        if len(self._unsent) == 1:
            self._pool.place(self)

    def close(self) -> None:
        """Abandon the group, unless it has ended."""
        self._pool.abandon(self)

    def place(self, worker: _Worker) -> None:
        self.worker = worker
        worker.sessions[self.group] = self
        for message in self._unsent:
            worker.send(self.group, message)


class GroupSession(Session):
    """The rollouts of one group, as a session."""

    def __init__(self, pool: RewardPool, group: int, begun: GroupMessage) -> None:
        super().__init__(pool, group)
        self._next = begun  # the next message, without completions

    def deliver(self, arrivals: Sequence[Arrival]) -> None:
        """See `rollouts.Session`."""
        self.send(replace(self._next, completions=arrivals))
        self._next = replace(self._next, prompt=None)

    def cut(self) -> None:
        """See `rollouts.Session`."""
        self.send(replace(self._next, cut=True))


class _LocalWorker:
    """A worker process of this machine, and the two threads that write to it and read from it."""

    def __init__(self, process: WorkerProcess, handle: Callable[..., None], remove: Callable[..., None]) -> None:
        self.process = process
        self.place = process.place
        self.sessions: dict[int, Session] = {}
        self._unsent: list[Event] = []
        self._sending = False  # the thread is sending; later messages are sent together
        self._events = queue.SimpleQueue[list[Event]]()  # [] ends the writer thread
        self._loop = asyncio.get_running_loop()
        self._handle, self._remove = handle, remove
        for work in (self._write, self._read):
            threading.Thread(target=work, name=f"reward-{self.place}", daemon=True).start()

    def send(self, group: int, message: Any) -> None:
        self._unsent.append((group, message))
        if not self._sending:
            self._send()

    def _send(self) -> None:
        events, self._unsent = self._unsent[:_MAX_MESSAGES], self._unsent[_MAX_MESSAGES:]
        self._sending = bool(events)
        if events:
            self._events.put(events)

    def kill(self) -> None:
        self.process.kill()
        self._events.put([])

    def _write(self) -> None:
        while events := self._events.get():
            self.process.send(*events)
            self._call(self._send)

    def _read(self) -> None:
        started = False
        try:
            self.process.start()
            self.process.open()
            started = True
            while True:
                self._call(self._handle, self, self.process.receive())
        except RewardError as error:
            self._call(self._remove, self, error, self.process.running if started else None)

    def _call(self, function: Callable[..., None], *args: Any) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(function, *args)


_Worker = _LocalWorker | RemoteWorker
