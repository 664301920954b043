"""Limits that do not count the time in which this process could not listen."""

import asyncio
import contextlib
import socket
import time

import pytest

from areal_core.api.patience import patience
from tests.support.virtual import run_virtual


async def waited(seconds: float | None) -> float:
    """Until `patience` gives up, in time of the loop."""
    loop = asyncio.get_running_loop()
    start = loop.time()
    with pytest.raises(TimeoutError):
        async with patience(seconds):
            await asyncio.sleep(1000.0)
    return loop.time() - start


def test_a_loop_that_always_runs_waits_as_long_as_it_says() -> None:
    assert run_virtual(waited(10.0)) == pytest.approx(10.0)


def test_wait_without_a_limit_goes_on_and_a_cancelled_one_is_cancelled() -> None:
    async def main() -> None:
        async with patience(None):
            await asyncio.sleep(1e6)
        task = asyncio.create_task(waited(10.0))
        await asyncio.sleep(3.0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    run_virtual(main())


@pytest.mark.parametrize("before_s", [0.0, 0.15])
async def test_what_came_while_the_loop_was_blocked_is_read(before_s: float) -> None:
    ours, theirs = socket.socketpair()
    with contextlib.closing(ours), contextlib.closing(theirs):
        ours.setblocking(False)
        theirs.setblocking(False)
        loop = asyncio.get_running_loop()
        async with patience(0.2):
            receiving = asyncio.ensure_future(loop.sock_recv(ours, 1))
            await asyncio.sleep(before_s)
            theirs.send(b"x")
            time.sleep(0.4)  # noqa: ASYNC251 - the loop stands still
            assert await receiving == b"x"
