"""What a reward worker is: a process that runs the rollouts of groups, their verification and packing.

    controller --messages of groups: completions that have ended, or that a group is given up--> worker
    controller <--what groups say, at any time: their next requests, scored groups, errors-- worker

An event loop runs all groups of a worker, and waits for none of them. A verifier may hang or end the process. Then the
group whose code ran gets a RewardError, which says nothing about its completions, and the others begin again in another
worker. Next each completion of that group is judged in a worker of its own (`Arrived.apart`, `judged_apart`), so that
only the one at fault is lost.
"""

from __future__ import annotations

import asyncio
import contextvars
import faulthandler
import functools
import inspect
import mmap
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from pickle import PicklingError
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
from areal_core.rewards import group as group_module
from areal_core.rewards.group import GroupRollout, known_error, note_failure, step_ended, tear_down, unlimited
from areal_core.tracking.timeline import TimelineWriter
from areal_core.types import Outcome, Prompt

_START_S = 120.0  # for a process to import numpy and tokenizers, on a machine that may be busy
_OPEN_S = 120.0  # for the verifier of a process to be imported
_LAST_WORDS_S = 3.0  # beyond its time limit, for a process to say where it hangs
_END_S = 10.0  # for environments to be torn down
_CHECK_S = 0.5  # between two looks at a process that says nothing
_GROUP, _SINCE, _TAKEN = range(3)  # numbers that a worker notes where its parent sees them; see WorkerProcess

Event = tuple[int, Any]  # a group's number, and a message for it or what it says


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """A message for a group: completions that have ended, of which there may be none."""

    prompt: Prompt | None  # with the first one
    completions: Sequence[Arrival]
    apart: bool = False  # each verdict is found in a process of its own
    n: int = 1  # rollouts of the group
    shown: bool = False  # its rollouts are asked for, not only their payload
    cut: bool = False  # instead of completions: the rollouts that have not ended are to end


