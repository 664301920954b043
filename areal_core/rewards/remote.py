"""Reward workers of other machines, seen from the controller, and their messages in MessagePack.

    controller --work: finished completions of a group as servers returned them, or its end--> worker
    controller <--at any time, outcomes of a group: its next requests, the scored group, or an error-- worker

The prompt travels with a group's first completions. All other inputs of rollouts are in the run's configuration. Every
worker has its own WebSocket, and exists as long as its connection.
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
from areal_core.rewards.worker import Event, GroupMessage
from areal_core.types import SampleRequest

Outcome = Requests | ScoredGroup | ArealError

ANSWER_BYTES = 2**26  # largest message of a worker
_GROUP_BYTES = 8
_ERRORS = {  # errors that concern one group
    kind.__name__: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, RewardError | GenerationError)
}


class Work(msgspec.Struct, kw_only=True):
    """A message to a worker."""

    group: int
    arrived: GroupMessage | None  # None: the group is abandoned
    bodies: dict[bytes, bytes]  # response bodies by short names, sent once even if several completions share one


class _Outcome(msgspec.Struct):
    requests: list[SampleRequest] | None = None
    scored: ScoredGroup | None = None
    error: str | None = None  # name of the error's class
    says: str = ""


def encode_work(group: int, arrived: GroupMessage | None) -> bytes:
    """Encode a message to a worker."""
    names: dict[bytes, bytes] = {}
    for one in () if arrived is None else arrived.completions:
        for body, _ in one.completion.segments:
            names.setdefault(body, str(len(names)).encode())
    bodies = {name: body for body, name in names.items()}
    return msgspec.msgpack.encode(Work(group=group, arrived=_with_bodies(arrived, names), bodies=bodies))


def decode_work(data: bytes) -> tuple[int, GroupMessage | None]:
    """Decode a message to a worker. Completions of one response share its body."""
    work = msgspec.msgpack.decode(data, type=Work)
    return work.group, _with_bodies(work.arrived, work.bodies)


def _with_bodies(arrived: GroupMessage | None, bodies: Mapping[bytes, bytes]) -> GroupMessage | None:
    """Replace the bodies of completions, keyed by body."""
    if arrived is None:
        return None

    def exchanged(one: SampledCompletion) -> SampledCompletion:
        return replace(one, segments=tuple((bodies[body], choice) for body, choice in one.segments))

    completions = [replace(one, completion=exchanged(one.completion)) for one in arrived.completions]
    return replace(arrived, completions=completions)


def encode_outcome(group: int, outcome: Outcome) -> bytes:
    """Encode an outcome of a group, with the group's number.
    An outcome that can't be encoded or exceeds ANSWER_BYTES becomes a RewardError."""
    if isinstance(outcome, ScoredGroup):
        message = _Outcome(scored=outcome)
    elif isinstance(outcome, ArealError):
        message = _Outcome(error=type(outcome).__name__, says=str(outcome))
    else:
        message = _Outcome(requests=list(outcome))
    try:
        answer = msgspec.msgpack.encode(message)
    except (TypeError, ValueError, OverflowError) as error:
        return encode_outcome(group, RewardError(f"environment: can't serialize its result: {error}"))
    if len(answer) > ANSWER_BYTES:
        said = f"the scored group has {len(answer)} bytes, more than the limit of {ANSWER_BYTES}"
        return encode_outcome(group, RewardError(said))
    return group.to_bytes(_GROUP_BYTES, "little") + answer


def decode_outcome(data: bytes) -> Event:
    """Decode a group's number and outcome. An invalid outcome becomes a RewardError of the group."""
    group = int.from_bytes(data[:_GROUP_BYTES], "little")
    try:
        message = msgspec.msgpack.decode(data[_GROUP_BYTES:], type=_Outcome)
    except ValueError as error:  # msgspec.DecodeError among them
        return group, RewardError(f"invalid response of a reward worker: {error}")
    if message.error is not None:
        return group, _ERRORS.get(message.error, RewardError)(message.says)
    return group, message.scored or tuple(message.requests or ())


SILENT_S = 10.0  # seconds of silence after which a connection counts as lost


class RemoteWorker:
    """The worker at the other end of a connection. Its own machine enforces time limits."""

    def __init__(self, place: int, socket: web.WebSocketResponse) -> None:
        self.place = place
        self.sessions: dict[int, Any] = {}
        self._socket = socket
        self._events = asyncio.Queue[Event]()
        self._closing: asyncio.Task[bool] | None = None

    def send(self, group: int, message: GroupMessage | None) -> None:
        self._events.put_nowait((group, message))

    async def follow(self, handle: Callable[[Event], None]) -> None:
        """Exchange messages until the connection ends."""
        writing = asyncio.ensure_future(self._write(handle))
        try:
            async for message in self._socket:
                if message.type is WSMsgType.BINARY:
                    handle(decode_outcome(message.data))
        finally:
            writing.cancel()

    async def _write(self, handle: Callable[[Event], None]) -> None:
        with suppress(ConnectionError):  # `follow` handles the lost connection
            while True:
                group, message = await self._events.get()
                try:
                    work = encode_work(group, message)
                except (TypeError, ValueError, OverflowError) as error:
                    handle((group, RewardError(f"task: can't serialize a prompt's row: {error}")))
                else:
                    await self._socket.send_bytes(work)

    def kill(self) -> None:
        """Close the connection. The worker then reconnects by itself."""
        if self._socket.prepared:
            self._closing = asyncio.ensure_future(self._socket.close())
