"""A reward worker of another machine, as the controller sees it, and the messages between the two, in MessagePack.

    controller --work: completions of a group that have ended, as servers gave them, or that it is given up--> worker
    controller <--at any time, what a group says: its next requests, the scored group, or an error-- worker

Prompts go with the first completions of a group. All else that its rollouts need is in the run's configuration. Every
worker has a WebSocket of its own: it comes with its connection and is gone with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgspec
from aiohttp import WSMsgType, web

from areal_core import errors
from areal_core.api.scored_groups import ScoredGroup
from areal_core.api.wire import SampledCompletion
from areal_core.errors import ArealError, GenerationError, RewardError
from areal_core.rewards.group import Requests
from areal_core.rewards.worker import Arrived, Event
from areal_core.types import SampleRequest

Outcome = Requests | ScoredGroup | ArealError

ANSWER_BYTES = 2**26  # at most
_GROUP_BYTES = 8
_ERRORS = {  # that say something of the group
    kind.__name__: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, RewardError | GenerationError)
}


class Work(msgspec.Struct, kw_only=True):
    """A message for a worker."""

    group: int
    arrived: Arrived | None  # None: the group is given up
    bodies: dict[bytes, bytes]  # on the way, by the names that completions have in their place: several may share one


class _Outcome(msgspec.Struct):
    requests: list[SampleRequest] | None = None
    scored: ScoredGroup | None = None
    error: str | None = None  # its kind
    says: str = ""


def encode_work(group: int, arrived: Arrived | None) -> bytes:
    """A message for a worker."""
    names: dict[bytes, bytes] = {}
    for one in () if arrived is None else arrived.completions:
        for body, _ in one.completion.segments:
            names.setdefault(body, str(len(names)).encode())
    bodies = {name: body for body, name in names.items()}
    return msgspec.msgpack.encode(Work(group=group, arrived=_with_bodies(arrived, names), bodies=bodies))


def decode_work(data: bytes) -> tuple[int, Arrived | None]:
    """A message for a worker. Completions of one body share it."""
    work = msgspec.msgpack.decode(data, type=Work)
    return work.group, _with_bodies(work.arrived, work.bodies)


def _with_bodies(arrived: Arrived | None, bodies: Mapping[bytes, bytes]) -> Arrived | None:
    """The same completions, with others in the place of their bodies."""
    if arrived is None:
        return None

    def exchanged(one: SampledCompletion) -> SampledCompletion:
        return replace(one, segments=tuple((bodies[body], choice) for body, choice in one.segments))

    completions = [replace(one, completion=exchanged(one.completion)) for one in arrived.completions]
    return replace(arrived, completions=completions)


def encode_said(group: int, outcome: Outcome) -> bytes:
    """What a group says. What can't be sent is an error."""
    return group.to_bytes(_GROUP_BYTES, "little") + encode_outcome(outcome)


def decode_said(data: bytes) -> Event:
    """What a group says, and its number. An outcome that is none is a RewardError of the group."""
    return int.from_bytes(data[:_GROUP_BYTES], "little"), decode_outcome(data[_GROUP_BYTES:])


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


SILENT_S = 10.0  # after which a connection that nothing comes through is lost


class RemoteWorker:
    """The worker at the other end of a connection. Its machine sees to time limits."""

    def __init__(self, place: int, socket: web.WebSocketResponse) -> None:
        self.place = place
        self.sessions: dict[int, Any] = {}
        self._socket = socket
        self._events = asyncio.Queue[Event]()
        self._closing: asyncio.Task[bool] | None = None

    def send(self, group: int, message: Arrived | None) -> None:
        self._events.put_nowait((group, message))

    async def follow(self, hear: Callable[[Event], None]) -> None:
        """Exchange messages until its connection ends."""
        writing = asyncio.ensure_future(self._write(hear))
        try:
            async for message in self._socket:
                if message.type is WSMsgType.BINARY:
                    hear(decode_said(message.data))
        finally:
            writing.cancel()

    async def _write(self, hear: Callable[[Event], None]) -> None:
        with suppress(ConnectionError):  # as `follow` will find
            while True:
                group, message = await self._events.get()
                try:
                    work = encode_work(group, message)
                except (TypeError, ValueError, OverflowError) as error:
                    hear((group, RewardError(f"task: a prompt's row can't be sent: {error}")))
                else:
                    await self._socket.send_bytes(work)

    def kill(self) -> None:
        """Close its connection, at which it begins anew by itself."""
        if self._socket.prepared:
            self._closing = asyncio.ensure_future(self._socket.close())
