"""What a reward worker is: a process that runs the rollouts of groups, their verification and packing.

A group is suspended in a worker from its first completion to its last, and resumed as they end. A verifier may hang or
take its process down. A worker does one thing at a time, so that either costs the group that it is working on: who asks
it gets a RewardError, which says nothing about the completions, and starts another one. That one judges each completion
of the group in a fork of its own (`Arrived.apart_s`), so that the answer which did it is found.
"""

from __future__ import annotations

import asyncio
import faulthandler
import functools
import io
import multiprocessing
import os
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

from areal_core.api.scored_groups import ScoredGroup
from areal_core.api.wire import Arrival
from areal_core.config.schema import AlgorithmConfig, EnvironmentConfig, RunConfig, TaskConfig
from areal_core.environments import verdicts
from areal_core.environments.environment import Environment
from areal_core.environments.registry import open_environment
from areal_core.errors import ArealError, RewardError, RewardTimeoutError, RewardWorkerError, VerifierError
from areal_core.models.tokenizer import Tokenizer
from areal_core.rewards.group import GroupRollout, Requests
from areal_core.tracking.timeline import TimelineWriter
from areal_core.types import Prompt

_START_TIMEOUT_S = 120.0  # a worker imports numpy and tokenizers, on a machine that may be busy
LAST_WORDS_S = 3.0  # beyond its time limit, for a worker to say where it hangs
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

    @classmethod
    def of(cls, prompt: Prompt, config: RunConfig, model_path: str) -> GroupJob:
        """A group of a run."""
        return cls(
            prompt=prompt,
            n=config.algorithm.group_size,
            environment=config.environment,
            task=config.task,
            algorithm=config.algorithm,
            model_path=model_path,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """Completions of a group that have ended."""

    group: int  # its id in the worker
    job: GroupJob | None  # with the first ones
    completions: Sequence[Arrival]
    apart_s: float | None = None  # seconds of a verdict in a fork of its own; None: verdicts are found in the worker


def time_limit(message: Arrived, timeout_s: float) -> float:
    """Seconds that a worker has for a message, where one verdict has `timeout_s`."""
    return timeout_s if message.apart_s is None else timeout_s * (1 + len(message.completions))


class WorkerProcess:
    """A worker and its parent's end of the pipe to it. It dies with the thread that makes it."""

    def __init__(self, function: Callable[[Any], Any], place: int, timeline: Path | None) -> None:
        """`function`: what it does with a message. `place`: its number in the run. `timeline`: the file of what it did
        when."""
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

    @property
    def alive(self) -> bool:
        return self.process.is_alive()

    def start(self) -> None:
        """Blocks until it is ready. Raises RewardWorkerError."""
        try:
            if not self._started:
                self._receive(time.monotonic() + _START_TIMEOUT_S)
                self._started = True
                self._timeline = None if self._file is None else TimelineWriter(self._file, cpu=lambda: self._cpu_s)
        except BlockingIOError:
            raise RewardWorkerError("the reward worker did not start") from None
        except (EOFError, OSError) as error:
            raise RewardWorkerError("the reward worker died as it started") from error

    def ask(self, message: Any, timeout_s: float) -> Any:
        """Blocks until the result is there, a returned ArealError included. Raises RewardTimeoutError or
        RewardWorkerError when it does not come: then the worker is of no more use. Raises OSError for a timeline that
        can't be written."""
        self.start()
        start = time.monotonic()
        try:
            forgotten, self.forgotten = self.forgotten, []
            self._limit(start + timeout_s + LAST_WORDS_S)
            self._pipe.send((forgotten, timeout_s, message))
            result = self._receive(start + timeout_s + LAST_WORDS_S)
        except BlockingIOError:
            raise RewardTimeoutError(
                f"the reward worker did not respond in {timeout_s:g} s (rollout.reward_timeout_s); its stack is in the "
                "log of the process that started it, unless that stopped it"
            ) from None
        except (EOFError, OSError) as error:
            raise RewardWorkerError("the reward worker died while it scored this group") from error
        if isinstance(result, RewardTimeoutError):
            raise result
        if self._timeline is not None:
            self._timeline.span("score", start, time.monotonic())
        return result

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


def _serve(pipe: Connection, function: Callable[[Any], Any], place: int) -> None:
    """The worker process: one message after the other until the pool is gone. Every result carries the CPU seconds that
    the process has used so far; the first one says that it is ready."""
    from areal_core.launch import logs
    from areal_core.launch.process import die_with_parent

    logs.start("reward", place)
    die_with_parent()
    faulthandler.enable()
    pipe.send((None, time.process_time()))
    while True:
        if _suspended:
            _loop().run_until_complete(_readable(pipe))  # what they do beside waiting for the policy goes on
        try:
            forgotten, timeout_s, message = pipe.recv()
        except EOFError:
            return
        for group in forgotten:
            if group in _suspended:
                _suspended.pop(group).close()
        with limited(lambda error: pipe.send((error, time.process_time())), timeout_s):
            result = attempt(function, message)
        pipe.send((result, time.process_time()))


def attempt(function: Callable[[Any], Any], message: Any) -> Any:
    """The result of a call, or the ArealError that it raises. Any other exception is a bug of the user's."""
    try:
        return function(message)
    except ArealError as error:
        return error
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the boundary: it costs one group, not the worker
        return VerifierError(verdicts.explained("the environment", error))


@contextmanager
def limited(tell: Callable[[RewardTimeoutError], None], timeout_s: float) -> Iterator[None]:
    """Within, a process that takes longer tells where it hangs, and ends."""

    def end(_: int, frame: FrameType | None) -> None:
        tell(RewardTimeoutError(verdicts.hung(frame, timeout_s, _waiting())))
        os._exit(1)

    signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, timeout_s)
    faulthandler.dump_traceback_later(timeout_s + LAST_WORDS_S / 2)  # native code lets no handler run
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()


def _waiting() -> str:
    """The stacks of coroutines, where all of them wait for something."""
    loop, stacks = _loop(), io.StringIO()
    if not loop.is_running() or asyncio.current_task(loop) is not None:
        return ""
    for task in asyncio.all_tasks(loop):
        task.print_stack(limit=4, file=stacks)
    return stacks.getvalue()


_suspended: dict[int, GroupRollout] = {}  # in a worker: groups that wait for the policy
_loop = functools.cache(asyncio.new_event_loop)  # in a worker: where their coroutines live


async def _readable(pipe: Connection) -> None:
    readable, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.add_reader(pipe.fileno(), readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(pipe.fileno())


def advance(message: Arrived) -> Requests | ScoredGroup:
    """In a worker: begin or resume the rollouts of a group, until they wait for completions or are done."""
    global _running
    rollout = _running = _suspended.pop(message.group) if message.job is None else _rollout(message.job)
    try:
        with verdicts.apart(message.apart_s):
            outcome = _loop().run_until_complete(rollout.advance(message.completions))
    except RewardError as error:
        raise error if rollout.failure is None else VerifierError(rollout.failure) from error
    if isinstance(outcome, ScoredGroup):
        return replace(outcome, failure=rollout.failure)
    _suspended[message.group] = rollout
    return outcome


_running: GroupRollout | None = None  # in a worker: the group that its message is for


def _failed(failure: str) -> None:
    if _running is not None and _running.failure is None:
        _running.failure = failure


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
    return open_environment(environment, task, algorithm, _tokenizer(model_path), _failed)


@functools.lru_cache(maxsize=2)
def _tokenizer(model_path: str) -> Tokenizer:
    return Tokenizer.from_folder(model_path)
