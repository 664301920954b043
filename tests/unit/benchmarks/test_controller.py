"""What one controller takes, at sizes that take a second; the servers are a process of their own."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks import controller


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller, "TOKENS", 64)
    monkeypatch.setattr(controller, "BATCH", 64)
    monkeypatch.setattr(controller, "SERVERS", 2)


def test_steps_in_process_are_counted_and_memory_is_looked_at_twice() -> None:
    found = asyncio.run(controller.in_process(20))
    assert found["trajectories_per_s"] > 0
    assert set(found["memory_mb"]) == {2, 20}
    assert min(found["memory_mb"].values()) > 0


def test_an_update_interrupts_all_that_run_and_they_run_again() -> None:
    found = asyncio.run(controller.update(64))
    assert 0 < found["worst_loop_stall_ms"] < 1000 * found["update_8192_s"]
