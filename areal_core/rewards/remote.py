"""A reward worker of another machine, as the controller sees it, and the messages between the two, in MessagePack.

    controller --work: a group with completions that have ended, as servers gave them--> worker
    controller <--outcome: the next requests of the group, or the scored group-- worker

Prompts go with the first completions of a group. All else that its rollouts need is in the run's configuration. Every
worker has a WebSocket of its own: it comes with its connection and is gone with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace

import msgspec
from aiohttp import WSMsgType, web

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

    forgotten: list[int]  # groups suspended in it that are given up
    arrived: Arrived
    bodies: dict[bytes, bytes]  # on the way, by the names that completions have in their place: several may share one


class _Outcome(msgspec.Struct):
    requests: list[SampleRequest] | None = None
    scored: ScoredGroup | None = None
    error: str | None = None  # its kind
    says: str = ""


def encode_work(forgotten: list[int], arrived: Arrived) -> bytes:
    """A message for a worker."""
    names: dict[bytes, bytes] = {}
    for one in arrived.completions:
        for body, _ in one.completion.segments:
            names.setdefault(body, str(len(names)).encode())
    bodies = {name: body for body, name in names.items()}
    return msgspec.msgpack.encode(Work(forgotten=forgotten, arrived=_with_bodies(arrived, names), bodies=bodies))


def decode_work(data: bytes) -> Work:
    """Completions of one body share it."""
    work = msgspec.msgpack.decode(data, type=Work)
    return msgspec.structs.replace(work, arrived=_with_bodies(work.arrived, work.bodies))


def _with_bodies(arrived: Arrived, bodies: Mapping[bytes, bytes]) -> Arrived:
    """The same completions, with others in the place of their bodies."""

    def exchanged(one: SampledCompletion) -> SampledCompletion:
        return replace(one, segments=tuple((bodies[body], choice) for body, choice in one.segments))

    completions = [replace(one, completion=exchanged(one.completion)) for one in arrived.completions]
    return replace(arrived, completions=completions)


def encode_outcome(outcome: Outcome) -> bytes:
    """A worker's answer. What can't be sent is an error."""
    if isinstance(outcome, ScoredGroup):
        message = _Outcome(scored=outcome)
    elif isinstance(outcome, ArealError):
        message = _Outcome(error=type(outcome).__name__, says=str(outcome))
    else:
        message = _Outcome(requests=list(outcome))
    try:
        answer = msgspec.msgpack.encode(message)
    except (TypeError, ValueError, OverflowError) as error:
        return encode_outcome(RewardError(f"environment: what it gives can't be sent: {error}"))
    if len(answer) > ANSWER_BYTES:
        return encode_outcome(
            RewardError(f"the group has {len(answer)} bytes, more than the {ANSWER_BYTES} of an answer")
        )
    return answer


def decode_outcome(data: bytes) -> Outcome:
    """What is no outcome is a RewardError."""
    try:
        message = msgspec.msgpack.decode(data, type=_Outcome)
    except ValueError as error:  # msgspec.DecodeError among them
        return RewardError(f"a reward worker's answer is none: {error}")
    if message.error is not None:
        return _ERRORS.get(message.error, RewardError)(message.says)
    return message.scored or tuple(message.requests or ())


SILENT_S = 10.0  # after which a connection that nothing comes through is lost, and an answer that is overdue


class RemoteWorker:
    """The worker at the other end of a connection."""

    def __init__(self, place: int, socket: web.WebSocketResponse) -> None:
        self.place = place
        self.forgotten: list[int] = []  # groups suspended in it that are given up
        self._socket = socket
        self._answer: asyncio.Future[bytes] | None = None  # to the message that it works on
        self._closing: asyncio.Task[bool] | None = None

    @property
    def alive(self) -> bool:
        return not self._socket.closed

    async def ask(self, message: Arrived, timeout_s: float) -> Outcome:
        """As WorkerProcess.ask. The limit is kept where the worker is: raises RewardWorkerError for an answer that has
        not come soon after it, and SessionLostError where the connection is lost, which is no group's fault."""
        forgotten, self.forgotten = self.forgotten, []
        answer = self._answer = asyncio.get_running_loop().create_future()
        try:
            async with patience(time_limit(message, timeout_s) + SILENT_S):
                await self._socket.send_bytes(encode_work(forgotten, message))
                return decode_outcome(await answer)
        except TimeoutError:
            raise RewardWorkerError("the machine of the reward worker that has this group does not answer") from None
        except ConnectionError:
            raise _lost() from None
        finally:
            self._answer = None

    async def follow(self) -> None:
        """Take its answers in until its connection ends."""
        async for message in self._socket:
            if message.type is WSMsgType.BINARY and self._answer is not None and not self._answer.done():
                self._answer.set_result(message.data)

    def kill(self) -> None:
        """Close its connection, at which it begins anew by itself."""
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(_lost())
        if self._socket.prepared:
            self._closing = asyncio.ensure_future(self._socket.close())


def _lost() -> SessionLostError:
    return SessionLostError("the reward worker that had this group is gone with its machine")
