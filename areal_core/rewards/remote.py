"""A reward worker of another machine, as the controller sees it, and the messages between the two, in MessagePack.

    work      its number, a group with completions that have ended, as servers gave them
    outcome   the next requests of the group, or the scored group

Prompts go with the first completions of a group. All else that its rollouts need is in the run's configuration.
The worker asks for work and brings its answers:

    ask: message 1 --> waits here --> response to its request --> worked on --> the next request: answer 1, and so on

A request may come twice, since what it brings or takes may have got lost: messages are counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace

import msgspec
import numpy as np

from areal_core import errors
from areal_core.api.patience import patience
from areal_core.api.scored_groups import ScoredGroup
from areal_core.api.wire import SampledCompletion
from areal_core.errors import ArealError, GenerationError, RewardError, RewardWorkerError, SessionLostError
from areal_core.rewards.group import Requests
from areal_core.rewards.worker import Arrived, time_limit
from areal_core.types import SampleRequest

Outcome = Requests | ScoredGroup | ArealError

ANSWER_BYTES = 2**26  # at most
_ERRORS = {  # that say something of the group
    kind.__name__: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, RewardError | GenerationError)
}


class Work(msgspec.Struct, kw_only=True):
    """A message for a worker."""

    number: int
    forgotten: list[int]  # groups suspended in it that are given up
    arrived: Arrived
    bodies: dict[bytes, bytes]  # on the way, by the names that completions have in their place: several may share one


class _Outcome(msgspec.Struct):
    requests: list[SampleRequest] | None = None
    scored: ScoredGroup | None = None
    error: str | None = None  # its kind
    says: str = ""
    lost: bool = False  # with it the worker has lost its process, and all groups that were suspended there


BEGIN_ANEW = msgspec.msgpack.encode(None)  # to a worker whose incarnation is over


def encode_work(number: int, forgotten: list[int], arrived: Arrived) -> bytes:
    """A message for a worker."""
    names: dict[bytes, bytes] = {}
    for one in arrived.completions:
        for body, _ in one.completion.segments:
            names.setdefault(body, str(len(names)).encode())
    bodies = {name: body for body, name in names.items()}
    work = Work(number=number, forgotten=forgotten, arrived=_with_bodies(arrived, names), bodies=bodies)
    return msgspec.msgpack.encode(work)


def decode_work(data: bytes) -> Work | None:
    """None for BEGIN_ANEW. Completions of one body share it."""
    work = msgspec.msgpack.decode(data, type=Work | None)
    return work and msgspec.structs.replace(work, arrived=_with_bodies(work.arrived, work.bodies))


def _with_bodies(arrived: Arrived, bodies: Mapping[bytes, bytes]) -> Arrived:
    """The same completions, with others in the place of their bodies."""

    def exchanged(one: SampledCompletion) -> SampledCompletion:
        return replace(one, segments=tuple((bodies[body], choice) for body, choice in one.segments))

    completions = [replace(one, completion=exchanged(one.completion)) for one in arrived.completions]
    return replace(arrived, completions=completions)


def encode_outcome(outcome: Outcome, *, lost: bool = False) -> bytes:
    """A worker's answer; `lost` with an error that has cost the worker its process. What can't be sent is one."""
    if isinstance(outcome, ScoredGroup):
        message = _Outcome(scored=outcome)
    elif isinstance(outcome, ArealError):
        message = _Outcome(error=type(outcome).__name__, says=str(outcome), lost=lost)
    else:
        message = _Outcome(requests=list(outcome))
    try:
        answer = msgspec.msgpack.encode(message, enc_hook=_plain)
    except (TypeError, ValueError) as error:
        return encode_outcome(RewardError(f"environment: what it gives can't be sent: {error}"))
    if len(answer) > ANSWER_BYTES:
        return encode_outcome(
            RewardError(f"the group has {len(answer)} bytes, more than the {ANSWER_BYTES} of an answer")
        )
    return answer


def decode_outcome(data: bytes) -> Outcome:
    """Raises the error that has cost the worker its process. What is no outcome is a RewardError."""
    try:
        message = msgspec.msgpack.decode(data, type=_Outcome)
    except ValueError as error:  # msgspec.DecodeError among them
        return RewardError(f"a reward worker's answer is none: {error}")
    if message.error is not None:
        error = _ERRORS.get(message.error, RewardError)(message.says)
        if message.lost:
            raise error
        return error
    return message.scored or tuple(message.requests or ())


def _plain(value: object) -> object:
    """A number of numpy's, as an environment may give it."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} is neither a number nor text")


SILENT_S = 10.0  # without a request, after which a worker that has nothing to do is gone


class RemoteWorker:
    """One incarnation of the worker with this place, between two losses of what is suspended in it."""

    def __init__(self, place: int, incarnation: str) -> None:
        self.place = place
        self.incarnation = incarnation
        self.alive = True
        self.forgotten: list[int] = []  # groups suspended in it that are given up
        self._number = 0  # messages so far
        self._message: bytes | None = None  # the last one, until its answer is here or given up
        self._taken = False  # the worker has it
        self._answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._requests: list[Callable[[], bool]] = []  # that wait here: whether nobody waits for the response any more
        self._changed = asyncio.Event()
        self._spoke = asyncio.Event()

    @property
    def asks(self) -> bool:
        """Whether it waits for work."""
        return any(not is_gone() for is_gone in self._requests)

    async def ask(self, message: Arrived, timeout_s: float) -> Outcome:
        """As WorkerProcess.ask. The limit is kept where the worker is: raises RewardWorkerError for an answer that has
        not come soon after it, and SessionLostError for a message that the worker has not taken."""
        forgotten, self.forgotten = self.forgotten, []
        self._number += 1
        self._answer = asyncio.get_running_loop().create_future()
        self._message = encode_work(self._number, forgotten, message)
        self._taken = False
        self._changed.set()
        try:
            async with patience(time_limit(message, timeout_s) + SILENT_S):
                return decode_outcome(await self._answer)
        except TimeoutError:
            raise self._lost() from None
        finally:
            self._message = None

    async def exchange(
        self, answered: int, answer: bytes, timeout_s: float, is_gone: Callable[[], bool]
    ) -> bytes | None:
        """See RewardPool.exchange."""
        if self._message is not None and answered == self._number and not self._answer.done():
            self._answer.set_result(answer)
        self._requests.append(is_gone)
        self._spoke.set()
        try:
            async with asyncio.timeout(timeout_s):
                while self.alive:
                    if self._message is not None and self._number > answered:
                        self._taken = self._taken or not is_gone()
                        return self._message
                    self._changed.clear()
                    await self._changed.wait()
            return BEGIN_ANEW
        except TimeoutError:
            return None
        finally:
            self._requests.remove(is_gone)

    async def silence(self) -> None:
        """Wait until it has nothing to do and does not ask for anything."""
        while True:
            self._spoke.clear()
            try:
                async with patience(SILENT_S):
                    await self._spoke.wait()
            except TimeoutError:
                at_work = self._message is not None and self._taken
                if not at_work and not self.asks:
                    return

    def kill(self, *, left: bool = False) -> None:
        """It is told to begin anew, if it asks once more. One that has `left` has done so by itself: no group's
        fault."""
        self.alive = False
        self._changed.set()
        if self._message is not None and not self._answer.done():
            self._answer.set_exception(self._lost(left=left))

    def _lost(self, *, left: bool = False) -> RewardError:
        what = "the reward worker that had this group is gone with its machine"
        return RewardWorkerError(what) if self._taken and not left else SessionLostError(what)
