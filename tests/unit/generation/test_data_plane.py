"""A loop beside the one that asks: what comes in there is taken here, in order, and nothing once it is not wanted."""

import asyncio
import threading

import pytest

from areal_core.api.pending_completions import Received
from areal_core.errors import ServerLostError
from areal_core.generation.data_plane import DataPlane


@pytest.fixture
async def plane():
    plane = DataPlane()
    yield plane
    await plane.close()
    assert "data plane" not in {thread.name for thread in threading.enumerate()}


async def test_parts_are_taken_in_order_before_the_work_ends_or_fails(plane):
    taken = []

    async def work(take):
        for number in range(1000):
            take((number,), Received(b""))
            if number % 100 == 0:
                await asyncio.sleep(0)
        raise ServerLostError("gone")

    with pytest.raises(ServerLostError, match="gone"):
        await plane.run(work, lambda indices, _: taken.append((indices, threading.current_thread())))
    assert taken == [((number,), threading.main_thread()) for number in range(1000)]


async def test_a_failure_of_the_taker_ends_the_work(plane):
    ended = threading.Event()

    def refuse(*_):
        raise KeyError("no")

    async def work(take):
        try:
            take((0,), Received(b""))
            await asyncio.sleep(3600)
        finally:
            ended.set()

    with pytest.raises(KeyError, match="no"):
        await plane.run(work, refuse)
    assert await asyncio.to_thread(ended.wait, 10)


async def test_a_cancelled_call_takes_no_more_parts(plane):
    taken, begun, ended = [], threading.Event(), threading.Event()

    async def work(take):
        begun.set()
        try:
            await asyncio.sleep(3600)
        finally:
            take((0,), Received(b""))
            ended.set()

    call = asyncio.ensure_future(plane.run(work, lambda indices, _: taken.append(indices)))
    assert await asyncio.to_thread(begun.wait, 10)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await asyncio.to_thread(ended.wait, 10)
    await asyncio.sleep(0.01)
    assert taken == []  # it came after the cancellation


async def test_the_loop_that_asks_goes_on_while_much_comes_in():
    """It gets its turn every few takes of a millisecond each."""
    plane, turns, taken = DataPlane(), [0], []

    async def work(take):
        for number in range(300):
            take((number,), Received(b""))

    def slow(*_):
        taken.append(turns[0])
        until = asyncio.get_running_loop().time() + 0.001
        while asyncio.get_running_loop().time() < until:
            pass

    async def count():
        while True:
            turns[0] += 1
            await asyncio.sleep(0)

    counting = asyncio.ensure_future(count())
    await plane.run(work, slow)
    counting.cancel()
    await plane.close()
    assert max(taken.count(turn) for turn in set(taken)) <= 3
