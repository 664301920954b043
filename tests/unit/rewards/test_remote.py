"""Reward workers of other machines, played by the tests, in the pool of a controller whose own worker is busy."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, cast

import numpy as np
import pytest

from areal_core.api.scored_groups import ScoredGroup
from areal_core.api.wire import Arrival, SampledCompletion
from areal_core.errors import (
    ArealError,
    ConfigError,
    GenerationError,
    RewardError,
    RewardTimeoutError,
    RewardWorkerError,
    SessionLostError,
)
from areal_core.rewards import remote
from areal_core.rewards import remote as messages
from areal_core.rewards.pool import GroupSession, RewardPool
from areal_core.rewards.remote import BEGIN_ANEW, Work, decode_outcome, decode_work, encode_outcome, encode_work
from areal_core.rewards.worker import Arrived
from areal_core.types import GroupSummary, Outcome, Prompt, SampleRequest

LIMIT_S = 30.0
REQUESTS = (SampleRequest(token_ids=(1,), n=1, max_tokens=1),)


def _hang(_: Any) -> None:
    time.sleep(600)


@pytest.fixture
async def pool() -> AsyncIterator[RewardPool]:
    pool = RewardPool(1, timeout_s=600.0, function=_hang)
    busy = asyncio.create_task(pool.ask("hang"))
    await asyncio.sleep(0)
    yield pool
    await pool.close()
    with suppress(RewardWorkerError):
        await busy


class Played:
    """A worker of another machine."""

    def __init__(self, pool: RewardPool, incarnation: str = "a", place: int = 1) -> None:
        self._pool = pool
        self._at = place, incarnation
        self.is_gone = False  # its connections are
        self.answered = 0

    async def asks(self, outcome: Any = None, *, lost: bool = False, wait_s: float = LIMIT_S) -> bytes | None:
        answer = b"" if outcome is None else encode_outcome(outcome, lost=lost)
        return await self._pool.exchange(*self._at, self.answered, answer, wait_s, lambda: self.is_gone)

    async def works(self, outcome: Any = None) -> Work:
        """Bring an outcome, and take the next work."""
        work = decode_work(await self.asks(outcome) or b"")
        assert work is not None
        self.answered = work.number
        return work

    async def waits(self) -> asyncio.Task[bytes | None]:
        """Ask for work, of which there is none."""
        asking = asyncio.create_task(self.asks())
        await asyncio.sleep(0)
        return asking

    async def is_given_up(self, outcome: Any = None) -> bool:
        return await self.asks(outcome) == BEGIN_ANEW


def begun(pool: RewardPool, answer: str = "") -> GroupSession:
    return pool.begin(Prompt(index=0, prompt_id="", text="", token_ids=(1,), answer=answer))


def advance(session: GroupSession, body: bytes = b"body") -> asyncio.Task[Any]:
    return asyncio.create_task(session.advance([Arrival(0, 0, SampledCompletion(segments=((body, 0),)))]))


async def at_work(pool: RewardPool, worker: Played) -> asyncio.Task[Any]:
    """A new group, which the worker works on."""
    advancing = advance(begun(pool))
    await worker.works()
    return advancing


async def suspended(pool: RewardPool, worker: Played) -> tuple[GroupSession, asyncio.Task[Any]]:
    """A group that is suspended in the worker, and a second one that it works on."""
    session = begun(pool)
    advancing = advance(session)
    await worker.works()
    asking = asyncio.create_task(worker.works(REQUESTS))
    assert await advancing == REQUESTS
    working = advance(begun(pool))
    await asking
    return session, working


async def assert_lost(session: GroupSession, working: asyncio.Task[Any], error: type[ArealError]) -> None:
    with pytest.raises(error, match="gone with its machine"):
        await working
    with pytest.raises(SessionLostError, match="suspended"):
        await advance(session, b"more")


async def test_groups_go_on_where_they_were_suspended(pool: RewardPool) -> None:
    here, there = Played(pool), Played(pool, place=2)
    sessions = [begun(pool, answer) for answer in "xy"]
    advancing = [advance(session) for session in sessions]
    works = [await here.works(), await there.works()]
    assert [work.arrived.prompt.answer for work in works if work.arrived.prompt] == ["x", "y"]
    assert len(pool._remote) == 2
    asking = [asyncio.create_task(worker.works(REQUESTS)) for worker in (here, there)]
    assert await asyncio.gather(*advancing) == [REQUESTS, REQUESTS]
    going_on = [advance(session, b"more") for session in reversed(sessions)]
    assert [work.arrived.group for work in await asyncio.gather(*asking)] == [work.arrived.group for work in works]
    last = [asyncio.create_task(worker.asks(())) for worker in (here, there)]
    assert await asyncio.gather(*going_on) == [(), ()]
    await pool.close()
    assert await asyncio.gather(*last) == [BEGIN_ANEW] * 2


async def test_a_request_that_comes_twice_is_answered_twice_and_counts_once(pool: RewardPool) -> None:
    worker = Played(pool)
    advancing = advance(begun(pool))
    assert await worker.asks() == await worker.asks()
    await worker.works()
    assert await worker.asks(REQUESTS, wait_s=0.0) is None
    assert await advancing == REQUESTS
    second = advance(begun(pool))
    await asyncio.sleep(0)
    work = await worker.works(REQUESTS)  # the answer to the first one, once more
    assert (work.number, second.done()) == (2, False)
    assert await worker.asks((), wait_s=0.0) is None
    assert await second == ()


@pytest.mark.parametrize("waits", [False, True], ids=["suspended", "waits for its worker"])
async def test_a_group_that_is_given_up_is_named_with_the_next_work(pool: RewardPool, waits: bool) -> None:
    worker = Played(pool)
    session, working = await suspended(pool, worker)
    if waits:
        waiting = advance(session, b"more")
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    session.close()
    asking = asyncio.create_task(worker.works(()))
    assert await working == ()
    last = advance(begun(pool))
    assert (await asking).forgotten == [1]
    last.cancel()


@pytest.mark.parametrize("lost", [False, True])
async def test_an_error_that_costs_a_worker_its_process_loses_its_groups(pool: RewardPool, lost: bool) -> None:
    worker = Played(pool)
    session, failing = await suspended(pool, worker)
    going_on = advance(session, b"more")
    answer = asyncio.create_task(worker.asks(RewardTimeoutError("too long"), lost=lost))
    with pytest.raises(RewardTimeoutError, match="too long"):
        await failing
    if lost:
        with pytest.raises(SessionLostError, match="suspended"):
            await going_on
        assert await answer == BEGIN_ANEW
        assert len(pool._remote) == 0
    else:
        work = decode_work(await answer or b"")
        assert work is not None
        assert (work.number, work.arrived.prompt) == (3, None)
        going_on.cancel()


async def test_a_new_incarnation_loses_the_groups_of_the_one_before(pool: RewardPool) -> None:
    worker = Played(pool)
    session, working = await suspended(pool, worker)
    fresh = asyncio.create_task(Played(pool, incarnation="b").works())
    await assert_lost(session, working, RewardWorkerError)  # it may have been this group's doing
    again = advance(session)
    assert (await fresh).arrived.prompt is not None
    assert await worker.is_given_up(())
    again.cancel()


async def test_workers_that_leave_cost_no_group_a_try(pool: RewardPool) -> None:
    session, working = await suspended(pool, Played(pool, "ab"))
    waiting = await Played(pool, "b", place=2).waits()
    pool.leave("a")
    assert len(pool._remote) == 1
    await assert_lost(session, working, SessionLostError)
    waiting.cancel()


async def test_a_place_has_one_worker(pool: RewardPool) -> None:
    """The one that is there stays, as long as its connection is."""
    first, second = Played(pool, "a"), Played(pool, "b")
    waiting = await first.waits()
    with pytest.raises(ValueError, match=r"place: 1 is another reward worker's \(--first\)"):
        await second.asks()
    first.is_gone = True
    assert await second.asks(wait_s=0.0) is None
    assert await waiting == BEGIN_ANEW
    with pytest.raises(ValueError, match="place: must be at least 1, the first of other machines, got 0"):
        await Played(pool, place=0).asks()


async def test_work_that_a_broken_connection_took_is_sent_again(
    pool: RewardPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its worker asks once more, or is gone before it had the group."""
    monkeypatch.setattr(remote, "SILENT_S", 0.2)
    worker = Played(pool)
    for comes_back in (True, False):
        asking = await worker.waits()
        worker.is_gone = True
        working = advance(begun(pool))
        assert decode_work(await asking or b"")
        if comes_back:
            worker.is_gone = False
            assert (await worker.works()).number == 1
            assert await worker.asks(REQUESTS, wait_s=0.0) is None
            assert await working == REQUESTS
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(SessionLostError, match="gone with its machine"):
            await working


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "at work"])
async def test_a_silent_worker_is_missed(pool: RewardPool, busy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "SILENT_S", 0.2)
    monkeypatch.setattr(pool, "_timeout_s", 0.2)
    worker = Played(pool)
    if busy:
        with pytest.raises(RewardWorkerError, match="gone with its machine"):
            await (await at_work(pool, worker))
        assert await worker.is_given_up(())
    else:
        assert await worker.asks(wait_s=0.0) is None
        async with asyncio.timeout(LIMIT_S):
            while pool._remote:  # noqa: ASYNC110
                await asyncio.sleep(0.02)


