"""The reward workers of a run, as its controller sees them: processes of this machine, and others elsewhere.

    session --completions that have ended--> a free worker, or the one in which its group is suspended --> its outcome

A worker that hangs or dies costs the group that it is working on (RewardError); one of this machine is replaced. Groups
that are suspended in it begin again elsewhere with the completions that they have (SessionLostError). A worker of
another machine connects to `serve`, and is there for as long as its connection.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from aiohttp import web

from areal_core.api.scored_groups import ScoredGroup
from areal_core.api.wire import Arrival
from areal_core.config.schema import RunConfig
from areal_core.errors import ArealError, RewardTimeoutError, RewardWorkerError, SessionLostError
from areal_core.rewards.group import Requests
from areal_core.rewards.remote import ANSWER_BYTES, SILENT_S, RemoteWorker
from areal_core.rewards.worker import Arrived, WorkerProcess, advance
from areal_core.types import Prompt

logger = logging.getLogger(__name__)
_lost = functools.partial(SessionLostError, "the reward worker that this group was suspended in is gone")
_closed = functools.partial(RewardWorkerError, "the reward workers have ended")


class RewardPool:
    """Make and close it in the thread that runs the event loop and outlives the pool: the processes here die with the
    thread that spawned them."""

    def __init__(
        self,
        workers: int,
        timeout_s: float,
        *,
        function: Callable[[Any], Any],
        timeline: Callable[[int], Path] | None = None,
    ) -> None:
        """`workers` of this machine, whose places are 0 to `workers - 1`. `function`: what they do with a message.
        `timeline`: the file of a worker's timeline, by its place."""
        self._timeout_s = timeout_s
        self._function = function
        self._timeline = timeline
        self._threads = ThreadPoolExecutor(max(1, workers), thread_name_prefix="reward")
        self._here = workers
        self._workers: set[_Worker] = {self._started(place) for place in range(workers)}
        self._idle = dict.fromkeys(self._workers)  # the one that has been idle for longest first
        self._waiting: deque[tuple[_Worker | None, asyncio.Future[_Worker]]] = deque()  # for whom; None: for any
        self._groups = itertools.count(1)
        self._closed = False

    def begin(self, prompt: Prompt, n: int, *, apart: bool = False, shown: bool = False) -> GroupSession:
        """A group of `n` rollouts that has not begun. `apart`: each of its verdicts is found in a process of its own,
        since one of them has cost a worker its own. `shown`: the scored group has samples."""
        return GroupSession(
            self, Arrived(group=next(self._groups), prompt=prompt, completions=(), apart=apart, n=n, shown=shown)
        )

    async def ask(self, message: Any, wanted: _Worker | None = None) -> tuple[Any, _Worker]:
        """Send a message to a free worker, or to the `wanted` one. Returns the result and that worker. Raises
        RewardError when the verifier fails, RewardTimeoutError when it takes longer than the timeout (waiting for a
        worker does not count), RewardWorkerError when it loses its process or its machine, and SessionLostError where
        the wanted worker is gone, or a worker has gone before it had the message, or has left."""
        while not (worker := await self._take(wanted)).alive:
            self._lose(worker)
            if wanted is not None:
                raise _lost()
        try:
            result = await self._asked(worker, message)
            if isinstance(result, RewardTimeoutError | RewardWorkerError):  # it has lost its process
                raise result
        except BaseException:  # it hangs, it is dead, or its result is no longer waited for
            self._lose(worker)
            raise
        self._put_back(worker)
        if isinstance(result, ArealError):
            raise result
        return result, worker

    async def serve(self, place: int, request: web.Request) -> web.WebSocketResponse:
        """Have the worker of another machine with this `place` work until its connection, `request`, ends. Raises
        ValueError for a place that is not the worker's."""
        if self._closed:
            raise web.HTTPServiceUnavailable(text=str(_closed()))
        if place < self._here:
            raise ValueError(f"place: must be at least {self._here}, the first of other machines, got {place}")
        if place in {worker.place for worker in self._workers}:
            raise ValueError(f"place: {place} is another reward worker's (--first)")
        socket = web.WebSocketResponse(heartbeat=SILENT_S, compress=False, max_msg_size=ANSWER_BYTES + 1)
        if not socket.can_prepare(request):
            raise ValueError("the request must begin a WebSocket")
        worker = RemoteWorker(place, socket)
        self._workers.add(worker)
        try:
            await socket.prepare(request)
            self._put_back(worker)
            logger.info("reward worker %d is there", place)
            await worker.follow()
        finally:
            self._lose(worker)
        return socket

    def pids(self) -> list[int]:
        """Of the processes here."""
        return [worker.process.pid for worker in self._workers if isinstance(worker, WorkerProcess)]

    async def close(self) -> None:
        """Kill the workers; jobs under way or waiting end with a RewardError."""
        self._closed = True
        for worker in list(self._workers):
            self._lose(worker)
        for _, turn in self._waiting:
            if not turn.done():
                turn.set_exception(_closed())

    async def _take(self, wanted: _Worker | None) -> _Worker:
        if self._closed:
            raise _closed()
        if wanted is not None and wanted not in self._workers:
            raise _lost()
        if wanted in self._idle if wanted is not None else self._idle:
            worker = wanted or next(iter(self._idle))
            del self._idle[worker]
            return worker
        turn: asyncio.Future[_Worker] = asyncio.get_running_loop().create_future()
        self._waiting.append((wanted, turn))
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:  # it was given one at that moment
                self._put_back(turn.result())
            raise

    def _put_back(self, worker: _Worker) -> None:
        """Give a free worker to the call that has waited longest for it, or for any."""
        if worker not in self._workers:
            return
        for place, (wanted, turn) in enumerate(self._waiting):
            if not turn.done() and wanted in (None, worker):
                del self._waiting[place]
                turn.set_result(worker)
                return
        self._idle[worker] = None

    def _lose(self, worker: _Worker) -> None:
        """A worker is of no more use: end it, and start another one in its place where that was here."""
        if worker not in self._workers:
            return
        self._workers.discard(worker)
        self._idle.pop(worker, None)
        worker.kill()
        for wanted, turn in self._waiting:
            if wanted is worker and not turn.done():
                turn.set_exception(_lost())
        self._waiting = deque(waiting for waiting in self._waiting if not waiting[1].done())
        if self._closed:
            return
        if isinstance(worker, RemoteWorker):
            logger.warning("reward worker %d is gone", worker.place)
        else:
            self._workers.add(fresh := self._started(worker.place))
            self._put_back(fresh)

    def _started(self, place: int) -> WorkerProcess:
        return WorkerProcess(self._function, place, None if self._timeline is None else self._timeline(place))

    async def _asked(self, worker: _Worker, message: Any) -> Any:
        if isinstance(worker, RemoteWorker):
            return await worker.ask(message, self._timeout_s)
        return await asyncio.get_running_loop().run_in_executor(self._threads, worker.ask, message, self._timeout_s)


