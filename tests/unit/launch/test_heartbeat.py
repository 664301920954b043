"""What a process says of itself, read from its file, and what is concluded from it."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from areal_core.config.groups import LaunchConfig
from areal_core.launch import heartbeat
from areal_core.launch.heartbeat import CheckTimer, Heartbeat, Standstill, Watchdog, kernel_state

STARTING = Heartbeat(pid=0, beats=0, turns=None, progress=0, doing="starting", waits_for=None)
Beat = Callable[[], Heartbeat]


@pytest.fixture
def beat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Beat:
    """The next record of a process that has said nothing yet."""
    monkeypatch.setattr(heartbeat, "_state", dataclasses.replace(STARTING))
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
    heartbeat.report("step 1: training")
    with heartbeat.waiting("the store", "a checkpoint"):
        heartbeat.report("a checkpoint", waits_for="the store")  # the same words are no progress
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
    heartbeat.watch_loop(asyncio.get_running_loop())
    assert [beat().turns for _ in range(3)] == [0, 0, 0]
    await asyncio.sleep(0)
    assert beat().turns == 3


def test_a_shorter_record_replaces_a_longer_one_and_half_a_record_is_none(beat: Beat, tmp_path: Path) -> None:
    heartbeat.report("x" * 150)
    assert beat().doing == "x" * 150
    heartbeat.report("x")
    assert beat().doing == "x"
    assert heartbeat.read(tmp_path / "none") is None
    for text in ("", '{"pid": 1, "bea', json.dumps({"pid": 1})):
        (tmp_path / "p").write_text(text)
        assert heartbeat.read(tmp_path / "p") is None


LAUNCH = LaunchConfig(liveness_timeout_s=6.0, stall_timeout_s=20.0)
BUSY = Heartbeat(pid=os.getpid(), beats=1, turns=None, progress=0, doing="step 3: training", waits_for=None)
WAITS = dataclasses.replace(BUSY, doing="idle", waits_for="work")


def put(folder: Path, name: str, said: Heartbeat) -> None:
    (folder / name).write_text(json.dumps(dataclasses.asdict(said)))


class Process:
    """A process that says what it is told to, a record for each look."""

    def __init__(self, folder: Path, said: Heartbeat) -> None:
        self.file = folder / "trainer-0"
        self.said = said
        self.watchdog = Watchdog(self.file, said.pid, LAUNCH)

    def looks(self, count: int, *, beats: int = 1, turns: int = 0, progress: int = 0) -> str | None:
        """What `count` looks, one a second, find in the end; by so much does it get on between two of them."""
        found = None
        for _ in range(count):
            its = self.said
            its = dataclasses.replace(its, beats=its.beats + beats, progress=its.progress + progress)
            self.said = its if its.turns is None else dataclasses.replace(its, turns=its.turns + turns)
            put(self.file.parent, self.file.name, self.said)
            found = self.watchdog.check(1.0)
        return found


def test_process_that_gets_on_or_waits_or_is_another_is_left_alone(tmp_path: Path) -> None:
    assert Process(tmp_path, BUSY).looks(100, progress=1) is None
    assert Process(tmp_path, WAITS).looks(100) is None
    process = Process(tmp_path, BUSY)
    process.watchdog = Watchdog(process.file, BUSY.pid + 1, LAUNCH)
    assert process.looks(100, beats=0) is None
    assert process.watchdog.last is None


def test_process_that_does_not_beat_or_get_on_is_found(tmp_path: Path) -> None:
    silent = Process(tmp_path, WAITS)
    assert silent.looks(7, beats=0) is None
    said = f"has sent no heartbeat for 6 s (launch.liveness_timeout_s): {kernel_state(os.getpid())}; "
    assert silent.looks(1, beats=0) == f"{said}idle, waiting for work"
    busy = Process(tmp_path, BUSY)
    assert busy.looks(21) is None
    found = busy.looks(1)
    assert found is not None
    assert found.startswith("has made no progress for 20 s (launch.stall_timeout_s): ")
    assert found.endswith("; step 3: training for 21 s")
    assert busy.looks(1, progress=1) is None
    turning = Process(tmp_path, dataclasses.replace(WAITS, turns=0))  # an event loop has to turn even as it waits
    assert turning.looks(100, turns=1) is None
    assert "has had a blocked event loop for 20 s" in str(turning.looks(21))


def test_a_clock_that_jumps_makes_nobody_silent() -> None:
    """As that of a launcher that was stopped for an hour."""
    now = [0.0]
    timer = CheckTimer(lambda: now[0])
    now[0] = 0.9
    assert timer.elapsed() == 0.0
    now[0] = 1.0
    assert timer.elapsed() == 1.0
    now[0] = 3601.0
    assert timer.elapsed() == 3.0


def told(folder: Path, looks: int, *, beats: bool = True) -> str | None:
    """What so many looks at the run find, one a second, in which its processes say nothing new."""
    standstill, found = Standstill(folder, LAUNCH), None
    for _ in range(looks):
        for file in folder.iterdir():
            said = heartbeat.read(file)
            assert said is not None
            put(folder, file.name, dataclasses.replace(said, beats=said.beats + beats))
        found = standstill.check(1.0)
    return found


def test_a_run_in_which_all_wait_for_each_other_stands_still(tmp_path: Path) -> None:
    put(tmp_path, "trainer-0", dataclasses.replace(BUSY, doing="step 4: no batch yet", waits_for="controller-0"))
    put(tmp_path, "controller-0", dataclasses.replace(BUSY, doing="version 3", waits_for="generation"))
    put(tmp_path, "generation-0", WAITS)
    put(tmp_path, "tracker-0", BUSY)  # a spectator
    assert told(tmp_path, 21) is None
    assert told(tmp_path, 22) == (
        "no process has made progress for 20 s (launch.stall_timeout_s): "
        "controller-0 version 3, waiting for generation; "
        "generation-0 idle, waiting for work; trainer-0 step 4: no batch yet, waiting for controller-0"
    )


def test_look_between_two_beats_says_nothing(tmp_path: Path) -> None:
    standstill = Standstill(tmp_path, LAUNCH)
    for beats in range(12):
        put(tmp_path, "controller-0", dataclasses.replace(WAITS, beats=beats))
        told = [standstill.check(1.0) for _ in range(2)]
    assert told == [None, None]
    for beats in range(12, 22):
        put(tmp_path, "controller-0", dataclasses.replace(WAITS, beats=beats))
        told = [standstill.check(1.0) for _ in range(2)]
    assert told[0] is not None


def test_run_does_not_stand_still_while_one_is_busy_or_waits_for_the_store_or_is_silent(tmp_path: Path) -> None:
    put(tmp_path, "controller-0", WAITS)
    assert told(tmp_path, 100, beats=False) is None  # which its own watchdog will find
    for waits_for in (None, heartbeat.STORE):
        put(tmp_path, "trainer-0", dataclasses.replace(BUSY, waits_for=waits_for))
        assert told(tmp_path, 100) is None