PROMPT = Prompt(index=3, prompt_id="ab", text="½ + ½ =\n", token_ids=(5, 6), answer="1")
COMMON, OTHER = b'{"a":\n1}', b"\n\0"
ARRIVALS = [
    Arrival(0, 1, SampledCompletion(segments=((COMMON, 0), (OTHER, 2)), finish_reason="length")),
    Arrival(2, 0, SampledCompletion(segments=((COMMON, 1),))),
]


def scored(rewards: tuple[float | None, ...] = (0.1 + 0.2, None)) -> ScoredGroup:
    return ScoredGroup(
        payload=b"\n\n\0",
        summary=GroupSummary(
            lengths=(1, 2),
            rewards=rewards,
            tokens=3,
            min_version=0,
            max_version=2,
            outcomes={Outcome.CORRECT: 1, Outcome.INCORRECT: 1},
            truncated=(True, False),
            checksums=(1, 2, 2**32 - 1),
        ),
    )


@pytest.mark.parametrize("prompt", [PROMPT, None], ids=["the first ones", "later ones"])
def test_work(prompt: Prompt | None) -> None:
    arrived = Arrived(group=9, prompt=prompt, completions=ARRIVALS)
    message = encode_work(7, [1, 2], arrived)
    assert message.count(COMMON) == 1  # two completions have it in common
    work = decode_work(message)
    assert work is not None
    assert (work.number, work.forgotten, work.arrived) == (7, [1, 2], arrived)
    first, second = work.arrived.completions
    assert first.completion.segments[0][0] is second.completion.segments[0][0]