def open_rewards(
    config: RunConfig, model_path: str, workers: int, timeline: Callable[[int], Path] | None = None
) -> RewardPool:
    """The workers that run the environment of a run, with the tokenizer in the folder `model_path`."""
    function = functools.partial(advance, config, model_path)
    return RewardPool(workers, config.rollout.reward_timeout_s, function=function, timeline=timeline)


class GroupSession:
    """The rollouts of one group, in the worker that began them."""

    def __init__(self, pool: RewardPool, begun: Arrived) -> None:
        self._pool = pool
        self._begun = begun
        self._worker: _Worker | None = None  # where it is suspended

    async def advance(self, arrived: Sequence[Arrival]) -> Requests | ScoredGroup:
        """As `rollouts.Session` has it. Raises GenerationError for a response that holds no completions, and
        RewardError when rollouts fail or can't be scored, take longer than the timeout, or lose their worker."""
        prompt = self._begun.prompt if self._worker is None else None
        message = replace(self._begun, prompt=prompt, completions=arrived)
        worker, self._worker = self._worker, None  # after an error nothing of it is left there
        try:
            outcome, worker = await self._pool.ask(message, worker)
        except asyncio.CancelledError:
            self._worker = worker  # while it waited for that worker: it is still suspended there
            raise
        if not isinstance(outcome, ScoredGroup):
            self._worker = worker
        return outcome

    def close(self) -> None:
        """Give the group up, also where it is suspended in a worker."""
        if self._worker is not None:
            self._worker.forgotten.append(self._begun.group)
            self._worker = None


_Worker = WorkerProcess | RemoteWorker
