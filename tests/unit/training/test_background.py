"""Background jobs: in order, bounded, and no failure is lost."""

from __future__ import annotations

import pytest

from areal_core.training.background import BackgroundThread

PATIENCE_S = 20.0


def test_jobs_are_done_in_order_and_drain_waits_for_all() -> None:
    background, done = BackgroundThread("test", waiting=2), list[int]()
    for number in range(20):
        background.submit(lambda number=number: done.append(number))
    background.drain()
    assert done == list(range(20))


def test_a_failure_is_raised_by_every_later_call_and_nothing_more_is_done() -> None:
    background, done = BackgroundThread("test", waiting=2), list[int]()

    def fail() -> None:
        raise OSError("the disk is full")

    background.submit(fail)
    with pytest.raises(OSError, match="the disk is full"):
        background.drain()
    with pytest.raises(OSError, match="the disk is full"):
        background.submit(lambda: done.append(1))
    with pytest.raises(OSError, match="the disk is full"):
        background.check()
    assert not done
