"""What a process says of itself, read from its file."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from areal_core.launch import heartbeat
from areal_core.launch.heartbeat import Heartbeat

STARTING = Heartbeat(pid=0, beats=0, turns=None, progress=0, doing="starting", waits_for=None)
Beat = Callable[[], Heartbeat]


@pytest.fixture
def beat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Beat:
    """The next record of a process that has said nothing yet."""
    monkeypatch.setattr(heartbeat, "_said", dataclasses.replace(STARTING))
    monkeypatch.setattr(heartbeat, "_loop", None)
    numbers = itertools.count(1)

    def beat() -> Heartbeat:
        heartbeat._beat(tmp_path / "p", next(numbers))
        found = heartbeat.read(tmp_path / "p")
        assert found is not None
        return found

    return beat


def test_a_process_says_what_it_does_and_whom_it_waits_for(beat: Beat) -> None:
    assert beat() == dataclasses.replace(STARTING, pid=os.getpid(), beats=1)
    heartbeat.say("step 1: training")
    with heartbeat.waiting("the store", "a checkpoint"):
        heartbeat.say("a checkpoint", waits_for="the store")  # the same words are no progress
        waits = beat()
    assert (waits.beats, waits.doing, waits.waits_for, waits.progress) == (2, "a checkpoint", "the store", 2)
    heartbeat.progressed()
    later = beat()
    assert (later.doing, later.waits_for, later.progress) == ("step 1: training", None, 4)
    heartbeat.ready()  # of one that has said something
    assert beat().doing == "step 1: training"


def test_one_that_is_ready_and_says_nothing_owes_no_progress(beat: Beat) -> None:
    heartbeat.ready()
    assert beat().waits_for == heartbeat.WORK


async def test_an_event_loop_that_stands_still_turns_no_more_while_the_process_beats(beat: Beat) -> None:
    heartbeat.follow(asyncio.get_running_loop())
    assert [beat().turns for _ in range(3)] == [0, 0, 0]
    await asyncio.sleep(0)
    assert beat().turns == 3


def test_a_shorter_record_replaces_a_longer_one_and_half_a_record_is_none(beat: Beat, tmp_path: Path) -> None:
    heartbeat.say("x" * 150)
    assert beat().doing == "x" * 150
    heartbeat.say("x")
    assert beat().doing == "x"
    assert heartbeat.read(tmp_path / "none") is None
    for text in ("", '{"pid": 1, "bea', json.dumps({"pid": 1})):
        (tmp_path / "p").write_text(text)
        assert heartbeat.read(tmp_path / "p") is None
