"""Batches one step ahead, in order; what stops them is raised in the step."""

from __future__ import annotations

import queue
import threading
import time
from typing import Any

import pytest

from areal_core.errors import ProcessError, RunFinished
from areal_core.training.batching.feed import BatchFeed
from areal_core.types import BatchManifest
from tests.support.training import batch

PATIENCE_S = 20.0


class Controller:
    """Records which steps it is asked for; refuses those from `end` on."""

    def __init__(self, end: int = 100) -> None:
        self.asked: queue.Queue[int] = queue.Queue()
        self._end = end

    def batch(self, step: int) -> BatchManifest:
        self.asked.put(step)
        if step >= self._end:
            raise RunFinished("score")
        return BatchManifest(step=step, groups=())


def feed(controller: Any, *, last: int = 10, build: Any = None) -> BatchFeed:
    return BatchFeed(controller, build or (lambda manifest: batch(manifest.step)), first=3, last=last)


def following(batches: BatchFeed) -> int:
    step = batches.next()[0].step
    batches.ahead()
    return step


def fetched(controller: Controller) -> list[int]:
    """The steps that it has been asked for, at least one, and those of a while more."""
    steps = [controller.asked.get(timeout=PATIENCE_S)]
    time.sleep(0.2)
    return [*steps, *(controller.asked.get() for _ in range(controller.asked.qsize()))]


def test_the_next_batch_is_fetched_while_this_one_trains_and_none_beyond_the_last() -> None:
    controller = Controller()
    batches = feed(controller, last=4)
    assert fetched(controller) == [3]
    manifest, share = batches.next()
    assert (manifest.step, share.step) == (3, 3)
    assert controller.asked.empty()  # not before it is told to: it may be assembled anew
    batches.ahead()
    assert fetched(controller) == [4]  # nobody has asked for it yet
    assert following(batches) == 4
    with pytest.raises(queue.Empty):
        controller.asked.get(timeout=0.2)


def test_the_end_of_the_run_comes_after_the_batches_that_were_fixed_before() -> None:
    batches = feed(Controller(end=5))
    assert [following(batches) for _ in range(2)] == [3, 4]
    for _ in range(2):
        with pytest.raises(RunFinished, match="score"):
            batches.next()


def test_a_failure_elsewhere_ends_the_wait_for_a_batch() -> None:
    never = threading.Event()

    class Waiting(Controller):
        def batch(self, step: int) -> BatchManifest:
            never.wait(PATIENCE_S)
            return super().batch(step)

    def look() -> None:
        raise ProcessError("the version was not published")

    with pytest.raises(ProcessError, match="the version was not published"):
        feed(Waiting()).next(look)
    never.set()