class WorkerProcess:
    """A worker and its parent's end of the pipe to it. It dies with the thread that makes it. One thread may send while
    another receives."""

    def __init__(self, function: Callable[[Any], Any], place: int, timeline: Path | None, limit_s: float) -> None:
        """`function`: what it does with the first message of a group. It returns a GroupRollout, which gets the further
        ones, or the group's result, which may be awaitable. `place`: its number in the run. `timeline`: the file of
        what it did when. `limit_s`: of a verdict, and of whatever blocks it."""
        self.place = place
        self.limit_s = limit_s
        self._pipe, theirs = Pipe()
        self._sent, self._sent_at = 0, 0.0  # messages, and when the oldest was that it has perhaps not taken
        limit = struct.pack("ll", int(_START_S), 0)  # of a message that stops halfway
        with socket.socket(fileno=os.dup(self._pipe.fileno())) as same:
            same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        shared = os.memfd_create("reward-worker")
        os.ftruncate(shared, 3 * 8)
        self._noted = _noted(shared)
        fds = (theirs.fileno(), shared)
        with theirs:  # closed here, so that the process' death reads as end-of-file
            command = [sys.executable, "-c", f"from {__name__} import serve; serve{(*fds, place)}"]
            self.process = subprocess.Popen(command, pass_fds=fds, stdin=subprocess.DEVNULL)
        os.close(shared)
        with suppress(OSError):  # it has ended, as `start` will find
            self._pipe.send((function, timeline))

    @property
    def running(self) -> int:
        """The group whose code it runs, or ran last where it is dead; 0: none."""
        return int(self._noted[_GROUP])

    def start(self) -> None:
        """Blocks until it is ready. Raises RewardWorkerError."""
        try:
            if not self._pipe.poll(_START_S):
                raise RewardWorkerError("the reward worker did not start")
            self._pipe.recv()
        except (EOFError, OSError) as error:
            raise RewardWorkerError("the reward worker died as it started") from error

    def send(self, *events: Event) -> None:
        """Blocks until they are on the way. A message None gives its group up. A dead worker is for `receive`."""
        if self._noted[_TAKEN] == self._sent:
            self._sent_at = time.monotonic()
        self._sent += 1
        with suppress(OSError):
            self._pipe.send((self.limit_s, events))

    def receive(self) -> Event:
        """Blocks until a group says something: requests, its result, or an ArealError. Raises RewardTimeoutError or
        RewardWorkerError for a worker that is of no more use; `running` is at fault then."""
        try:
            while not self._pipe.poll(_CHECK_S):
                if self._hangs():
                    break
            else:
                return self._pipe.recv()
        except Exception as error:
            raise RewardWorkerError("the reward worker died while it scored this group") from error
        said = f"the reward worker did not respond in {self.limit_s:g} s (rollout.reward_timeout_s)"
        raise RewardTimeoutError(said)

    def ask(self, message: Any) -> Any:
        """The result of a group of one message. Raises as `receive`, and what the group has failed with."""
        self.send((1, message))
        _, result = self.receive()
        if isinstance(result, ArealError):
            raise result
        return result

    def wait(self) -> None:
        """Blocks until it has ended in order, after a message for group 0, or for a while."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_S)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def _hangs(self) -> bool:
        """Whether it runs code of one group for too long, in native code or stopped, or takes no message in."""
        group, since, taken = self._noted
        late = time.monotonic() - self.limit_s - _LAST_WORDS_S
        return bool(group and since < late) or (taken < self._sent and max(since, self._sent_at) < late)


def _noted(fd: int) -> Any:
    """The numbers that a worker notes, in memory that it shares with its parent."""
    return memoryview(mmap.mmap(fd, 3 * 8)).cast("d")


# -- in the process ----------------------------------------------------------------------------------------------------


def serve(fd: int, shared: int, place: int) -> None:
    """The worker process, until its parent closes the pipe. The first thing that it sends says that it is ready."""
    from areal_core.launch import logs
    from areal_core.launch.process import die_with_parent

    logs.start("reward", place)
    die_with_parent()
    faulthandler.enable()
    loop = _Loop(Connection(fd), _noted(shared))
    loop.run_forever()
    loop.run_until_complete(tear_down())


_group: ContextVar[int] = ContextVar("group", default=0)  # whose code runs in this context; 0: the worker's own


class _Selector(selectors.DefaultSelector):
    """Writes into the timeline when the process did something between two waits."""

    timeline: TimelineWriter | None = None
    _since = 0.0

    def select(self, timeout: float | None = None) -> Any:
        waits = timeout is None or timeout > 0
        if waits and self.timeline is not None and self._since:
            self.timeline.span("score", self._since, time.monotonic())
        ready = super().select(timeout)
        if waits:
            self._since = time.monotonic()
        return ready


class _Loop(asyncio.SelectorEventLoop):
    """Runs the groups of a worker. It knows whose code each of its steps runs, and how long a step may take."""

    def __init__(self, pipe: Connection, noted: Any) -> None:
        selector = _Selector()
        super().__init__(selector)
        self._pipe, self._noted = pipe, noted
        self._pid = os.getpid()
        self._limit_s = 0.0
        self._open: dict[int, tuple[contextvars.Context, GroupRollout | asyncio.Task[Any]]] = {}
        self._function, timeline = pipe.recv()
        if timeline is not None:
            selector.timeline = TimelineWriter(timeline, cpu=time.process_time)
        signal.signal(signal.SIGALRM, self._end)
        verdicts.on_verdict = self._start_limit
        group_module.swallowed = self._swallowed
        self.add_reader(pipe.fileno(), self._receive)
        self._noted[_SINCE] = time.monotonic()
        self._tell(0, None)

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        return super().call_soon(self._step, callback, *args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        return super().call_at(when, self._step, callback, *args, context=context)

    def _step(self, callback: Callable[..., Any], *args: Any) -> Any:
        """Run some code of the group whose context this is, or of the worker."""
        if not (group := _group.get()):
            return callback(*args)
        self._start_limit()
        self._noted[_GROUP] = group
        try:
            return callback(*args)
        except (SystemExit, KeyboardInterrupt):
            return None  # its task has it
        finally:
            if os.getpid() != self._pid:  # a fork of the user's, which has no business here
                os._exit(1)
            self._noted[_GROUP] = 0
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            step_ended()

    def _start_limit(self) -> None:
        """A step or a verdict begins: have SIGALRM come once it takes too long."""
        if _group.get():
            self._noted[_SINCE] = time.monotonic()
            signal.setitimer(signal.ITIMER_REAL, self._limit_s)

    def _end(self, _: int, frame: FrameType | None) -> None:
        """On SIGALRM, say where the process hangs, and end it. Native code may keep it from that."""
        if group := _group.get():
            self._tell(group, RewardTimeoutError(verdicts.hung(traceback.extract_stack(frame), self._limit_s)))
            os._exit(1)

    def _swallowed(self, error: RewardTimeoutError) -> None:
        if group := _group.get():
            self._tell(group, error)
        os._exit(1)

    def _receive(self) -> None:
        try:
            self._limit_s, events = self._pipe.recv()
        except (EOFError, OSError):
            self.stop()
            return
        verdicts.limit_s = self._limit_s
        self._noted[_SINCE] = time.monotonic()
        self._noted[_TAKEN] += 1
        for group, message in events:
            self._take(group, message)

    def _take(self, group: int, message: Any) -> None:
        if not group:
            self.stop()
            return
        context, its = self._open.get(group, (None, None))
        if message is None:
            if its is not None:
                self._close(group)
        elif context is not None and isinstance(its, GroupRollout):
            work = (its.cut,) if message.cut else (its.deliver, message.completions)
            error = context.run(self._step, attempt, *work)
            if error is not None:
                self._close(group)
                self._tell(group, error)
        elif not isinstance(message, Arrived) or message.prompt is not None:  # else it has failed meanwhile
            context = contextvars.copy_context()
            context.run(_group.set, group)
            its = context.run(self._step, attempt, self._function, message)
            if inspect.isawaitable(its):
                its = context.run(asyncio.ensure_future, its)
            if isinstance(its, GroupRollout | asyncio.Task):
                self._open[group] = context, its
                self.create_task(self._follow(group, its))
            else:
                self._tell(group, its)

    async def _follow(self, group: int, its: GroupRollout | asyncio.Task[Any]) -> None:
        """Tell what a group says until it has ended or is given up."""
        while group in self._open:
            try:
                said = await (its.said() if isinstance(its, GroupRollout) else its)
            except BaseException as error:  # noqa: BLE001 - the boundary: it costs one group, not the worker
                said = known_error(error)
            if group not in self._open:
                return
            if isinstance(its, asyncio.Task) or isinstance(said, ScoredGroup | ArealError):
                self._close(group)
            self._tell(group, said)

    def _close(self, group: int) -> None:
        _, its = self._open.pop(group)
        its.cancel() if isinstance(its, asyncio.Task) else its.close()

    def _tell(self, group: int, said: Any) -> None:
        try:
            self._pipe.send((group, said))
        except (TypeError, AttributeError, PicklingError) as error:
            self._pipe.send((group, RewardError(f"environment: what it gives can't be sent: {error}")))


def attempt(function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a call, or an ArealError for what it raises."""
    try:
        return function(*arguments)
    except BaseException as error:  # noqa: BLE001 - the boundary: it costs one group, not the worker
        return known_error(error)


