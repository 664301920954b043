"""What a reward worker is: a process that runs the rollouts of groups, their verification and packing.

A group is suspended in a worker from its first completion to its last, and resumed as they end. A verifier may hang or
take its process down. A worker does one thing at a time, so that either costs the group that it is working on: who asks
it gets a RewardError, which says nothing about the completions, and starts another one. Then each completion of the
group is judged in a worker of its own (`Arrived.apart`, `judged_apart`), so that only the one at fault is lost.
"""

from __future__ import annotations

import asyncio
import faulthandler
import functools
import io
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

from areal_core.api.scored_groups import ScoredGroup
from areal_core.api.wire import Arrival
from areal_core.config.schema import RunConfig
from areal_core.environments import verdicts
from areal_core.environments.environment import Environment
from areal_core.environments.registry import open_environment, open_judge
from areal_core.environments.verdicts import Apart, Verdict
from areal_core.errors import ArealError, RewardError, RewardTimeoutError, RewardWorkerError, VerifierError
from areal_core.models.tokenizer import Tokenizer
from areal_core.rewards.group import GroupRollout, Requests
from areal_core.tracking.timeline import TimelineWriter
from areal_core.types import Outcome, Prompt

_START_S = 120.0  # for a process to import numpy and tokenizers, on a machine that may be busy
_OPEN_S = 120.0  # for the verifier of a process to be imported
_LAST_WORDS_S = 3.0  # beyond its time limit, for a process to say where it hangs


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """Completions of a group that have ended."""

    group: int  # its id in the worker
    prompt: Prompt | None  # with the first ones
    completions: Sequence[Arrival]
    apart: bool = False  # each verdict is found in a process of its own


def _is_apart(message: Any) -> bool:
    """Whether each of its verdicts has a worker of its own, which sees to its time."""
    return getattr(message, "apart", False)


def time_limit(message: Any, limit_s: float) -> float:
    """Seconds that a worker has for a message, where one verdict has `limit_s`."""
    each_s = limit_s + _START_S + _OPEN_S if _is_apart(message) else limit_s
    return each_s * max(1, len(getattr(message, "completions", ())))


class WorkerProcess:
    """A worker and its parent's end of the pipe to it. It dies with the thread that makes it."""

    def __init__(self, function: Callable[[Any], Any], place: int, timeline: Path | None) -> None:
        """`function`: what it does with a message. `place`: its number in the run. `timeline`: the file of what it did
        when."""
        self.place = place
        self.forgotten: list[int] = []  # groups suspended in it that are given up
        self._pipe, theirs = Pipe()
        self._socket = socket.socket(fileno=os.dup(self._pipe.fileno()))  # the same, for its time limits
        self._started = False
        self._cpu_s = 0.0  # that the process has used, as it says
        self._file = timeline
        self._timeline: TimelineWriter | None = None
        with theirs:  # closed here, so that the process' death reads as end-of-file
            command = [sys.executable, "-c", f"from {__name__} import serve; serve({theirs.fileno()}, {place})"]
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        with suppress(OSError):  # it has ended, as `start` will find
            self._pipe.send(function)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def start(self) -> None:
        """Blocks until it is ready. Raises RewardWorkerError."""
        try:
            if not self._started:
                self._receive(time.monotonic() + _START_S)
                self._started = True
                self._timeline = None if self._file is None else TimelineWriter(self._file, cpu=lambda: self._cpu_s)
        except BlockingIOError:
            raise RewardWorkerError("the reward worker did not start") from None
        except (EOFError, OSError) as error:
            raise RewardWorkerError("the reward worker died as it started") from error

    def ask(self, message: Any, limit_s: float) -> Any:
        """Blocks until the result is there, a returned ArealError included. One verdict has `limit_s` seconds. Raises
        RewardTimeoutError or RewardWorkerError when it does not come: then the worker is of no more use. Raises OSError
        for a timeline that can't be written."""
        self.start()
        start, whole_s = time.monotonic(), time_limit(message, limit_s)
        try:
            forgotten, self.forgotten = self.forgotten, []
            deadline = start + whole_s + _LAST_WORDS_S
            self._limit(deadline)
            self._pipe.send((forgotten, limit_s, message))
            result = self._receive(deadline)
        except BlockingIOError:
            said = f"the reward worker did not respond in {whole_s:g} s (rollout.reward_timeout_s)"
            raise RewardTimeoutError(said) from None
        except (EOFError, OSError) as error:
            raise RewardWorkerError("the reward worker died while it scored this group") from error
        if isinstance(result, RewardTimeoutError):
            raise result
        if self._timeline is not None:
            self._timeline.span("score", start, time.monotonic())
        return result

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
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


