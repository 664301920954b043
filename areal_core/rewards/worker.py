"""The reward workers: rollouts of groups, their verification and packing, in processes of their own.

A group is suspended in a worker from its first completion to its last, and resumed as they end. A verifier may hang or
take its process down. Each worker does one thing at a time, so that either costs the group that it is working on: the
worker is killed and replaced, and the caller gets a RewardError, which says nothing about the completions. Groups that
are suspended in the same worker begin again elsewhere with the completions that they have (SessionLostError).
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import multiprocessing
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from areal_core.api.scored_groups import ScoredGroup
from areal_core.api.wire import Arrival, SampledCompletion
from areal_core.config.schema import AlgorithmConfig, EnvironmentConfig, TaskConfig
from areal_core.environments.environment import Environment
from areal_core.environments.registry import open_environment
from areal_core.errors import ArealError, RewardError, RewardTimeoutError, RewardWorkerError, SessionLostError
from areal_core.models.tokenizer import Tokenizer
from areal_core.rewards.group import GroupRollout, Requests
from areal_core.tracking.timeline import TimelineWriter
from areal_core.types import Prompt

_START_TIMEOUT_S = 120.0  # a worker imports numpy and tokenizers, on a machine that may be busy
_spawn = multiprocessing.get_context("spawn")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupJob:
    """A group, and all that its rollouts need beside completions."""

    prompt: Prompt
    n: int  # G
    environment: EnvironmentConfig
    task: TaskConfig
    algorithm: AlgorithmConfig
    model_path: str  # folder that holds the tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arrived:
    """Completions of a group that have ended."""

    group: int  # its id in the worker
    job: GroupJob | None  # with the first ones
    completions: Sequence[Arrival]


def score_group(job: GroupJob, completions: Sequence[SampledCompletion]) -> ScoredGroup:
    """Score a group that requests no more than its first completions, in this process. Raises RewardError for one that
    does, and what `GroupRollout.advance` raises."""
    rollout = _rollout(job)
    with asyncio.Runner() as runner:
        outcome = runner.run(rollout.advance([Arrival(0, index, one) for index, one in enumerate(completions)]))
    if not isinstance(outcome, ScoredGroup):
        raise RewardError(
            f"environment.name: {job.environment.name} requests more completions, and there is no policy here"
        )
    return outcome


class RewardPool:
    """Worker processes that run the rollouts of groups. Make and close it in the thread that runs the event loop
    and outlives the pool: the workers die with the thread that spawned them."""

    def __init__(
        self,
        workers: int,
        timeout_s: float,
        *,
        function: Callable[[Any], Any] | None = None,
        timeline: Callable[[int], Path] | None = None,
    ) -> None:
        """`function`: what workers do with a job, if not its rollouts. `timeline`: the file of a worker's timeline, by
        its place."""
        self._timeout_s = timeout_s
        self._function = function or _advance
        self._timeline = timeline
        self._workers = {self._started(place) for place in range(workers)}
        self._idle = set(self._workers)
        self._waiting: deque[tuple[_Worker | None, asyncio.Future[_Worker]]] = deque()  # for whom; None: for any
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="reward")
        self._groups = itertools.count(1)
        self._closed = False

    def begin(self, job: GroupJob) -> GroupSession:
        """A group that waits for its first completions."""
        return GroupSession(self, job, next(self._groups))

    async def ask(self, message: Any, wanted: _Worker | None = None) -> tuple[Any, _Worker]:
        """Send a message to a free worker, or to the `wanted` one. Returns the result and that worker. Raises
        RewardError when the verifier fails, RewardTimeoutError when it takes longer than the timeout (waiting for a
        worker does not count), RewardWorkerError when it loses its process, and SessionLostError where the wanted
        worker is gone."""
        worker = await self._take(wanted)
        try:
            if not worker.process.is_alive():
                worker = self._replace(worker)
                if wanted is not None:
                    raise _lost()
            ask = functools.partial(worker.ask, message, self._timeout_s)
            try:
                result = await asyncio.get_running_loop().run_in_executor(self._threads, ask)
            except BaseException:  # it hangs, it is dead, or its result is no longer waited for
                worker = self._replace(worker)
                raise
        finally:
            self._put_back(worker)
        if isinstance(result, ArealError):
            raise result
        return result, worker

    def pids(self) -> list[int]:
        return [worker.process.pid for worker in self._workers if worker.process.pid is not None]

    async def close(self) -> None:
        """Kill the workers; jobs under way or waiting end with a RewardError."""
        self._closed = True
        for worker in self._workers:
            worker.kill()

    async def _take(self, wanted: _Worker | None) -> _Worker:
        if wanted is not None and wanted not in self._workers:
            raise _lost()
        if wanted in self._idle if wanted is not None else self._idle:
            worker = wanted or next(iter(self._idle))
            self._idle.discard(worker)
            return worker
        turn: asyncio.Future[_Worker] = asyncio.get_running_loop().create_future()
        self._waiting.append((wanted, turn))
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it was given one at the same moment
                self._put_back(turn.result())
            raise

    def _put_back(self, worker: _Worker) -> None:
        """Give a free worker to the call that has waited longest for it, or for any."""
        for place, (wanted, turn) in enumerate(self._waiting):
            if not turn.done() and wanted in (None, worker):
                del self._waiting[place]
                turn.set_result(worker)
                return
        self._idle.add(worker)

    def _replace(self, worker: _Worker) -> _Worker:
        worker.kill()
        if self._closed:
            return worker
        self._workers.remove(worker)
        self._workers.add(fresh := self._started(worker.place))
        for wanted, turn in self._waiting:
            if wanted is worker and not turn.done():
                turn.set_exception(_lost())
        self._waiting = deque(waiting for waiting in self._waiting if not waiting[1].done())
        return fresh

    def _started(self, place: int) -> _Worker:
        return _Worker(self._function, place, None if self._timeline is None else self._timeline(place))


class GroupSession:
    """The rollouts of one group, in the worker that began them."""

    def __init__(self, pool: RewardPool, job: GroupJob, group: int) -> None:
        self._pool = pool
        self._job = job
        self._group = group
        self._worker: _Worker | None = None  # where it is suspended

    async def advance(self, arrived: Sequence[Arrival]) -> Requests | ScoredGroup:
        """As `rollouts.Session` has it. Raises GenerationError for a response that holds no completions, and
        RewardError when rollouts fail or can't be scored, take longer than the timeout, or lose their worker."""
        job = self._job if self._worker is None else None
        message = _Arrived(group=self._group, job=job, completions=arrived)
        worker, self._worker = self._worker, None  # after an error nothing of it is left there
        outcome, worker = await self._pool.ask(message, worker)
        if not isinstance(outcome, ScoredGroup):
            self._worker = worker
        return outcome

    def close(self) -> None:
        """Give the group up, also where it is suspended in a worker."""
        if self._worker is not None:
            self._worker.forgotten.append(self._group)
            self._worker = None