def open_group(config: RunConfig, model_path: str, message: Arrived) -> GroupRollout:
    """In a worker: begin the rollouts of a group. The tokenizer is in the folder `model_path`."""
    assert message.prompt is not None
    its = config.of(message.prompt.task)
    environment = _environment(its, model_path, message.apart)
    shown_with = _tokenizer(model_path) if message.shown else None
    rollout = GroupRollout(environment, message.prompt, its, n=message.n, shown_with=shown_with)
    rollout.deliver(message.completions)
    return rollout


def outcome_apart(config: RunConfig, part: str, prompt: Prompt, text: str) -> Verdict:
    """The verdict on a text, from a worker of its own: the verifier's, or that of a `part` of environment.rewards.
    Raises RewardTimeoutError with its stack for a verifier that hangs, VerifierError for one that ends its process,
    ConfigError for one that can't be imported, what the verifier raises, and RewardError where no worker starts, which
    says nothing about the verifier."""
    worker = WorkerProcess(functools.partial(_verdict, config, part), 0, None, _OPEN_S)
    name, started = f"environment.rewards {part}" if part else config.environment.judged_by, False
    try:
        worker.start()
        started = True
        worker.ask(_IMPORT)  # which is no time for the verdict
        worker.limit_s = config.rollout.reward_timeout_s
        return worker.ask((prompt, text))
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


async def judged_apart(config: RunConfig, part: str, prompt: Prompt, text: str) -> Verdict:
    """The verdict on a text that may have cost a worker its process: one that does so here is wrong."""
    try:
        with unlimited():
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(_one_at_a_time(), outcome_apart, config, part, prompt, text)
    except (RewardTimeoutError, VerifierError) as error:
        return Verdict(Outcome.TIMED_OUT, 0.0, failure=str(error))


_one_at_a_time = functools.cache(functools.partial(ThreadPoolExecutor, 1))
_IMPORT = "import"


def _verdict(config: RunConfig, part: str, judged: tuple[Prompt, str] | str) -> Awaitable[Verdict] | None:
    """In a worker: the verdict on a text. _IMPORT: only import the verifier."""
    judge = _judge(config, part)
    return None if isinstance(judged, str) else judge(*judged, truncated=False)


_judge = functools.cache(open_judge)


@functools.cache
def _environment(config: RunConfig, model_path: str, apart: bool) -> Environment:
    instead = functools.partial(Apart, judged_apart, config) if apart else None
    return open_environment(config, _tokenizer(model_path), note_failure, instead)


_tokenizer = functools.cache(Tokenizer.from_folder)
