"""Reward workers of other machines, played by the tests, in the pool of a controller whose own worker is busy."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import pytest

from areal_core.api.wire import Arrival, SampledCompletion
from areal_core.errors import ArealError, RewardError, RewardTimeoutError, RewardWorkerError, SessionLostError
from areal_core.rewards import remote
from areal_core.rewards.messages import BEGIN_ANEW, Work, decode_work, encode_outcome
from areal_core.rewards.pool import GroupSession, RewardPool
from areal_core.types import Prompt, SampleRequest

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

    async def works(self, outcome: Any = None, *, lost: bool = False) -> Work:
        """Bring an outcome, and take the next work."""
        message = await self.asks(outcome, lost=lost)
        assert message is not None
        work = decode_work(message)
        assert work is not None
        self.answered = work.number
        return work

    async def is_given_up(self, outcome: Any = None, *, lost: bool = False) -> bool:
        return await self.asks(outcome, lost=lost) == BEGIN_ANEW


def begun(pool: RewardPool, answer: str = "") -> GroupSession:
    return pool.begin(Prompt(index=0, prompt_id="", text="", token_ids=(1,), answer=answer))


def arrived(body: bytes = b"body") -> list[Arrival]:
    return [Arrival(0, 0, SampledCompletion(segments=((body, 0),)))]


async def suspended(pool: RewardPool, worker: Played) -> tuple[GroupSession, asyncio.Task[Any]]:
    """A group that is suspended in the worker, which asks for more."""
    session = begun(pool)
    advancing = asyncio.create_task(session.advance(arrived()))
    await worker.works()
    asking = asyncio.create_task(worker.asks(REQUESTS))
    assert await advancing == REQUESTS
    return session, asking


async def test_groups_are_worked_on_and_go_on_where_they_were_suspended(pool: RewardPool) -> None:
    here, there = Played(pool), Played(pool, place=2)
    sessions = [begun(pool, answer) for answer in "xy"]
    advancing = [asyncio.create_task(session.advance(arrived())) for session in sessions]
    works = [await here.works(), await there.works()]
    assert [work.arrived.prompt.answer for work in works if work.arrived.prompt] == ["x", "y"]
    assert len(pool._remote) == 2
    asking = [asyncio.create_task(worker.works(REQUESTS)) for worker in (here, there)]
    assert await asyncio.gather(*advancing) == [REQUESTS, REQUESTS]
    going_on = [asyncio.create_task(session.advance(arrived(b"more"))) for session in reversed(sessions)]
    assert [work.arrived.group for work in await asyncio.gather(*asking)] == [work.arrived.group for work in works]
    last = [asyncio.create_task(worker.asks(())) for worker in (here, there)]
    assert await asyncio.gather(*going_on) == [(), ()]
    await pool.close()
    assert await asyncio.gather(*last) == [BEGIN_ANEW] * 2


async def test_workers_take_turns(pool: RewardPool) -> None:
    """The one that has been idle for longest is next."""
    workers = [Played(pool, place=place) for place in (1, 2, 3)]
    asking = [asyncio.create_task(worker.works()) for worker in workers]
    await asyncio.sleep(0)
    order: list[int] = []
    for turn in (0, 1, 2, 0, 1):
        advancing = asyncio.create_task(begun(pool).advance(arrived()))
        done, _ = await asyncio.wait(asking, timeout=LIMIT_S, return_when=asyncio.FIRST_COMPLETED)
        order += [asking.index(one) for one in done]
        asking[turn] = asyncio.create_task(workers[turn].works(()))
        assert await advancing == ()
    assert order == [0, 1, 2, 0, 1]
    for one in asking:
        one.cancel()


async def test_no_work_for_a_while(pool: RewardPool) -> None:
    assert await Played(pool).asks(wait_s=0.0) is None


async def test_a_request_that_comes_twice_is_answered_twice_and_counts_once(pool: RewardPool) -> None:
    worker = Played(pool)
    advancing = asyncio.create_task(begun(pool).advance(arrived()))
    assert await worker.asks() == await worker.asks()
    await worker.works()
    assert await worker.asks(REQUESTS, wait_s=0.0) is None
    assert await advancing == REQUESTS
    second = asyncio.create_task(begun(pool).advance(arrived()))
    await asyncio.sleep(0)
    work = await worker.works(REQUESTS)  # the answer to the first one, once more
    assert (work.number, second.done()) == (2, False)
    assert await worker.asks((), wait_s=0.0) is None
    assert await second == ()


async def test_a_group_that_is_given_up_is_named_with_the_next_work(pool: RewardPool) -> None:
    worker = Played(pool)
    session, asking = await suspended(pool, worker)
    session.close()
    advancing = asyncio.create_task(begun(pool).advance(arrived()))
    message = await asking
    work = decode_work(message or b"")
    assert work is not None
    assert (work.forgotten, work.number) == ([1], 2)
    advancing.cancel()


@pytest.mark.parametrize("lost", [False, True])
async def test_an_error(pool: RewardPool, lost: bool) -> None:
    """One that has cost the worker its process loses what is suspended there."""
    worker = Played(pool)
    session, asking = await suspended(pool, worker)
    failing = asyncio.create_task(begun(pool).advance(arrived()))
    message = await asking
    assert message is not None
    worker.answered = 2
    going_on = asyncio.create_task(session.advance(arrived(b"more")))
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


async def test_a_new_incarnation_loses_what_the_one_before_had(pool: RewardPool) -> None:
    """Its process has died, or its machine: what it worked on and what was suspended there begin again."""
    worker = Played(pool)
    session, asking = await suspended(pool, worker)
    working = asyncio.create_task(begun(pool).advance(arrived()))
    assert decode_work(await asking or b"")
    fresh = asyncio.create_task(Played(pool, incarnation="b").works())
    with pytest.raises(RewardWorkerError, match="gone with its machine"):  # it may have been this group's doing
        await working
    with pytest.raises(SessionLostError, match="suspended"):
        await session.advance(arrived(b"more"))
    again = asyncio.create_task(session.advance(arrived()))
    work = await fresh
    assert work.arrived.prompt is not None
    assert await worker.is_given_up(())
    again.cancel()


async def test_a_worker_that_an_earlier_controller_knew_begins_anew(pool: RewardPool) -> None:
    worker = Played(pool)
    worker.answered = 4
    assert await worker.is_given_up(REQUESTS)
    assert len(pool._remote) == 0


async def test_workers_that_leave_cost_no_group_a_try(pool: RewardPool) -> None:
    leaves, stays = Played(pool, "ab"), Played(pool, "b", place=2)
    session, asking = await suspended(pool, leaves)
    working = asyncio.create_task(begun(pool).advance(arrived()))
    assert decode_work(await asking or b"")
    waiting = asyncio.create_task(stays.asks())
    await asyncio.sleep(0)
    pool.leave("a")
    assert len(pool._remote) == 1
    with pytest.raises(SessionLostError, match="gone with its machine"):
        await working
    with pytest.raises(SessionLostError, match="suspended"):
        await session.advance(arrived(b"more"))
    waiting.cancel()


async def test_two_workers_in_one_place(pool: RewardPool) -> None:
    """The one that is there stays, as long as its connection is."""
    first, second = Played(pool, "a"), Played(pool, "b")
    waiting = asyncio.create_task(first.asks())
    await asyncio.sleep(0)
    with pytest.raises(ValueError, match=r"place: 1 is another reward worker's \(--first\)"):
        await second.asks()
    first.is_gone = True
    assert await second.asks(wait_s=0.0) is None
    assert await waiting == BEGIN_ANEW


async def test_work_that_a_broken_connection_took_is_not_taken(
    pool: RewardPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its worker asks once more, or is gone before it had the group."""
    monkeypatch.setattr(remote, "SILENT_S", 0.2)
    worker = Played(pool)
    asking = asyncio.create_task(worker.asks())
    await asyncio.sleep(0)
    worker.is_gone = True
    working = asyncio.create_task(begun(pool).advance(arrived()))
    assert decode_work(await asking or b"")
    worker.is_gone = False
    work = await worker.works()
    assert work.number == 1
    assert await worker.asks(REQUESTS, wait_s=0.0) is None
    assert await working == REQUESTS
    asking = asyncio.create_task(worker.asks())
    await asyncio.sleep(0)
    worker.is_gone = True
    working = asyncio.create_task(begun(pool).advance(arrived()))
    assert decode_work(await asking or b"")
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(SessionLostError, match="gone with its machine"):
            await working


