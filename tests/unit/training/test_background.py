"""Work beside the step: in order, bounded, and no failure is lost."""

from __future__ import annotations

import threading

import pytest

from areal_core.training.background import BackgroundThread

PATIENCE_S = 20.0


def test_jobs_are_done_in_order_and_drain_waits_for_all() -> None:
    aside, done = BackgroundThread("test", waiting=2), list[int]()
    for number in range(20):
        aside.submit(lambda number=number: done.append(number))
    aside.drain()
    assert done == list(range(20))


def test_who_hands_in_more_than_may_wait_waits_too() -> None:
    aside, go, in_queue = BackgroundThread("test", waiting=1), threading.Event(), threading.Event()
    aside.submit(lambda: go.wait(PATIENCE_S) and None)
    aside.submit(lambda: None)  # waits beside the one that runs

    def third() -> None:
        aside.submit(lambda: None)
        in_queue.set()

    thread = threading.Thread(target=third)
    thread.start()
    assert not in_queue.wait(0.2)
    go.set()
    assert in_queue.wait(PATIENCE_S)
    thread.join()
    aside.drain()


def test_a_failure_is_raised_by_every_later_call_and_nothing_more_is_done() -> None:
    aside, done = BackgroundThread("test", waiting=2), list[int]()

    def fail() -> None:
        raise OSError("the disk is full")

    aside.submit(fail)
    with pytest.raises(OSError, match="the disk is full"):
        aside.drain()
    with pytest.raises(OSError, match="the disk is full"):
        aside.submit(lambda: done.append(1))
    with pytest.raises(OSError, match="the disk is full"):
        aside.check()
    assert not done
