"""The completions of one request, as far as they are known while servers work on it.

Completions come as they end, each finished or with what an interrupted server has sampled of it; a request for the
rest goes to any server. The bodies of responses stay bytes, of which no more is read here than counts, finish
reasons, and the tokens of an interrupted completion, which the request for the rest begins with. All else is for the
reward workers.
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
    """One completion, or what was sampled of it."""

    tokens: int
    finish_reason: str
    token_ids: Int32Array | None  # [tokens] of an interrupted one


@dataclass(frozen=True, slots=True)
class Received:
    """A body, and what was read of it: `choices`, or why there are none."""

    body: bytes
    choices: tuple[ReceivedChoice, ...] = ()
    problem: str | None = None


_decoder = msgspec.json.Decoder(_Body)


def receive(body: bytes) -> Received:
    """Read a body, in half a millisecond for 8k tokens."""
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
    tokens: Int32Array = field(default_factory=lambda: _NO_TOKENS)  # of a completion that is not finished
    sampled: int = 0  # tokens of all segments
    finished: bool = False
    finish_reason: str | None = None  # where it isn't what the last segment says


class PendingCompletions:
    """The completions of `request`, as far as they are known."""

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self._completions = [_Completion() for _ in range(request.n)]
        self._finished: list[int] = []  # completions, since `finished` was last called
        self._kept = Tally()  # what the completions are made of
        self._refused = Tally()
        self.begun = False  # something has come: what is left is requested completion by completion
        self.sent = False  # to a server, which counts its completions since
        self.notify: Callable[[], None] = lambda: None  # is called when a completion is finished

    def take(self, indices: Sequence[int], received: Received) -> None:
        """Take what a server has sent: a body whose choices are these completions, or the rest of them. Raises
        GenerationError for one that can't be continued from; nothing of it stays."""
        sampled = self._tally(indices, received)
        if problem := _problem(indices, received):
            self._refused += sampled
            raise GenerationError(problem)
        self._kept += sampled
        self.begun = True
        for place, (index, choice) in enumerate(zip(indices, received.choices, strict=True)):
            self._add(index, (received.body, place), choice)
        if self._finished:
            self.notify()

    @property
    def has_finished(self) -> bool:
        """Whether `finished` would return any."""
        return bool(self._finished)

    def finished(self) -> list[tuple[int, SampledCompletion]]:
        """Completions that were finished since the last call, by index."""
        finished, self._finished = self._finished, []
        return [(index, self._sampled(index)) for index in sorted(finished)]

    def repeat(self) -> None:
        """Have `finished` return again what it has returned before."""
        self._finished = [index for index, completion in enumerate(self._completions) if completion.finished]

    def discard(self) -> None:
        """Start over: what servers have handed over counts as refused."""
        self._completions, self._finished = [_Completion() for _ in self._completions], []
        self.begun = False
        self._refused, self._kept = self._refused + self._kept, Tally()

    def lengths(self) -> list[int]:
        """Tokens of each completion so far."""
        return [completion.sampled for completion in self._completions]

    def unfinished(self) -> list[int]:
        """Indices of the completions that a server has to continue."""
        return [index for index, completion in enumerate(self._completions) if not completion.finished]

    def continuation(self, index: int) -> GenerationRequest:
        """The request for the rest of a completion: prompt and tokens so far, and a seed of its own. With the seed of
        `request`, a server would sample with the same random numbers again."""
        request, tokens = self.request, self._completions[index].tokens
        name = f"{request.seed}/{index}/{len(tokens)}".encode()
        return replace(
            request,
            request_id=f"{request.request_id}-{index}-{len(tokens)}",
            token_ids=np.concatenate([np.array(request.token_ids, np.int32), tokens]),
            n=1,
            max_tokens=request.max_tokens - len(tokens),
            seed=int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") >> 1,
        )

    def completions(self) -> tuple[SampledCompletion, ...]:
        """The completions with all of their segments, finished or not."""
        return tuple(map(self._sampled, range(len(self._completions))))

    def sampled(self) -> Tally:
        """Tokens of everything that servers have handed over, except what `take_refused` has returned."""
        return self._kept + self._refused

    def take_refused(self) -> Tally:
        """Tokens of what was refused or discarded since the last call."""
        refused, self._refused = self._refused, Tally()
        return refused

    def _tally(self, indices: Sequence[int], received: Received) -> Tally:
        """The tokens of a body that can be read, and at most how many more there may be."""
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
        if len(tokens) and tokens[-1] in request.stop_token_ids:  # interrupted after its last token
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


def _problem(indices: Sequence[int], received: Received) -> str | None:
    """Why a body is not what these completions can be made of, or go on from."""
    if received.problem is not None:
        return received.problem
    if len(received.choices) != len(indices):
        return f"{len(received.choices)} completions where {len(indices)} were requested"
    for index, choice in zip(indices, received.choices, strict=True):
        if not choice.tokens and choice.finish_reason != "abort":
            return f"completion {index} ended ({choice.finish_reason}) without a token"
    return None
