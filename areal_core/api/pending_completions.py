"""The completions of one request while servers generate them.

Servers return completions as each ends, finished or interrupted. Any server can continue an interrupted completion.
Response bodies stay bytes. This module parses token counts and finish reasons, and the tokens of interrupted
completions, because the next request starts with them. Reward workers parse the rest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from areal_core.api.wire import BodyPart, SampledCompletion
from areal_core.errors import GenerationError
from areal_core.types import GenerationRequest, Int32Array, Tally


class _Choice(msgspec.Struct):
    token_ids: list[int]
    finish_reason: str


class _Body(msgspec.Struct):
    choices: list[_Choice]


@dataclass(frozen=True, slots=True)
class ReceivedChoice:
    """One completion in a response, finished or interrupted."""

    tokens: int
    finish_reason: str
    token_ids: Int32Array | None  # [tokens] of an interrupted completion


@dataclass(frozen=True, slots=True)
class Received:
    """A response body and its parsed `choices`, or the `problem` that prevented parsing."""

    body: bytes
    choices: tuple[ReceivedChoice, ...] = ()
    problem: str | None = None


_decoder = msgspec.json.Decoder(_Body)


def receive(body: bytes) -> Received:
    """Parse a response body; takes half a millisecond for 8k tokens."""
    try:
        return Received(body, tuple(map(_read, _decoder.decode(body).choices)))
    except msgspec.MsgspecError as error:
        return Received(body, problem=f"not a response of /inference/v1/generate: {error}")


def _read(choice: _Choice) -> ReceivedChoice:
    interrupted = choice.finish_reason == "abort"
    token_ids = np.array(choice.token_ids, np.int32) if interrupted else None
    return ReceivedChoice(len(choice.token_ids), choice.finish_reason, token_ids)


_NO_TOKENS = np.zeros(0, np.int32)


@dataclass(slots=True)
class _Completion:
    segments: list[BodyPart] = field(default_factory=list[BodyPart])
    tokens: Int32Array = field(default_factory=lambda: _NO_TOKENS)  # of an unfinished completion
    sampled: int = 0  # tokens of all segments
    finished: bool = False
    finish_reason: str | None = None  # None: the last segment's own reason


class PendingCompletions:
    """The completions of `request` so far."""

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self._completions = [_Completion() for _ in range(request.n)]
        self._finished: list[int] = []  # indices of completions finished since the last call of `finished`
        self._kept = Tally()  # tokens of the accepted segments
        self._discarded = Tally()  # tokens of refused or discarded segments
        self.begun = False  # some segments have come: request each remaining completion by itself
        self.sent = False  # to a server, whose counters include these completions from then on
        self.notify: Callable[[], None] = lambda: None  # called when a completion is finished

    def take(self, indices: Sequence[int], received: Received) -> None:
        """Accept a response whose choices are the completions `indices`, or their continuations.
        Raises GenerationError for a response that can't be continued; none of it is kept."""
        sampled = self._tally(indices, received)
        if problem := _problem(indices, received):
            self._discarded += sampled
            raise GenerationError(problem)
        self._kept += sampled
        self.begun = True
        for place, (index, choice) in enumerate(zip(indices, received.choices, strict=True)):
            self._add(index, (received.body, place), choice)
        if self._finished:
            self.notify()

    @property
    def has_finished(self) -> bool:
        """Whether `finished` would return a completion."""
        return bool(self._finished)

    def finished(self) -> list[tuple[int, SampledCompletion]]:
        """Return the completions finished since the last call, with their indices."""
        finished, self._finished = self._finished, []
        return [(index, self._sampled(index)) for index in sorted(finished)]

    def repeat(self) -> None:
        """Make `finished` return all finished completions again."""
        self._finished = [index for index, completion in enumerate(self._completions) if completion.finished]

    def discard(self) -> None:
        """Start over. The tokens received so far count as refused."""
        self._completions, self._finished = [_Completion() for _ in self._completions], []
        self.begun = False
        self._discarded, self._kept = self._discarded + self._kept, Tally()

    def lengths(self) -> list[int]:
        """Sampled tokens of each completion so far."""
        return [completion.sampled for completion in self._completions]

    def unfinished(self) -> list[int]:
        """Indices of the completions that a server must still continue."""
        return [index for index, completion in enumerate(self._completions) if not completion.finished]

    def continuation(self, index: int) -> GenerationRequest:
        """Build the request for the rest of a completion: prompt, tokens so far, and a seed of its own.
        With the seed of `request`, a server would repeat the same random numbers."""
        request, tokens = self.request, self._completions[index].tokens
        name = f"{request.seed}/{index}/{len(tokens)}".encode()
        return replace(
            request,
            request_id=f"{request.request_id}-{index}-{len(tokens)}",
            token_ids=np.concatenate([np.array(request.token_ids, np.int32), tokens]),
            n=1,
            max_tokens=request.max_tokens - len(tokens),
            seed=seed_of(name),
        )

    def completions(self) -> tuple[SampledCompletion, ...]:
        """Return all completions with all their segments, finished or not."""
        return tuple(map(self._sampled, range(len(self._completions))))

    def sampled(self) -> Tally:
        """Count the tokens received from servers, except those that `take_discarded` has returned."""
        return self._kept + self._discarded

    def take_discarded(self) -> Tally:
        """Count the tokens that were refused or discarded since the last call."""
        discarded, self._discarded = self._discarded, Tally()
        return discarded

    def _tally(self, indices: Sequence[int], received: Received) -> Tally:
        """Count the tokens of a response, and an upper bound of the tokens that could not be parsed."""
        most = max(self.request.max_tokens - len(self._completions[index].tokens) for index in indices)
        unread = max(0, len(indices) - len(received.choices)) * most
        return Tally(tokens=sum(choice.tokens for choice in received.choices), unread=unread)

    def _add(self, index: int, segment: BodyPart, choice: ReceivedChoice) -> None:
        completion, request = self._completions[index], self.request
        completion.sampled += choice.tokens
        if choice.tokens:
            completion.segments.append(segment)
        if choice.token_ids is None:
            self._finish(index)
            return
        tokens = completion.tokens = np.concatenate([completion.tokens, choice.token_ids])
        if len(tokens) and tokens[-1] in request.stop_token_ids:  # interrupted after its stop token
            self._finish(index, "stop")
        elif len(tokens) >= request.max_tokens:
            self._finish(index, "length")

    def _finish(self, index: int, finish_reason: str | None = None) -> None:
        completion = self._completions[index]
        completion.finished, completion.finish_reason, completion.tokens = True, finish_reason, _NO_TOKENS
        self._finished.append(index)

    def _sampled(self, index: int) -> SampledCompletion:
        completion = self._completions[index]
        return SampledCompletion(segments=tuple(completion.segments), finish_reason=completion.finish_reason)


def seed_of(name: bytes) -> int:
    """Seed of a request's sampling streams, 63 bits, from a name."""
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") >> 1


def _problem(indices: Sequence[int], received: Received) -> str | None:
    """Return why a response does not fit these completions, or None."""
    if received.problem is not None:
        return received.problem
    if len(received.choices) != len(indices):
        return f"requested {len(indices)} completions, got {len(received.choices)}"
    for index, choice in zip(indices, received.choices, strict=True):
        if not choice.tokens and choice.finish_reason != "abort":
            return f"completion {index} has no token (finish_reason {choice.finish_reason})"
    return None
