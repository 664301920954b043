"""The reward worker: a process that runs the rollouts of groups, verifies them and packs the results.

    controller --messages of groups: finished completions, or a group's end--> worker
    controller <--outcomes of groups, at any time: their next requests, scored groups, errors-- worker

One event loop runs all groups of a worker and waits for none of them. A verifier may hang or kill the process. Then
the group whose code was running gets a RewardError, which says nothing about its completions. The other groups begin
again in another worker. Each completion of the failed group is then judged in its own process (`GroupMessage.apart`,
`judge_isolated`), so that only the completion at fault is lost.
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
from areal_core.environments.verdicts import IsolatedVerifier, Verdict
from areal_core.errors import ArealError, RewardError, RewardTimeoutError, RewardWorkerError, VerifierError
from areal_core.models.tokenizer import Tokenizer
from areal_core.rewards import group as group_module
from areal_core.rewards.group import GroupRollout, known_error, note_failure, step_ended, tear_down, unlimited
from areal_core.tracking.timeline import TimelineWriter
from areal_core.types import Outcome, Prompt

_START_S = 120.0  # limit for a process to import numpy and tokenizers, on a busy machine
_OPEN_S = 120.0  # limit for a process to import user code
_HANG_REPORT_S = 3.0  # beyond its time limit, for a process to report where it hangs
_END_S = 10.0  # limit for tearing down environments
_CHECK_S = 0.5  # between two checks of a silent process
_GROUP, _SINCE, _RECEIVED = range(3)  # indices of numbers that a worker shares with its parent; see WorkerProcess

Event = tuple[int, Any]  # a group's number, and a message to or from the group


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMessage:
    """A message to a group: finished completions, possibly none."""

    prompt: Prompt | None  # only in the first message
    completions: Sequence[Arrival]
    apart: bool = False  # judge each completion in its own process
    n: int = 1  # rollouts of the group
    shown: bool = False  # return the rollouts as samples, not only their payload
    cut: bool = False  # no completions: end the unfinished rollouts


class WorkerProcess:
    """A worker process and the parent's end of its pipe.

    The process dies with the thread that started it. One thread may send while another receives.
    """

    def __init__(self, function: Callable[[Any], Any], place: int, timeline: Path | None, limit_s: float) -> None:
        """`function` handles the first message of a group.
        It returns a GroupRollout, which gets later messages, or the group's result, which may be awaitable. `place` is
        the worker's number in the run. `timeline` is the file for its timeline. `limit_s` limits each verdict and each
        step of code, in seconds. A method `open` of `function`, if there is one, imports user code. It is called
        before any message, outside `limit_s`."""
        self.place = place
        self.limit_s = limit_s
        self._pipe, theirs = Pipe()
        self._sent, self._sent_at = 0, 0.0  # messages sent, and the time of the oldest that it may not have received
        limit = struct.pack("ll", int(_START_S), 0)  # of a message that stops halfway
        with socket.socket(fileno=os.dup(self._pipe.fileno())) as same:
            same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        shared = os.memfd_create("reward-worker")
        os.ftruncate(shared, 3 * 8)
        self._shared_numbers = _shared_numbers(shared)
        fds = (theirs.fileno(), shared)
        with theirs:  # closed here, so that the death of the process reads as end-of-file
            command = [sys.executable, "-c", f"from {__name__} import serve; serve{(*fds, place)}"]
            self.process = subprocess.Popen(command, pass_fds=fds, stdin=subprocess.DEVNULL)
        os.close(shared)
        with suppress(OSError):  # the process has died; `start` reports it
            self._pipe.send((function, timeline, _OPEN_S))

    @property
    def running(self) -> int:
        """The group whose code the worker runs, or was running when it died; 0: none."""
        return int(self._shared_numbers[_GROUP])

    def start(self) -> None:
        """Block until the process has started. Raises RewardWorkerError."""
        self._await(_START_S, "start")

    def open(self) -> None:
        """Block until the process has imported user code. Raises RewardTimeoutError or RewardWorkerError.
        An error of the code itself is left to the first group, which meets it again."""
        self._await(_OPEN_S + _HANG_REPORT_S, "import the user code")

    def _await(self, limit_s: float, what: str) -> None:
        try:
            if not self._pipe.poll(limit_s):
                raise RewardWorkerError(f"the reward worker did not {what} within {limit_s:g} s")
            _, error = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise RewardWorkerError(f"the reward worker died before it could {what}") from error
        if error is not None:
            raise error

    def send(self, *events: Event) -> None:
        """Send messages, blocking; None abandons its group. `receive` reports a dead worker."""
        if self._shared_numbers[_RECEIVED] == self._sent:
            self._sent_at = time.monotonic()
        self._sent += 1
        with suppress(OSError):
            self._pipe.send((self.limit_s, events))

    def receive(self) -> Event:
        """Block until a group has an outcome: requests, its result, or an ArealError.
        Raises RewardTimeoutError or RewardWorkerError for a failed worker; the group `running` is then at fault."""
        try:
            while not self._pipe.poll(_CHECK_S):
                if self._hangs():
                    break
            else:
                return self._pipe.recv()
        except Exception as error:
            raise RewardWorkerError("the reward worker died while it scored this group") from error
        said = f"the reward worker did not respond within {self.limit_s:g} s (rollout.reward_timeout_s)"
        raise RewardTimeoutError(said)

    def ask(self, message: Any) -> Any:
        """Send one message and return its result. Raises its error, and the errors of `receive`."""
        self.send((1, message))
        _, result = self.receive()
        if isinstance(result, ArealError):
            raise result
        return result

    def wait(self) -> None:
        """Block until the process has ended after a message to group 0, at most _END_S seconds."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_S)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def _hangs(self) -> bool:
        """Whether the process runs one group's code for too long, is stopped, or receives no messages."""
        group, since, taken = self._shared_numbers
        late = time.monotonic() - self.limit_s - _HANG_REPORT_S
        return bool(group and since < late) or (taken < self._sent and max(since, self._sent_at) < late)


