"""Time limits that only count time in which this process could listen.

A process whose event loop was blocked, or that was stopped, finds its timers overdue when it goes on, and beside them
unread what came in time. Its own lag is no proof of another's silence.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_LOOKS = 5  # a limit is counted in so many parts; one that ends late by as much again is not counted


@asynccontextmanager
async def patience(seconds: float | None) -> AsyncIterator[None]:
    """As `asyncio.timeout(seconds)`, TimeoutError included, on a loop that always runs; None: without a limit."""
    if seconds is None:
        yield
        return
    loop, part_s, left = asyncio.get_running_loop(), seconds / _LOOKS, _LOOKS

    def look(due_s: float) -> None:
        nonlocal left, timer
        left -= loop.time() - due_s < part_s
        if left:
            timer = loop.call_later(part_s, look, loop.time() + part_s)
        else:
            limit.reschedule(loop.time())

    async with asyncio.timeout(None) as limit:
        timer = loop.call_later(part_s, look, loop.time() + part_s)
        try:
            yield
        finally:
            timer.cancel()
