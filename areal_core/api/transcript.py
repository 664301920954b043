"""What is known of the answers to one request, while servers work on it.

A server that is interrupted hands back what it has sampled; a request for the rest goes to any server. The bodies of
answers stay bytes: with log-probabilities they are large, and decoding them is the reward workers' business. Of a body
with an unfinished answer, token ids and finish reasons are read here, and nothing else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import msgspec

from areal_core.api.wire import BodyPart, SampledCompletion
from areal_core.errors import GenerationError
from areal_core.types import GenerationRequest, Tally


class _Choice(msgspec.Struct):
    token_ids: list[int]
    finish_reason: str


class _Body(msgspec.Struct):
    """Of a body of /inference/v1/generate, what it takes to go on; the decoder skips the rest."""

    choices: list[_Choice]


_decoder = msgspec.json.Decoder(_Body)


@dataclass(frozen=True, slots=True)
class _Reply:
    """A body and what it was asked for."""

    body: bytes
    completions: int
    max_tokens: int  # of each


@dataclass(slots=True)
class _Completion:
    segments: list[BodyPart] = field(default_factory=list[BodyPart])
    tokens: list[int] = field(default_factory=list[int])  # of an answer that is not finished
    finished: bool = False
    finish_reason: str | None = None  # where it isn't what the last segment says


class Transcript:
    """The answers to `request`, as far as they are known."""

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self._answers = [_Completion() for _ in range(request.n)]
        self._begun = False
        self._kept: list[_Reply] = []  # that answers are made of
        self._refused: list[_Reply] = []

    @property
    def begun(self) -> bool:
        """Whether the request itself was answered, if only in part."""
        return self._begun

    def begin(self, body: bytes) -> None:
        """Take the answer to the request. Raises GenerationError for a body that can't be gone on from."""
        self._answers = [_Completion() for _ in self._answers]  # of a body that was refused halfway, nothing stays
        with self._taking(_Reply(body, self.request.n, self.request.max_tokens)):
            if b"abort" in body:
                choices = _decode(body)
                if len(choices) != len(self._answers):
                    raise GenerationError(f"{len(choices)} answers where {len(self._answers)} were asked for")
                for index, choice in enumerate(choices):
                    self._add(index, (body, index), choice)
            else:
                for index, completion in enumerate(self._answers):
                    completion.segments, completion.finished = [(body, index)], True
        self._begun = True

    def extend(self, index: int, body: bytes) -> None:
        """Take the answer to `continuation(index)`. Raises GenerationError as `begin` does."""
        with self._taking(_Reply(body, 1, self.request.max_tokens - len(self._answers[index].tokens))):
            [choice, *more] = _decode(body) or [None]
            if choice is None or more:
                raise GenerationError("not one answer where one was to be gone on with")
            self._add(index, (body, 0), choice)

    def discard(self) -> None:
        """Begin again: what servers have handed over stands for nothing."""
        self._answers, self._begun = [_Completion() for _ in self._answers], False
        self._refused += self._kept
        self._kept = []

    def unfinished(self) -> list[int]:
        """Places of the answers that a server has to go on with."""
        return [index for index, completion in enumerate(self._answers) if not completion.finished]

    def continuation(self, index: int) -> GenerationRequest:
        """The request for the rest of an answer: prompt and tokens so far, and a seed of its own. With the seed that
        it began with, a server would draw the same random numbers again."""
        request, tokens = self.request, self._answers[index].tokens
        name = f"{request.seed}/{index}/{len(tokens)}".encode()
        return replace(
            request,
            request_id=f"{request.request_id}-{index}-{len(tokens)}",
            token_ids=(*request.token_ids, *tokens),
            n=1,
            max_tokens=request.max_tokens - len(tokens),
            seed=int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") >> 1,
        )

    def completions(self) -> tuple[SampledCompletion, ...]:
        """The answers with all of their segments, finished or not."""
        return tuple(
            SampledCompletion(segments=tuple(completion.segments), finish_reason=completion.finish_reason)
            for completion in self._answers
        )

    def sampled(self) -> Tally:
        """Tokens of everything that servers have handed over, but for what `take_refused` has told of."""
        return _tally(self._kept + self._refused)

    def take_refused(self) -> Tally:
        """Tokens of what was refused or discarded since the last call."""
        refused, self._refused = self._refused, []
        return _tally(refused)

    @contextmanager
    def _taking(self, reply: _Reply) -> Iterator[None]:
        try:
            yield
        except GenerationError:
            self._refused.append(reply)
            raise
        self._kept.append(reply)

    def _add(self, index: int, segment: BodyPart, choice: _Choice) -> None:
        completion, request = self._answers[index], self.request
        if choice.token_ids:
            completion.segments.append(segment)
        elif choice.finish_reason != "abort":
            raise GenerationError(f"answer {index} ended ({choice.finish_reason}) without a token")
        completion.tokens = completion.tokens + choice.token_ids
        if choice.finish_reason != "abort":
            completion.finished = True
        elif completion.tokens and completion.tokens[-1] in request.stop_token_ids:  # interrupted after its last token
            completion.finished, completion.finish_reason = True, "stop"
        elif len(completion.tokens) >= request.max_tokens:
            completion.finished, completion.finish_reason = True, "length"
        if completion.finished:
            completion.tokens = []


def _tally(replies: Sequence[_Reply]) -> Tally:
    """Whatever of the replies can be read, and at most how much more there may be."""
    tokens = unread = 0
    for reply in replies:
        try:
            choices = _decode(reply.body)
        except GenerationError:
            choices = []
        tokens += sum(len(choice.token_ids) for choice in choices)
        unread += max(0, reply.completions - len(choices)) * reply.max_tokens
    return Tally(tokens=tokens, unread=unread)


def _decode(body: bytes) -> list[_Choice]:
    try:
        return _decoder.decode(body).choices
    except msgspec.MsgspecError as error:
        raise GenerationError(f"not an answer of /inference/v1/generate: {error}") from None
