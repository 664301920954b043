"""What controller and reward workers of other machines send each other: a line of JSON, and bytes that it has the
lengths of.

    work      its number, a group with completions that have ended; their bodies, as servers gave them
    outcome   the next requests of the group, or its scores; the packed group

Prompts go with the first completions of a group. All else that its rollouts need is in the run's configuration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import msgspec
import numpy as np

from areal_core import errors
from areal_core.api.scored_groups import ScoredGroup
from areal_core.api.wire import Arrival, SampledCompletion
from areal_core.errors import ArealError, GenerationError, RewardError
from areal_core.rewards.group import Requests
from areal_core.rewards.worker import Arrived
from areal_core.types import GroupSummary, Prompt, SampleRequest

Outcome = Requests | ScoredGroup | ArealError

ANSWER_BYTES = 2**26  # at most
_ERRORS = {  # that say something of the group
    kind.__name__: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, RewardError | GenerationError)
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A message for a worker."""

    number: int
    forgotten: list[int]  # groups suspended in it that are given up
    group: int
    prompt: Prompt | None  # with the first completions of the group
    completions: list[Arrival]
    apart_s: float | None


class _Completion(msgspec.Struct):
    request: int
    index: int
    segments: list[tuple[int, int]]  # a body's place among those that follow, and the place of a choice in it
    finish_reason: str | None


class _Work(msgspec.Struct):
    number: int  # 0: no work
    forgotten: list[int] = []
    group: int = 0
    prompt: Prompt | None = None
    completions: list[_Completion] = []
    bodies: list[int] = []  # bytes of each
    apart_s: float | None = None


class _Outcome(msgspec.Struct):
    requests: list[SampleRequest] | None = None
    scores: GroupSummary | None = None  # then the packed group follows
    failure: str | None = None
    error: str | None = None  # its kind
    says: str = ""
    lost: bool = False  # with it the worker has lost its process, and all groups that were suspended there


BEGIN_ANEW = msgspec.json.encode(_Work(number=0)) + b"\n"  # to a worker whose incarnation is over


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
    parts = [body for _, body in bodies.values()]
    header = _Work(
        number=number,
        forgotten=list(forgotten),
        group=arrived.group,
        prompt=None if arrived.job is None else arrived.job.prompt,
        completions=completions,
        bodies=[len(part) for part in parts],
        apart_s=arrived.apart_s,
    )
    return b"".join([msgspec.json.encode(header), b"\n", *parts])


def decode_work(data: bytes) -> Work | None:
    """None for BEGIN_ANEW."""
    line, _, rest = data.partition(b"\n")
    header = msgspec.json.decode(line, type=_Work)
    if not header.number:
        return None
    bodies = [rest[start:end] for start, end in pairwise(accumulate(header.bodies, initial=0))]
    completions = [
        Arrival(
            one.request,
            one.index,
            SampledCompletion(
                segments=tuple((bodies[place], choice) for place, choice in one.segments),
                finish_reason=one.finish_reason,
            ),
        )
        for one in header.completions
    ]
    return Work(
        number=header.number,
        forgotten=header.forgotten,
        group=header.group,
        prompt=header.prompt,
        completions=completions,
        apart_s=header.apart_s,
    )


def encode_outcome(outcome: Outcome, *, lost: bool = False) -> bytes:
    """A worker's answer; `lost` with an error that has cost the worker its process. What can't be sent is one."""
    payload = b""
    if isinstance(outcome, ScoredGroup):
        header, payload = _Outcome(scores=outcome.summary, failure=outcome.failure), outcome.payload
    elif isinstance(outcome, ArealError):
        header = _Outcome(error=type(outcome).__name__, says=str(outcome), lost=lost)
    else:
        header = _Outcome(requests=list(outcome))
    try:
        answer = msgspec.json.encode(header, enc_hook=_plain) + b"\n" + payload
    except (TypeError, ValueError) as error:
        return encode_outcome(RewardError(f"environment: what it gives can't be sent: {error}"))
    if len(answer) > ANSWER_BYTES:
        return encode_outcome(
            RewardError(f"the group has {len(answer)} bytes, more than the {ANSWER_BYTES} of an answer")
        )
    return answer


def decode_outcome(data: bytes) -> Outcome:
    """Raises the error that has cost the worker its process. What is no outcome is a RewardError."""
    line, _, payload = data.partition(b"\n")
    try:
        header = msgspec.json.decode(line, type=_Outcome)
    except (msgspec.DecodeError, ValueError) as error:
        return RewardError(f"a reward worker's answer is none: {error}")
    if header.error is not None:
        error = _ERRORS.get(header.error, RewardError)(header.says)
        if header.lost:
            raise error
        return error
    if header.scores is not None:
        return ScoredGroup(payload=payload, summary=header.scores, failure=header.failure)
    return tuple(header.requests or ())


def _plain(value: object) -> object:
    """A number of numpy's, as an environment may give it."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} is neither a number nor text")
