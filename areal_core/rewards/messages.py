"""What controller and reward workers of other machines send each other, in MessagePack.

    work      its number, a group with completions that have ended, as servers gave them
    outcome   the next requests of the group, or the scored group

Prompts go with the first completions of a group. All else that its rollouts need is in the run's configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import msgspec
import numpy as np

from areal_core import errors
from areal_core.api.scored_groups import ScoredGroup
from areal_core.api.wire import SampledCompletion
from areal_core.errors import ArealError, GenerationError, RewardError
from areal_core.rewards.group import Requests
from areal_core.rewards.worker import Arrived
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
