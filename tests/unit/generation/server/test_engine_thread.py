"""The engine's thread outlives callers that go away, and a drain ends however its last completions do."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from areal_core.generation.engines.engine import EngineStats
from areal_core.generation.server.engine_thread import EngineThread


class Stepping:
    """An engine whose completions run until they are aborted; a step waits for leave to end."""

    waiting = 0
    admitting = True
    stats = EngineStats()

    def __init__(self) -> None:
        self.running = 4
        self.may_step = threading.Semaphore(0)

    def step(self) -> list[Any]:
        self.may_step.acquire(timeout=0.02)
        return []

    def clear_cache(self) -> None:
        pass


@pytest.fixture
async def thread():
    failures: list[BaseException] = []
    engine: Any = Stepping()
    started = EngineThread(engine, asyncio.get_running_loop(), deliver=lambda done: None, failed=failures.append)
    started.start()
    yield started
    started.stop()
    await asyncio.sleep(0)
    assert failures == []


def finish(engine: Any) -> None:
    engine.running = 0


async def test_a_caller_that_goes_away_ends_nothing(thread: EngineThread) -> None:
    calls: list[Callable[[], Any]] = [thread.load, lambda: thread.pause("wait", clear_cache=True)]
    for call in calls:
        task = asyncio.ensure_future(call())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    thread.tell(finish)
    assert (await asyncio.wait_for(thread.load(), 10)).running == 0


async def test_a_drain_ends_when_its_last_completions_are_aborted(thread: EngineThread) -> None:
    draining = asyncio.ensure_future(thread.pause("wait", clear_cache=True))
    await thread.load()  # commands are carried out in order: the thread drains now
    thread.tell(finish)
    await asyncio.wait_for(draining, 10)
    assert thread.is_paused