async def test_a_group_that_waits_for_its_worker_and_is_given_up_leaves_it(pool: RewardPool) -> None:
    worker = Played(pool)
    session, asking = await suspended(pool, worker)
    working = asyncio.create_task(begun(pool).advance(arrived()))
    assert decode_work(await asking or b"")
    worker.answered = 2
    waiting = asyncio.create_task(session.advance(arrived(b"more")))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    session.close()
    asking = asyncio.create_task(worker.works(()))
    assert await working == ()
    last = asyncio.create_task(begun(pool).advance(arrived()))
    assert (await asking).forgotten == [1]
    last.cancel()


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "at work"])
async def test_a_silent_worker_is_missed(pool: RewardPool, busy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "SILENT_S", 0.2)
    monkeypatch.setattr(pool, "_timeout_s", 0.2)
    worker = Played(pool)
    if busy:
        working = asyncio.create_task(begun(pool).advance(arrived()))
        await worker.works()
        with pytest.raises(RewardWorkerError, match="gone with its machine"):
            await working
        assert await worker.is_given_up(())
    else:
        assert await worker.asks(wait_s=0.0) is None
        async with asyncio.timeout(LIMIT_S):
            while pool._remote:  # noqa: ASYNC110
                await asyncio.sleep(0.02)


async def test_one_that_asks_again_and_again_is_not_missed(pool: RewardPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "SILENT_S", 0.5)
    worker = Played(pool)
    session, asking = await suspended(pool, worker)
    asking.cancel()
    worker.answered = 1
    for _ in range(15):
        assert await worker.asks(wait_s=0.1) is None
    going_on = asyncio.create_task(session.advance(arrived(b"more")))
    assert (await worker.works()).arrived.group == 1  # the same incarnation
    going_on.cancel()


async def test_a_group_that_is_no_longer_waited_for_costs_its_worker_an_incarnation(pool: RewardPool) -> None:
    worker = Played(pool)
    working = asyncio.create_task(begun(pool).advance(arrived()))
    await worker.works()
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
    assert await worker.is_given_up(())


async def test_places_of_this_machines_workers_are_not_for_others(pool: RewardPool) -> None:
    with pytest.raises(ValueError, match="place: must be at least 1, the first of other machines, got 0"):
        await Played(pool, place=0).asks()


async def test_the_end_reaches_all_that_wait(pool: RewardPool) -> None:
    worker = Played(pool)
    working = asyncio.create_task(begun(pool).advance(arrived()))
    await worker.works()
    waiting = asyncio.create_task(begun(pool).advance(arrived()))
    await asyncio.sleep(0)
    await pool.close()
    for task in (working, waiting):
        with pytest.raises(RewardError):
            await task
    assert await worker.is_given_up()
    with pytest.raises(ArealError):
        await begun(pool).advance(arrived())
