"""Jobs, batches, versions and checkpoints in the background: in order, bounded, and no failure is lost."""

import dataclasses
import queue
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_core.errors import ProcessError, RunFinished
from areal_core.run.prepare import prepare
from areal_core.storage import checkpoint
from areal_core.storage.objects import Storage
from areal_core.storage.rundir import RunDir
from areal_core.training import publisher as module
from areal_core.training.background import BatchFeed
from areal_core.training.engines.engine import EngineState
from areal_core.training.publisher import Publisher
from areal_core.types import BatchManifest, PolicyVersion
from tests.support.runs import tiny
from tests.support.training import batch

PATIENCE_S = 20.0


class Batches:
    """Records which steps it is asked for; refuses those from `end` on."""

    def __init__(self, end: int = 100) -> None:
        self.asked: queue.Queue[int] = queue.Queue()
        self._end = end

    def batch(self, step: int) -> BatchManifest:
        self.asked.put(step)
        if step >= self._end:
            raise RunFinished("score")
        return BatchManifest(step=step, groups=())


def feed(controller: Any, *, last: int = 10) -> BatchFeed:
    return BatchFeed(controller, lambda manifest: batch(manifest.step), first=3, last=last)


def following(batches: BatchFeed) -> int:
    step = batches.next()[0].step
    batches.ahead()
    return step


def fetched(controller: Batches) -> list[int]:
    """The steps that it has been asked for, at least one, and those of a while more."""
    steps = [controller.asked.get(timeout=PATIENCE_S)]
    time.sleep(0.2)
    return [*steps, *(controller.asked.get() for _ in range(controller.asked.qsize()))]


def test_the_next_batch_is_fetched_while_this_one_trains_and_none_beyond_the_last() -> None:
    controller = Batches()
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
    batches = feed(Batches(end=5))
    assert [following(batches) for _ in range(2)] == [3, 4]
    for _ in range(2):
        with pytest.raises(RunFinished, match="score"):
            batches.next()


def test_a_failure_elsewhere_ends_the_wait_for_a_batch() -> None:
    never = threading.Event()

    class Waiting(Batches):
        def batch(self, step: int) -> BatchManifest:
            never.wait(PATIENCE_S)
            return super().batch(step)

    def look() -> None:
        raise ProcessError("the version was not published")

    with pytest.raises(ProcessError, match="the version was not published"):
        feed(Waiting()).next(look)
    never.set()


TENSORS = {"w": np.arange(4, dtype=np.float32)}
STATE = EngineState(arrays={"weight/w": TENSORS["w"]}, scalars={"updates": 2})


class Controller:
    """What the publisher asks of it, in order. `gate` holds announcements up."""

    def __init__(self, storage: Storage) -> None:
        self.calls: list[tuple[str, int]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.refuses = False
        self.storage = storage

    def announce(self, version: PolicyVersion) -> list[int]:
        assert self.gate.wait(PATIENCE_S)
        if self.refuses:
            raise ProcessError("controller: POST /versions answered 500: the disk is full")
        self.calls.append(("announce", version.version))
        return []

    def snapshot(self, step: int) -> dict[str, Any]:
        self.calls.append(("snapshot", step))
        self.storage.child(checkpoint.folder_name(step, 0)).put_bytes("ledger-a.sqlite", b"ledger")
        self.storage.put_bytes("payloads/a.bin", b"a")
        return {
            "files": {"ledger-a.sqlite": {"bytes": 6, "sha256": "0" * 64, "crc32": [0]}},
            "shared": {"payloads/a.bin": {"bytes": 1, "sha256": "0" * 64, "crc32": [0]}},
        }

    def report_checkpoint(self, step: int) -> None:
        self.calls.append(("committed", step))

    def metrics(self, rows: list[Any]) -> None:
        self.calls += [(row.key, row.step) for row in rows]

    def document(self, kind: str, step: int, data: dict[str, Any]) -> None:
        self.calls.append((kind, step))


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Publisher, Controller]:
    config = tiny(tmp_path)
    run = prepare(config, run_id="r")
    RunDir.create(config, dataclasses.replace(run.info(), prompts={"task.path": "1"}))
    storage = Storage.open(run.info().checkpoint_url)
    controller = Controller(storage)
    monkeypatch.setattr(module, "ControllerClient", lambda run: controller)
    return Publisher(run, config, storage), controller


def test_a_checkpoint_covers_the_report_of_its_step(made: tuple[Publisher, Controller]) -> None:
    publisher, controller = made
    controller.gate.clear()
    publisher.publish(1, TENSORS)
    publisher.checkpoint(1, STATE)
    threading.Event().wait(0.5)
    assert controller.calls == []
    controller.gate.set()
    threading.Event().wait(0.5)
    publisher.report(1, {"loss/policy": 0.5}, Counter({0: 7}))
    publisher.drain()
    names = [name for name, _ in controller.calls]
    assert names == ["announce", "time/publish_s", "loss/policy", "staleness_histogram", "snapshot", "committed"]
    committed = checkpoint.newest(controller.storage)
    assert committed is not None
    assert committed.extra[checkpoint.PROMPTS] == {"task.path": "1"}  # which another machine compares with its own


def test_a_checkpoint_that_is_written_slowly_does_not_wait_for_the_step_after(
    made: tuple[Publisher, Controller], monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher, controller = made
    written, write = threading.Event(), module.write_tensors

    def write_late(path: Path, arrays: Any) -> None:
        assert written.wait(PATIENCE_S)
        write(path, arrays)

    monkeypatch.setattr(module, "write_tensors", write_late)
    publisher.publish(1, TENSORS)
    publisher.checkpoint(1, STATE)
    publisher.report(1, {}, Counter({0: 7}))
    publisher._publishing.drain()
    controller.gate.clear()
    publisher.publish(2, TENSORS)
    written.set()
    assert publisher.make_room(60.0)
    assert ("committed", 1) in controller.calls
    controller.gate.set()
    publisher.drain()


def test_a_version_that_can_not_be_published_ends_everything_that_waits(made: tuple[Publisher, Controller]) -> None:
    publisher, controller = made
    controller.refuses = True
    publisher.publish(1, TENSORS)
    publisher.checkpoint(1, STATE)
    with pytest.raises(ProcessError, match="the disk is full"):
        publisher.drain()
    for call in (publisher.check, lambda: publisher.publish(2, TENSORS), lambda: publisher.make_room(60.0)):
        with pytest.raises(ProcessError, match="the disk is full"):
            call()
    assert controller.calls == []