def test_errors_are_returned_and_those_that_cost_the_worker_are_raised() -> None:
    returned = decode_outcome(encode_outcome(GenerationError("no body")))
    assert (type(returned), str(returned)) == (GenerationError, "no body")
    with pytest.raises(RewardTimeoutError, match="too long"):
        decode_outcome(encode_outcome(RewardTimeoutError("too long"), lost=True))
    assert type(decode_outcome(encode_outcome(ConfigError("environment: none")))) is RewardError  # not another's
    for answer in (b"", b"{}x\n", b'{"scores": 1}\n', b'{"says": "\xff"}\n'):
        outcome = decode_outcome(answer)
        assert isinstance(outcome, RewardError)
        assert str(outcome).startswith("a reward worker's answer is none: ")


def test_numbers_of_numpys() -> None:
    """As environments have them, who take tokens from completions and means of scores."""
    tokens = cast(tuple[int, ...], tuple(np.array([3, 4], np.int32)))
    assert decode_outcome(encode_outcome((SampleRequest(token_ids=tokens, n=1, max_tokens=2),))) == (
        SampleRequest(token_ids=(3, 4), n=1, max_tokens=2),
    )
    rewards = (cast(float, np.float32(0.1)), float(np.mean([1.0, 0.0, 0.0])))
    outcome = decode_outcome(encode_outcome(scored(rewards=rewards)))
    assert isinstance(outcome, ScoredGroup)
    assert outcome.summary.rewards == rewards


@pytest.mark.parametrize("limit", [2**26, 10])
def test_an_outcome_that_can_not_be_sent_costs_its_group(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "ANSWER_BYTES", limit)
    given = scored(rewards=(cast(float, 1j), None)) if limit > 10 else scored()
    monkeypatch.setattr(messages, "encode_outcome", lambda outcome: str(outcome).encode())  # of the error that follows
    said = encode_outcome(given).decode()
    assert ("can't be sent: complex is neither" if limit > 10 else "bytes, more than the 10 of an answer") in said