class _Worker:
    """A process and the parent's end of the pipe to it."""

    def __init__(self, function: Callable[[Any], Any], place: int, timeline: Path | None) -> None:
        self.place = place
        self.forgotten: list[int] = []  # groups suspended in it that are given up
        self._pipe, theirs = _spawn.Pipe()
        self._socket = socket.socket(fileno=os.dup(self._pipe.fileno()))  # the same, for its time limits
        self._started = False
        self._cpu_s = 0.0  # that the process has used, as it says
        self._file = timeline
        self._timeline: TimelineWriter | None = None
        self.process = _spawn.Process(target=_serve, args=(theirs, function, place), name="reward", daemon=True)
        self.process.start()
        theirs.close()  # so that the process' death reads as end-of-file

    def ask(self, message: Any, timeout_s: float) -> Any:
        """Blocks until the result is there. Raises RewardTimeoutError or RewardWorkerError when it does not come."""
        try:
            if not self._started:
                self._receive(time.monotonic() + _START_TIMEOUT_S)
                self._started = True
                self._timeline = None if self._file is None else TimelineWriter(self._file, cpu=lambda: self._cpu_s)
            start = time.monotonic()
            forgotten, self.forgotten = self.forgotten, []
            self._limit(start + timeout_s)
            self._pipe.send((forgotten, message))
            result = self._receive(start + timeout_s)
            if self._timeline is not None:
                self._timeline.span("score", start, time.monotonic())
            return result
        except BlockingIOError:
            what = f"respond in {timeout_s:g} s (rollout.reward_timeout_s)" if self._started else "start"
            raise (RewardTimeoutError if self._started else RewardWorkerError)(
                f"the reward worker did not {what}"
            ) from None
        except (EOFError, OSError) as error:
            raise RewardWorkerError("the reward worker died while it scored this group") from error

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self._socket.close()

    def _receive(self, deadline: float) -> Any:
        self._limit(deadline)
        result, self._cpu_s = self._pipe.recv()
        return result

    def _limit(self, deadline: float) -> None:
        """Have the pipe raise BlockingIOError when it blocks beyond `deadline`, in monotonic time, in either direction:
        a worker that was stopped takes nothing more in."""
        left_us = max(1, round(1e6 * (deadline - time.monotonic())))  # 0 would be for ever
        limit = struct.pack("ll", *divmod(left_us, 10**6))
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            self._socket.setsockopt(socket.SOL_SOCKET, option, limit)


