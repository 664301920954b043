"""One group's rollouts: completions reach the environment as they end; what fails is tried again with what is kept."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from areal_core.api.pending_completions import PendingCompletions, receive
from areal_core.api.rollouts import Rollouts
from areal_core.api.scored_groups import ScoredGroup
from areal_core.api.wire import Arrival
from areal_core.errors import RewardError
from areal_core.types import GenerationRequest, SampleRequest, Tally
from tests.support.records import summary
from tests.support.rollout import body

REQUEST = GenerationRequest(request_id="g", token_ids=(7, 8), n=3, max_tokens=9, seed=5, stop_token_ids=(1,))
SCORED = ScoredGroup(payload=b"", summary=summary())
Outcome = tuple[SampleRequest, ...] | ScoredGroup | Exception


class Session:
    """Has its outcomes one after the other: one for what it gets, () where it says nothing."""

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        self.outcomes, self.seen, self.open = list(outcomes), list[object](), 0

    def begin(self, apart: bool) -> Session:
        self.open += 1
        self.apart = apart
        self.saying = asyncio.Queue[Outcome]()
        return self

    def deliver(self, arrivals: Sequence[Arrival]) -> None:
        self._next([(each.request, each.index) for each in arrivals])

    def cut(self) -> None:
        self._next("cut")

    def _next(self, seen: object) -> None:
        self.seen.append(seen)
        if (outcome := self.outcomes.pop(0)) != ():
            self.saying.put_nowait(outcome)

    async def next_outcome(self) -> tuple[SampleRequest, ...] | ScoredGroup:
        outcome = await self.saying.get()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def close(self) -> None:
        self.open -= 1


class Servers:
    """Whose requests end when they are told to, by request id."""

    def __init__(self) -> None:
        self.pending: dict[str, PendingCompletions] = {}
        self.ends: dict[str, asyncio.Future[None]] = {}
        self.cancelled: list[str] = []

    async def generate(self, pending: PendingCompletions) -> None:
        name = pending.request.request_id
        self.pending[name] = pending
        self.ends[name] = asyncio.get_running_loop().create_future()
        try:
            await self.ends[name]
        except asyncio.CancelledError:
            self.cancelled.append(name)
            await turns()  # until its server has ended it
            pending.take([index := pending.unfinished()[0]], receive(body([((4,), "abort")], 0)))
            assert index in pending.unfinished()
            raise

    async def complete(self, name: str, *indices: int, last: bool = False) -> None:
        self.pending[name].take(indices, receive(body([((5, 1), "stop")] * len(indices), 0)))
        if last:
            self.ends[name].set_result(None)
        await turns()


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@asynccontextmanager
async def begun(
    *outcomes: Outcome, opens: bool = True
) -> AsyncIterator[tuple[Servers, Rollouts, Session, asyncio.Task[object]]]:
    """Rollouts that are to be scored, whose first completions have been requested."""
    servers, session = Servers(), Session(outcomes)
    async with Rollouts(REQUEST, opens, servers.generate, session.begin) as rollouts:
        scoring = asyncio.ensure_future(rollouts.scored())
        await turns()
        yield servers, rollouts, session, scoring
    assert session.open == 0


def asked(*token_ids: int, call: tuple[int, int] = (0, 1)) -> SampleRequest:
    return SampleRequest(token_ids=token_ids, calls=(call,), max_tokens=4)


async def test_completions_reach_the_environment_as_they_end() -> None:
    async with begun((), SCORED) as (servers, rollouts, session, scoring):
        await servers.complete("g", 1)
        assert session.seen == [[(0, 1)]]
        await servers.complete("g", 2, 0, last=True)
        assert session.seen == [[(0, 1)], [(0, 0), (0, 2)]]
        assert await scoring is SCORED
        assert rollouts.complete
        assert rollouts.sampled() == Tally(tokens=6)


async def test_further_requests_have_seeds_of_their_calls() -> None:
    """Whatever their texts, and whichever rollout comes first."""
    calls = asked(9, call=(0, 1)), asked(9, call=(1, 1)), asked(9, call=(1, 2))
    seeds: list[set[int]] = []
    for order in (calls, calls[::-1]):
        async with begun(order[:2], order[2:]) as (servers, _, _, scoring):
            await servers.complete("g", 0)
            await servers.complete("g", 1)
            seeds.append({pending.request.seed for name, pending in servers.pending.items() if name != "g"})
            scoring.cancel()
    assert seeds[0] == seeds[1]
    assert len(seeds[0]) == 3


async def test_a_group_that_does_not_open_with_the_prompt_begins_in_its_worker() -> None:
    """After a failure it begins there again, with the same seed."""
    opening = SampleRequest(token_ids=(3,), calls=((0, 0), (1, 0), (2, 0)), max_tokens=4)
    outcomes = (opening,), RewardError("it broke"), (opening,), SCORED
    async with begun(*outcomes, opens=False) as (servers, rollouts, session, scoring):
        assert session.seen == [[]]
        [(name, first)] = servers.pending.items()
        assert (first.request.token_ids, first.request.n, first.request.max_tokens) == ((3,), 3, 4)
        await servers.complete(name, 1)
        with pytest.raises(RewardError, match="broke"):
            await scoring
        assert rollouts.take_discarded() == Tally(tokens=2 + 1)
        scoring = asyncio.ensure_future(rollouts.scored())
        await turns()
        assert servers.pending[name].request.seed == first.request.seed
        await servers.complete(name, 0, 1, 2, last=True)
        assert await scoring is SCORED
        assert session.seen == [[], [(0, 1)], [], [(0, 0), (0, 1), (0, 2)]]


async def test_after_a_failure_the_environment_begins_again_with_the_first_completions() -> None:
    outcomes = (asked(9),), RewardError("it broke"), (), SCORED
    async with begun(*outcomes) as (servers, rollouts, session, scoring):
        await servers.complete("g", 0)
        await servers.complete("g", 1)
        with pytest.raises(RewardError, match="broke"):
            await scoring
        [further] = [name for name in servers.pending if name != "g"]
        assert servers.cancelled == [further]  # what it had requested is worth nothing, and counted
        assert rollouts.take_discarded() == Tally(tokens=1)
        assert session.open == 0
        scoring = asyncio.ensure_future(rollouts.scored())
        await turns()
        await servers.complete("g", 2, last=True)
        assert await scoring is SCORED
        assert session.seen == [[(0, 0)], [(0, 1)], [(0, 0), (0, 1)], [(0, 2)]]
        assert rollouts.sampled() == Tally(tokens=6)


async def test_a_run_that_ends_leaves_completions_unfinished() -> None:
    async with begun(()) as (servers, rollouts, _, scoring):
        await servers.complete("g", 1, last=True)
        assert await scoring is None
        assert not rollouts.complete
        assert rollouts.sampled() == Tally(tokens=2)


async def test_requests_leave_while_completions_are_still_to_come() -> None:
    """The environment says them when it likes, also once it has all that it has asked for."""
    async with begun((), (), SCORED) as (servers, _, session, scoring):
        await servers.complete("g", 0)
        session.saying.put_nowait((asked(9),))
        await turns()
        [further] = [name for name in servers.pending if name != "g"]
        await servers.complete("g", 1, 2, last=True)
        await servers.complete(further, 0, last=True)
        assert await scoring is SCORED
        assert session.seen == [[(0, 0)], [(0, 1), (0, 2)], [(1, 0)]]


async def test_rollouts_are_cut_at_their_deadline() -> None:
    """The group goes on with the one that has ended. What the others had sampled is known by its length."""
    servers, session = Servers(), Session([(), SCORED])
    async with Rollouts(REQUEST, True, servers.generate, session.begin, deadline_s=0.05) as rollouts:
        scoring = asyncio.ensure_future(rollouts.scored())
        await turns()
        await servers.complete("g", 1)
        assert await scoring is SCORED
    assert session.seen == [[(0, 1)], "cut"]
    assert rollouts.lengths() == [1, 2, 0]
    assert rollouts.lengths(cut=True) == [1, 0]


async def test_closing_ends_what_is_generated_also_where_it_is_cancelled_itself() -> None:
    async with begun() as (servers, rollouts, _, scoring):
        scoring.cancel()
        closing = asyncio.ensure_future(rollouts.__aexit__())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.gather(scoring, closing, return_exceptions=True)
        assert servers.cancelled == ["g"]
        assert rollouts.sampled() == Tally(tokens=1)
