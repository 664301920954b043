"""The completions of one request, as far as they are known while servers work on it.

A server that is interrupted hands back what it has sampled; a request for the rest goes to any server. The bodies of
responses stay bytes: with log-probabilities they are large, and decoding them is the reward workers' business. Of a
body with an unfinished completion, token ids and finish reasons are read here, and nothing else.
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
    """The fields of a /inference/v1/generate response that a continuation needs; the decoder skips the rest."""

    choices: list[_Choice]


_decoder = msgspec.json.Decoder(_Body)


@dataclass(frozen=True, slots=True)
class _Response:
    """A response's body and what was requested."""

    body: bytes
    completions: int
    max_tokens: int  # of each


@dataclass(slots=True)
class _Completion:
    segments: list[BodyPart] = field(default_factory=list[BodyPart])
    tokens: list[int] = field(default_factory=list[int])  # of a completion that is not finished
    finished: bool = False
    finish_reason: str | None = None  # where it isn't what the last segment says


class Transcript:
    """The completions of `request`, as far as they are known."""

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self._completions = [_Completion() for _ in range(request.n)]
        self._begun = False
        self._kept: list[_Response] = []  # what the completions are made of
        self._refused: list[_Response] = []

    @property
    def begun(self) -> bool:
        """Whether the request itself has a response, complete or interrupted."""
        return self._begun

    def begin(self, body: bytes) -> None:
        """Take the response to the request. Raises GenerationError for a body that can't be continued from."""
        self._completions = [_Completion() for _ in self._completions]  # of a refused body, nothing stays
        with self._taking(_Response(body, self.request.n, self.request.max_tokens)):
            if b"abort" in body:
                choices = _decode(body)
                if len(choices) != len(self._completions):
                    raise GenerationError(f"{len(choices)} completions where {len(self._completions)} were requested")
                for index, choice in enumerate(choices):
                    self._add(index, (body, index), choice)
            else:
                for index, completion in enumerate(self._completions):
                    completion.segments, completion.finished = [(body, index)], True
        self._begun = True

    def extend(self, index: int, body: bytes) -> None:
        """Take the response to `continuation(index)`. Raises GenerationError as `begin` does."""
        with self._taking(_Response(body, 1, self.request.max_tokens - len(self._completions[index].tokens))):
            [choice, *more] = _decode(body) or [None]
            if choice is None or more:
                raise GenerationError("not exactly one completion in the response to a continuation")
            self._add(index, (body, 0), choice)

    def discard(self) -> None:
        """Start over: what servers have handed over counts as refused."""
        self._completions, self._begun = [_Completion() for _ in self._completions], False
        self._refused += self._kept
        self._kept = []

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
            token_ids=(*request.token_ids, *tokens),
            n=1,
            max_tokens=request.max_tokens - len(tokens),
            seed=int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") >> 1,
        )

    def completions(self) -> tuple[SampledCompletion, ...]:
        """The completions with all of their segments, finished or not."""
        return tuple(
            SampledCompletion(segments=tuple(completion.segments), finish_reason=completion.finish_reason)
            for completion in self._completions
        )

    def sampled(self) -> Tally:
        """Tokens of everything that servers have handed over, except what `take_refused` has returned."""
        return _tally(self._kept + self._refused)

    def take_refused(self) -> Tally:
        """Tokens of what was refused or discarded since the last call."""
        refused, self._refused = self._refused, []
        return _tally(refused)

    @contextmanager
    def _taking(self, response: _Response) -> Iterator[None]:
        try:
            yield
        except GenerationError:
            self._refused.append(response)
            raise
        self._kept.append(response)

    def _add(self, index: int, segment: BodyPart, choice: _Choice) -> None:
        completion, request = self._completions[index], self.request
        if choice.token_ids:
            completion.segments.append(segment)
        elif choice.finish_reason != "abort":
            raise GenerationError(f"completion {index} ended ({choice.finish_reason}) without a token")
        completion.tokens = completion.tokens + choice.token_ids
        if choice.finish_reason != "abort":
            completion.finished = True
        elif completion.tokens and completion.tokens[-1] in request.stop_token_ids:  # interrupted after its last token
            completion.finished, completion.finish_reason = True, "stop"
        elif len(completion.tokens) >= request.max_tokens:
            completion.finished, completion.finish_reason = True, "length"
        if completion.finished:
            completion.tokens = []


def _tally(responses: Sequence[_Response]) -> Tally:
    """The tokens that can be read, and at most how many more there may be."""
    tokens = unread = 0
    for response in responses:
        try:
            choices = _decode(response.body)
        except GenerationError:
            choices = []
        tokens += sum(len(choice.token_ids) for choice in choices)
        unread += max(0, response.completions - len(choices)) * response.max_tokens
    return Tally(tokens=tokens, unread=unread)


def _decode(body: bytes) -> list[_Choice]:
    try:
        return _decoder.decode(body).choices
    except msgspec.MsgspecError as error:
        raise GenerationError(f"not a response of /inference/v1/generate: {error}") from None
