"""One group's rollouts: the turns of its environment, and what servers have sampled for them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from areal_core.api.scored_groups import ScoredGroup
from areal_core.api.transcript import Transcript
from areal_core.api.wire import SampledCompletion
from areal_core.errors import GenerationError, RewardError
from areal_core.types import GenerationRequest, SampleRequest, Tally


class Session(Protocol):
    """The rollouts of one group in its environment."""

    async def advance(
        self, completions: Sequence[tuple[SampledCompletion, ...]]
    ) -> tuple[SampleRequest, ...] | ScoredGroup:
        """Resume the environment with the completions of its last requests, in their order; at first, with the G
        completions of the prompt. Returns its next requests, or the scored group. Raises RewardError, and
        GenerationError for a response that holds no completions; the session is to be closed then."""
        ...

    def close(self) -> None: ...


class Turns:
    """One group's rollouts: its transcripts so far, and the environment's session."""

    def __init__(self, request: GenerationRequest) -> None:
        self.session: Session | None = None  # open once the first turn is generated
        self._request = request
        self._earlier: list[Transcript] = []  # of turns that the environment has completed
        self._turn = [Transcript(request)]
        self._turns = 0
        self._lost: list[Transcript] = []  # of turns that a failure has made worthless

    def generating(self) -> list[Transcript]:
        """Transcripts of the turn that servers have not finished."""
        return [transcript for transcript in self._turn if not transcript.begun or transcript.unfinished()]

    async def advance(self, session: Session) -> tuple[SampleRequest, ...] | ScoredGroup:
        """Give the turn's completions to the environment; its requests are the next turn. After a RewardError the
        environment starts again with the group's first completions; after a GenerationError, which means that they
        can't be read, with new ones."""
        self.session = session
        try:
            outcome = await session.advance([transcript.completions() for transcript in self._turn])
        except (GenerationError, RewardError) as error:
            self.close()
            first, *later = self._earlier + self._turn
            for transcript in later:
                transcript.discard()
            if isinstance(error, GenerationError):
                first.discard()
            self._lost += later
            self._earlier, self._turn, self._turns = [], [first], 0
            raise
        if not isinstance(outcome, ScoredGroup):
            self._turns += 1
            self._earlier += self._turn
            self._turn = [Transcript(self._further(place, asked)) for place, asked in enumerate(outcome)]
        return outcome

    def sampled(self) -> Tally:
        """Tokens of all that servers have returned, except those that `take_refused` has returned."""
        return _sum(transcript.sampled() for transcript in self._transcripts())

    def take_refused(self) -> Tally:
        """Tokens that a failure has made worthless since the last call."""
        refused = _sum(transcript.take_refused() for transcript in self._transcripts())
        self._lost = []
        return refused

    def _transcripts(self) -> list[Transcript]:
        return [*self._lost, *self._earlier, *self._turn]

    def close(self) -> None:
        if self.session is not None:
            self.session.close()
            self.session = None

    def _further(self, place: int, asked: SampleRequest) -> GenerationRequest:
        name = f"turn/{self._request.seed}/{self._turns}/{place}".encode()
        return replace(
            self._request,
            request_id=f"{self._request.request_id}-turn-{self._turns}-{place}",
            token_ids=asked.token_ids,
            n=asked.n,
            max_tokens=asked.max_tokens,
            seed=_seed(name),
        )


def _sum(tallies: Iterable[Tally]) -> Tally:
    counted = list(tallies)
    return Tally(tokens=sum(one.tokens for one in counted), unread=sum(one.unread for one in counted))


def trajectory_seed(run_seed: int, prompt_index: int, requeues: int) -> int:
    """Seed of a group's sampling streams, 63 bits: the same at every try and on every server."""
    return _seed(f"{run_seed}/{prompt_index}/{requeues}".encode())


def _seed(name: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") >> 1