_lost = functools.partial(SessionLostError, "the reward worker that this group was suspended in is gone")


def _serve(pipe: Connection, function: Callable[[Any], Any], place: int) -> None:
    """The worker process: one message after the other until the pool is gone. Every result carries the CPU seconds that
    the process has used so far; the first one says that it is ready."""
    from areal_core.launch import logs
    from areal_core.launch.process import die_with_parent

    logs.start("reward", place)
    die_with_parent()
    pipe.send((None, time.process_time()))
    while True:
        if _suspended:
            _loop().run_until_complete(_readable(pipe))  # what they do beside waiting for the policy goes on
        try:
            forgotten, message = pipe.recv()
        except EOFError:
            return
        for group in forgotten:
            if group in _suspended:
                _suspended.pop(group).close()
        result = _attempt(function, message)
        pipe.send((result, time.process_time()))


def _attempt(function: Callable[[Any], Any], message: Any) -> Any:
    try:
        return function(message)
    except ArealError as error:
        return error
    except Exception as error:  # noqa: BLE001 - the boundary: whatever a verifier does costs one group, not the worker
        return RewardError(f"the verifier failed: {type(error).__name__}: {error}")


_suspended: dict[int, GroupRollout] = {}  # in a worker: groups that wait for the policy
_loop = functools.cache(asyncio.new_event_loop)  # in a worker: where their coroutines live


async def _readable(pipe: Connection) -> None:
    readable, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.add_reader(pipe.fileno(), readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(pipe.fileno())


def _advance(message: _Arrived) -> Requests | ScoredGroup:
    """In a worker: begin or resume the rollouts of a group, until they wait for completions or are done."""
    rollout = _suspended.pop(message.group) if message.job is None else _rollout(message.job)
    outcome = _loop().run_until_complete(rollout.advance(message.completions))
    if not isinstance(outcome, ScoredGroup):
        _suspended[message.group] = rollout
    return outcome


def _rollout(job: GroupJob) -> GroupRollout:
    return GroupRollout(
        _environment(job.environment, job.task, job.algorithm, job.model_path),
        job.prompt,
        n=job.n,
        max_new_tokens=job.task.max_new_tokens,
    )


@functools.lru_cache(maxsize=2)
def _environment(
    environment: EnvironmentConfig, task: TaskConfig, algorithm: AlgorithmConfig, model_path: str
) -> Environment:
    return open_environment(environment, task, algorithm, _tokenizer(model_path))


@functools.lru_cache(maxsize=2)
def _tokenizer(model_path: str) -> Tokenizer:
    return Tokenizer.from_folder(model_path)
