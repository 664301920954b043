"""What is known of the answers to one request, while servers work on it.

A server that is interrupted hands back what it has sampled; a request for the rest goes to any server. The bodies of
answers stay bytes: with log-probabilities they are large, and decoding them is the reward workers' business. Of a body
with an unfinished answer, token ids and finish reasons are read here, and nothing else.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace

import msgspec

from areal_core.api.wire import BodyPart, SampledAnswer
from areal_core.errors import GenerationError
from areal_core.types import GenerationRequest


class _Choice(msgspec.Struct):
    token_ids: list[int]
    finish_reason: str


class _Body(msgspec.Struct):
    """Of a body of /inference/v1/generate, what it takes to go on; the decoder skips the rest."""

    choices: list[_Choice]


_decoder = msgspec.json.Decoder(_Body)


@dataclass(slots=True)
class _Answer:
    segments: list[BodyPart] = field(default_factory=list[BodyPart])
    tokens: list[int] = field(default_factory=list[int])  # of an answer that is not finished
    count: int = 0  # tokens, as far as they were looked at
    finished: bool = False
    finish_reason: str | None = None  # where it isn't what the last segment says


class Transcript:
    """The answers to `request`, as far as they are known."""

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self._answers = [_Answer() for _ in range(request.n)]
        self._begun = False

    @property
    def begun(self) -> bool:
        """Whether the request itself was answered, if only in part."""
        return self._begun

    @property
    def held_tokens(self) -> int:
        """Tokens that servers have handed back; 0 once all answers are finished."""
        return sum(answer.count for answer in self._answers) if self.unfinished() else 0

    def begin(self, body: bytes) -> None:
        """Take the answer to the request. Raises GenerationError for a body that can't be gone on from."""
        self._answers = [_Answer() for _ in self._answers]  # of a body that was refused halfway, nothing stays
        if b"abort" in body:
            choices = _decode(body)
            if len(choices) != len(self._answers):
                raise GenerationError(f"{len(choices)} answers where {len(self._answers)} were asked for")
            for index, choice in enumerate(choices):
                self._add(index, (body, index), choice)
        else:
            for index, answer in enumerate(self._answers):
                answer.segments, answer.finished = [(body, index)], True
        self._begun = True

    def extend(self, index: int, body: bytes) -> None:
        """Take the answer to `continuation(index)`. Raises GenerationError as `begin` does."""
        [choice, *more] = _decode(body) or [None]
        if choice is None or more:
            raise GenerationError("not one answer where one was to be gone on with")
        self._add(index, (body, 0), choice)

    def unfinished(self) -> list[int]:
        """Places of the answers that a server has to go on with."""
        return [index for index, answer in enumerate(self._answers) if not answer.finished]

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

    def answers(self) -> tuple[SampledAnswer, ...]:
        """The answers with all of their segments, finished or not."""
        return tuple(
            SampledAnswer(segments=tuple(answer.segments), finish_reason=answer.finish_reason)
            for answer in self._answers
        )

    def sampled_tokens(self) -> int:
        """Tokens of all segments. Raises GenerationError as `begin` does."""
        choices: dict[int, list[_Choice]] = {}
        total = 0
        for body, place in (segment for answer in self._answers for segment in answer.segments):
            if id(body) not in choices:
                choices[id(body)] = _decode(body)
            if place >= len(choices[id(body)]):
                raise GenerationError(f"{len(choices[id(body)])} answers where {len(self._answers)} were asked for")
            total += len(choices[id(body)][place].token_ids)
        return total

    def _add(self, index: int, segment: BodyPart, choice: _Choice) -> None:
        answer, request = self._answers[index], self.request
        if choice.token_ids:
            answer.segments.append(segment)
        elif choice.finish_reason != "abort":
            raise GenerationError(f"answer {index} ended ({choice.finish_reason}) without a token")
        answer.tokens = answer.tokens + choice.token_ids
        answer.count = len(answer.tokens)
        if choice.finish_reason != "abort":
            answer.finished = True
        elif answer.tokens and answer.tokens[-1] in request.stop_token_ids:  # interrupted after its last token
            answer.finished, answer.finish_reason = True, "stop"
        elif len(answer.tokens) >= request.max_tokens:
            answer.finished, answer.finish_reason = True, "length"
        if answer.finished:
            answer.tokens = []


def _decode(body: bytes) -> list[_Choice]:
    try:
        return _decoder.decode(body).choices
    except msgspec.MsgspecError as error:
        raise GenerationError(f"not an answer of /inference/v1/generate: {error}") from None
