"""The completions of one request, as far as they are known while servers work on it.

Completions come as they end, each finished or with what an interrupted server has sampled of it; a request for the
rest goes to any server. The bodies of responses stay bytes: with log-probabilities they are large, and decoding them is
the reward workers' business. Of a body with an unfinished completion, token ids and finish reasons are read here, and
nothing else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
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
    """A body that a server has sent, and what was requested with it."""

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
        self._finished: list[int] = []  # completions, since `finished` was last called
        self._kept: list[_Response] = []  # what the completions are made of
        self._refused: list[_Response] = []
        self.sent = False  # to a server, which counts its completions since
        self.notify: Callable[[], None] = lambda: None  # is called when a completion is finished

    @property
    def begun(self) -> bool:
        """Whether anything has come: what is left is requested completion by completion."""
        return bool(self._kept)

    def take(self, indices: Sequence[int], body: bytes) -> None:
        """Take what a server has sent: a body whose choices are these completions, or the rest of them. Raises
        GenerationError for one that can't be continued from; nothing of it stays."""
        most = max(self.request.max_tokens - len(self._completions[index].tokens) for index in indices)
        with self._taking(_Response(body, len(indices), most)):
            if b"abort" in body or any(self._completions[index].segments for index in indices):
                choices = _decode(body)
                if len(choices) != len(indices):
                    raise GenerationError(f"{len(choices)} completions where {len(indices)} were requested")
                for index, choice in zip(indices, choices, strict=True):
                    if not choice.token_ids and choice.finish_reason != "abort":
                        raise GenerationError(f"completion {index} ended ({choice.finish_reason}) without a token")
                for place, (index, choice) in enumerate(zip(indices, choices, strict=True)):
                    self._add(index, (body, place), choice)
            else:
                for place, index in enumerate(indices):
                    self._completions[index].segments = [(body, place)]
                    self._finish(index)
        if self._finished:
            self.notify()

    @property
    def pending(self) -> bool:
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
        return tuple(map(self._sampled, range(len(self._completions))))

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
        completion.tokens = completion.tokens + choice.token_ids
        if choice.finish_reason != "abort":
            self._finish(index)
        elif completion.tokens and completion.tokens[-1] in request.stop_token_ids:  # interrupted after its last token
            self._finish(index, "stop")
        elif len(completion.tokens) >= request.max_tokens:
            self._finish(index, "length")

    def _finish(self, index: int, finish_reason: str | None = None) -> None:
        completion = self._completions[index]
        completion.finished, completion.finish_reason, completion.tokens = True, finish_reason, []
        self._finished.append(index)

    def _sampled(self, index: int) -> SampledCompletion:
        completion = self._completions[index]
        return SampledCompletion(segments=tuple(completion.segments), finish_reason=completion.finish_reason)


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
