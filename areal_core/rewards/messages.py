"""What controller and reward workers of other machines send each other, in MessagePack.

    work      its number, a group with completions that have ended, as servers gave them
    outcome   the next requests of the group, or the scored group

Prompts go with the first completions of a group. All else that its rollouts need is in the run's configuration.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from areal_core import errors
from areal_core.api.scored_groups import ScoredGroup
from areal_core.api.wire import Arrival, SampledCompletion
from areal_core.errors import ArealError, GenerationError, RewardError
from areal_core.rewards.group import Requests
from areal_core.rewards.worker import Arrived
from areal_core.types import Prompt, SampleRequest

Outcome = Requests | ScoredGroup | ArealError

ANSWER_BYTES = 2**26  # at most
_ERRORS = {  # that say something of the group
    kind.__name__: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, RewardError | GenerationError)
}


class _Completion(msgspec.Struct):
    request: int
    index: int
    segments: list[tuple[int, int]]  # a body's place in Work.bodies, and the place of a choice in it
    finish_reason: str | None


class Work(msgspec.Struct, kw_only=True):
    """A message for a worker."""

    number: int  # 0: no work
    forgotten: list[int] = []  # groups suspended in it that are given up
    group: int = 0
    prompt: Prompt | None = None  # with the first completions of the group
    ended: list[_Completion] = []
    bodies: list[bytes] = []
    apart: bool = False

    def completions(self) -> list[Arrival]:
        """Completions of one body share it."""
        return [
            Arrival(
                one.request,
                one.index,
                SampledCompletion(
                    segments=tuple((self.bodies[place], choice) for place, choice in one.segments),
                    finish_reason=one.finish_reason,
                ),
            )
            for one in self.ended
        ]


class _Outcome(msgspec.Struct):
    requests: list[SampleRequest] | None = None
    scored: ScoredGroup | None = None
    error: str | None = None  # its kind
    says: str = ""
    lost: bool = False  # with it the worker has lost its process, and all groups that were suspended there


BEGIN_ANEW = msgspec.msgpack.encode(Work(number=0))  # to a worker whose incarnation is over


def encode_work(number: int, forgotten: Sequence[int], arrived: Arrived) -> bytes:
    """A message for a worker. Several completions of one body carry it once."""
    bodies: dict[int, tuple[int, bytes]] = {}  # by identity: place and body
    completions: list[_Completion] = []
    for one in arrived.completions:
        segments: list[tuple[int, int]] = []
        for body, choice in one.completion.segments:
            place, _ = bodies.setdefault(id(body), (len(bodies), body))
            segments.append((place, choice))
        completions.append(_Completion(one.request, one.index, segments, one.completion.finish_reason))
    work = Work(
        number=number,
        forgotten=list(forgotten),
        group=arrived.group,
        prompt=None if arrived.job is None else arrived.job.prompt,
        ended=completions,
        bodies=[body for _, body in bodies.values()],
        apart=arrived.apart,
    )
    return msgspec.msgpack.encode(work)


def decode_work(data: bytes) -> Work | None:
    """None for BEGIN_ANEW."""
    work = msgspec.msgpack.decode(data, type=Work)
    return work if work.number else None


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
