"""Time limits that count only the time in which this process could receive.

If the event loop was blocked or the process was stopped, its timers are overdue when it continues. Data that arrived
in time may still be unread. The process's own lag must not count as silence of its peer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_PARTS = 5  # a limit has so many parts; a part does not count if its timer fires late by a whole part


@asynccontextmanager
async def lag_tolerant_timeout(seconds: float | None) -> AsyncIterator[None]:
    """Like `asyncio.timeout(seconds)`, but ignores time in which the loop was blocked. None: no limit."""
    if seconds is None:
        yield
        return
    loop, part_s, left = asyncio.get_running_loop(), seconds / _PARTS, _PARTS

    def count_part(due_s: float) -> None:
        nonlocal left, timer
        left -= loop.time() - due_s < part_s
        if left:
            timer = loop.call_later(part_s, count_part, loop.time() + part_s)
        else:
            limit.reschedule(loop.time())

    async with asyncio.timeout(None) as limit:
        timer = loop.call_later(part_s, count_part, loop.time() + part_s)
        try:
            yield
        finally:
            timer.cancel()