def _shared_numbers(fd: int) -> Any:
    """The numbers that a worker shares with its parent in memory."""
    return memoryview(mmap.mmap(fd, 3 * 8)).cast("d")


# -- in the process ----------------------------------------------------------------------------------------------------


def serve(fd: int, shared: int, place: int) -> None:
    """Run the worker process until its parent closes the pipe. Its first message reports that it is ready."""
    from areal_core.launch import logs
    from areal_core.launch.process import die_with_parent

    logs.start("reward", place)
    die_with_parent()
    faulthandler.enable()
    loop = _Loop(Connection(fd), _shared_numbers(shared))
    loop.run_forever()
    loop.run_until_complete(tear_down())


_group: ContextVar[int] = ContextVar("group", default=0)  # whose code runs in this context; 0: the worker itself


class _Selector(selectors.DefaultSelector):
    """Selector that records the time between two waits in the timeline."""

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
    """Event loop of a worker. It knows which group's code each step runs, and limits the step's duration."""

    def __init__(self, pipe: Connection, shared: Any) -> None:
        selector = _Selector()
        super().__init__(selector)
        self._pipe, self._shared_numbers = pipe, shared
        self._pid = os.getpid()
        self._limit_s = 0.0
        self._open: dict[int, tuple[contextvars.Context, GroupRollout | asyncio.Task[Any]]] = {}
        self._function, timeline, open_s = pipe.recv()
        if timeline is not None:
            selector.timeline = TimelineWriter(timeline, cpu=time.process_time)
        signal.signal(signal.SIGALRM, self._end)
        verdicts.on_verdict = self._start_limit
        group_module.on_uncancelled = self._report_and_exit
        self.add_reader(pipe.fileno(), self._receive)
        self._send(0, None)
        self._late = f"its import takes longer than {open_s:g} s"
        signal.setitimer(signal.ITIMER_REAL, open_s)
        attempt(getattr(self._function, "open", list))
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        self._late = ""
        self._shared_numbers[_SINCE] = time.monotonic()
        self._send(0, None)

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        return super().call_soon(self._step, callback, *args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        return super().call_at(when, self._step, callback, *args, context=context)

    def _step(self, callback: Callable[..., Any], *args: Any) -> Any:
        """Run a callback for the group of its context, or for the worker itself."""
        if not (group := _group.get()):
            return callback(*args)
        self._start_limit()
        self._shared_numbers[_GROUP] = group
        try:
            return callback(*args)
        except (SystemExit, KeyboardInterrupt):
            return None  # the group's task holds the error
        finally:
            if os.getpid() != self._pid:  # a forked child of user code
                os._exit(1)
            self._shared_numbers[_GROUP] = 0
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            step_ended()

    def _start_limit(self) -> None:
        """Start the time limit of a step or a verdict: SIGALRM comes after `limit_s` seconds."""
        if _group.get():
            self._shared_numbers[_SINCE] = time.monotonic()
            signal.setitimer(signal.ITIMER_REAL, self._limit_s)

    def _end(self, _: int, frame: FrameType | None) -> None:
        """On SIGALRM, report where the process hangs, and end it. Native code may delay the signal."""
        if (group := _group.get()) or self._late:
            why = verdicts.hang_text(traceback.extract_stack(frame), self._late or verdicts.timeout_text(self._limit_s))
            self._send(group, RewardTimeoutError(why))
            os._exit(1)

    def _report_and_exit(self, error: RewardTimeoutError) -> None:
        if group := _group.get():
            self._send(group, error)
        os._exit(1)

    def _receive(self) -> None:
        try:
            self._limit_s, events = self._pipe.recv()
        except (EOFError, OSError):
            self.stop()
            return
        verdicts.limit_s = self._limit_s
        self._shared_numbers[_SINCE] = time.monotonic()
        self._shared_numbers[_RECEIVED] += 1
        for group, message in events:
            self._take(group, message)

    def _take(self, group: int, message: Any) -> None:
        if not group:
            self.stop()
            return
        context, running = self._open.get(group, (None, None))
        if message is None:
            if running is not None:
                self._close(group)
        elif context is not None and isinstance(running, GroupRollout):
            work = (running.cut,) if message.cut else (running.deliver, message.completions)
            error = context.run(self._step, attempt, *work)
            if error is not None:
                self._close(group)
                self._send(group, error)
        elif not isinstance(message, GroupMessage) or message.prompt is not None:  # else the group has failed meanwhile
            context = contextvars.copy_context()
            context.run(_group.set, group)
            running = context.run(self._step, attempt, self._function, message)
            if inspect.isawaitable(running):
                running = context.run(asyncio.ensure_future, running)
            if isinstance(running, GroupRollout | asyncio.Task):
                self._open[group] = context, running
                self.create_task(self._follow(group, running))
            else:
                self._send(group, running)

    async def _follow(self, group: int, running: GroupRollout | asyncio.Task[Any]) -> None:
        """Send the outcomes of a group until it has ended or is abandoned."""
        while group in self._open:
            try:
                outcome = await (running.next_outcome() if isinstance(running, GroupRollout) else running)
            except BaseException as error:  # noqa: BLE001 - the boundary to user code: costs one group, not the worker
                outcome = known_error(error)
            if group not in self._open:
                return
            if isinstance(running, asyncio.Task) or isinstance(outcome, ScoredGroup | ArealError):
                self._close(group)
            self._send(group, outcome)

    def _close(self, group: int) -> None:
        _, running = self._open.pop(group)
        running.cancel() if isinstance(running, asyncio.Task) else running.close()

    def _send(self, group: int, outcome: Any) -> None:
        try:
            self._pipe.send((group, outcome))
        except (TypeError, AttributeError, PicklingError) as error:
            self._pipe.send((group, RewardError(f"environment: can't serialize its result: {error}")))


def attempt(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function. Returns its result, or an ArealError if it raises."""
    try:
        return function(*arguments)
    except BaseException as error:  # noqa: BLE001 - the boundary to user code: costs one group, not the worker
        return known_error(error)


@dataclass(frozen=True, slots=True)
class Groups:
    """Begins the groups of a run, in a worker. The folder `model_path` holds the tokenizer."""

    config: RunConfig
    model_path: str

    def open(self) -> None:
        """Open the environments of all tasks."""
        for its in self.config.by_task.values():
            _environment(its, self.model_path, apart=False)

    def __call__(self, message: GroupMessage) -> GroupRollout:
        """Begin the rollouts of a group."""
        assert message.prompt is not None
        its = self.config.of(message.prompt.task)
        environment = _environment(its, self.model_path, message.apart)
        shown_with = _tokenizer(self.model_path) if message.shown else None
        rollout = GroupRollout(environment, message.prompt, its, n=message.n, shown_with=shown_with)
        rollout.deliver(message.completions)
        return rollout


def judge_in_own_worker(config: RunConfig, part: str, prompt: Prompt, text: str) -> Verdict:
    """Judge a text in its own worker, by the verifier or by `part` of environment.rewards.

    Raises RewardTimeoutError, with its stack, if the verifier hangs. Raises VerifierError if it ends its process,
    ConfigError if it can't be imported, and the verifier's own error. Raises RewardError if no worker starts, which
    says nothing about the verifier."""
    worker = WorkerProcess(_Verdicts(config, part), 0, None, config.rollout.reward_timeout_s)
    name, started = f"environment.rewards {part}" if part else config.environment.judged_by, False
    try:
        worker.start()
        started = True
        worker.open()
        return worker.ask((prompt, text))
    except RewardTimeoutError as error:
        said = str(error)  # a hang in native code has no stack
        raise RewardTimeoutError(said if "\n" in said else verdicts.failure_text(name, said, prompt, text)) from None
    except RewardWorkerError as error:
        if not started:
            raise RewardError(f"can't start a process for the verifier: {error}") from error
        worker.kill()
        how = f"it exited its process with status {worker.process.returncode}"
        raise VerifierError(verdicts.failure_text(name, how, prompt, text)) from None
    finally:
        worker.kill()


async def judge_isolated(config: RunConfig, part: str, prompt: Prompt, text: str) -> Verdict:
    """Judge a text that may have killed a worker, in its own process.
    If it kills this process too, it is incorrect."""
    try:
        with unlimited():
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(_one_at_a_time(), judge_in_own_worker, config, part, prompt, text)
    except (RewardTimeoutError, VerifierError) as error:
        return Verdict(Outcome.TIMED_OUT, 0.0, failure=str(error))


_one_at_a_time = functools.cache(functools.partial(ThreadPoolExecutor, 1))


@dataclass(frozen=True, slots=True)
class _Verdicts:
    """Judges texts, in a worker."""

    config: RunConfig
    part: str

    def open(self) -> None:
        _judge(self.config, self.part)

    def __call__(self, judged: tuple[Prompt, str]) -> Awaitable[Verdict]:
        return _judge(self.config, self.part)(*judged, truncated=False)


_judge = functools.cache(open_judge)


@functools.cache
def _environment(config: RunConfig, model_path: str, apart: bool) -> Environment:
    replacement = functools.partial(IsolatedVerifier, judge_isolated, config) if apart else None
    return open_environment(config, _tokenizer(model_path), note_failure, replacement)


_tokenizer = functools.cache(Tokenizer.from_folder)