def serve(fd: int, place: int) -> None:
    """The worker process: one message after the other until the pool is gone. Every result carries the CPU seconds that
    the process has used so far; the first one says that it is ready."""
    from areal_core.launch import logs
    from areal_core.launch.process import die_with_parent

    logs.start("reward", place)
    die_with_parent()
    faulthandler.enable()
    pipe = Connection(fd)
    function: Callable[[Any], Any] = pipe.recv()
    pipe.send((None, time.process_time()))
    while True:
        if _suspended:
            _loop().run_until_complete(_readable(pipe))  # what they do beside waiting for the policy goes on
        try:
            forgotten, limit_s, message = pipe.recv()
        except EOFError:
            return
        for group in forgotten:
            if group in _suspended:
                _suspended.pop(group).close()
        tell: Callable[[Any], None] = lambda found: pipe.send((found, time.process_time()))  # noqa: E731
        with limited(tell, None if _is_apart(message) else limit_s):
            result = attempt(function, message)
        tell(result)


def attempt(function: Callable[[Any], Any], message: Any) -> Any:
    """The result of a call, or the ArealError that it raises. Any other exception is a bug of the user's."""
    pid = os.getpid()
    try:
        return function(message)
    except ArealError as error:
        known = type(error).__module__ == ArealError.__module__
        return error if known else RewardError(str(error))  # a class of the user's may not be known elsewhere
    except BaseException as error:  # noqa: BLE001 - the boundary: it costs one group, not the worker
        return VerifierError(verdicts.explained("the environment", error))
    finally:
        if os.getpid() != pid:  # a fork of the user's, which has no business here
            os._exit(1)


@contextmanager
def limited(tell: Callable[[RewardTimeoutError], None], limit_s: float | None) -> Iterator[None]:
    """Within, a process whose verdict takes more than `limit_s` tells where it hangs, and ends. Native code may keep it
    from that. None: there is no limit."""

    def end(_: int, frame: FrameType | None) -> None:
        tell(RewardTimeoutError(verdicts.hung(frame, limit_s or 0.0, _waiting())))
        os._exit(1)

    signal.signal(signal.SIGALRM, end)
    verdicts.limit(limit_s)
    try:
        yield
    finally:
        verdicts.limit(None)


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


def advance(config: RunConfig, model_path: str, message: Arrived) -> Requests | ScoredGroup:
    """In a worker: begin or resume the rollouts of a group, until they wait for completions or are done. The tokenizer
    is in the folder `model_path`."""
    global _running
    if message.prompt is None:
        rollout = _suspended.pop(message.group)
    else:
        its = config.of(message.prompt.task)
        rollout = GroupRollout(_environment(its, model_path, message.apart), message.prompt, its)
    _running = rollout
    try:
        outcome = _loop().run_until_complete(rollout.advance(message.completions))
    except RewardError as error:
        raise error if rollout.failure is None else VerifierError(rollout.failure) from error
    if isinstance(outcome, ScoredGroup):
        return replace(outcome, failure=rollout.failure)
    _suspended[message.group] = rollout
    return outcome


_running: GroupRollout | None = None  # in a worker: the group that its message is for


def outcome_apart(config: RunConfig, prompt: Prompt, text: str) -> Verdict:
    """The verdict on a text, from a worker of its own. Raises RewardTimeoutError with its stack for a verifier that
    hangs, VerifierError for one that ends its process, ConfigError for one that can't be imported, what the verifier
    raises, and RewardError where no worker starts, which says nothing about the verifier."""
    worker = WorkerProcess(functools.partial(_verdict, config), 0, None)
    name, started = config.environment.judged_by, False
    try:
        worker.start()
        started = True
        found = worker.ask(None, _OPEN_S)  # the import of its verifier is no time for the verdict
        if found is None:
            found = worker.ask((prompt, text), config.rollout.reward_timeout_s)
    except RewardTimeoutError as error:
        said = str(error)  # in native code it could not say more
        raise RewardTimeoutError(said if "\n" in said else verdicts.told(name, said, prompt, text)) from None
    except RewardWorkerError as error:
        if not started:
            raise RewardError(f"no process for a verdict: {error}") from error
        worker.kill()
        how = f"it ended its process, with status {worker.process.returncode}"
        raise VerifierError(verdicts.told(name, how, prompt, text)) from None
    finally:
        worker.kill()
    if isinstance(found, ArealError):
        raise found
    return found


def judged_apart(config: RunConfig, prompt: Prompt, text: str) -> Verdict:
    """The verdict on a text that may have cost a worker its process: one that does so here is wrong."""
    try:
        return outcome_apart(config, prompt, text)
    except (RewardTimeoutError, VerifierError) as error:
        return Verdict(Outcome.TIMED_OUT, 0.0, failure=str(error))


def _verdict(config: RunConfig, judged: tuple[Prompt, str] | None) -> Verdict | None:
    """In a worker: in an event loop, as environments call a verifier. None: only import the verifier."""
    judge = _judge(config)
    if judged is None:
        return None

    async def verdict() -> Verdict:
        return judge(*judged, truncated=False)

    return _loop().run_until_complete(verdict())


_judge = functools.cache(open_judge)


def _failed(failure: str) -> None:
    if _running is not None and _running.failure is None:
        _running.failure = failure


@functools.cache
def _environment(config: RunConfig, model_path: str, apart: bool) -> Environment:
    verify = Apart(judged_apart, config) if apart else None
    return open_environment(config, Tokenizer.from_folder(model_path), _failed, verify)
