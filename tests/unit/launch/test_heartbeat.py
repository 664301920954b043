"""What a process says of itself, read from its file."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from areal_core.launch import heartbeat
from areal_core.launch.heartbeat import Heartbeat

PATIENCE_S = 30.0
SAYS = """
import asyncio, sys, time
from pathlib import Path
from areal_core.launch import heartbeat
heartbeat._BEAT_S = 0.05
heartbeat.start(Path(sys.argv[1]))
def line():
    return sys.stdin.readline().strip()
"""


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Starts a process with a heartbeat in `tmp_path / "p"`, which goes on at every line that it is sent."""
    started: list[subprocess.Popen[str]] = []

    def start(code: str) -> subprocess.Popen[str]:
        argv = [sys.executable, "-c", SAYS + code, str(tmp_path / "p")]
        started.append(subprocess.Popen(argv, stdin=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for each in started:
        each.kill()
        each.communicate()


def until(file: Path, condition: Callable[[Heartbeat], bool]) -> Heartbeat:
    deadline = time.monotonic() + PATIENCE_S
    while (said := heartbeat.read(file)) is None or not condition(said):
        assert time.monotonic() < deadline, said
        time.sleep(0.01)
    return said


def go_on(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def test_a_process_says_what_it_does_and_whom_it_waits_for(
    tmp_path: Path, process: Callable[[str], subprocess.Popen[str]]
) -> None:
    its = process("""
line()
heartbeat.say("step 1: training")
with heartbeat.waiting("the store", "a checkpoint"):
    heartbeat.say("a checkpoint", waits_for="the store")  # the same words are no progress
    line()
heartbeat.progressed()
line()
""")

    def said(progress: int) -> Heartbeat:
        return until(tmp_path / "p", lambda said: said.progress >= progress)

    first = said(0)
    assert (first.pid, first.turns) == (its.pid, None)
    assert (first.doing, first.waits_for, first.progress) == ("starting", None, 0)
    go_on(its)
    second = said(2)
    assert (second.doing, second.waits_for, second.progress) == ("a checkpoint", "the store", 2)
    go_on(its)
    third = said(4)
    assert (third.doing, third.waits_for, third.progress) == ("step 1: training", None, 4)
    assert third.beats > second.beats > first.beats


def test_one_that_is_ready_and_says_nothing_owes_no_progress(
    tmp_path: Path, process: Callable[[str], subprocess.Popen[str]]
) -> None:
    process("heartbeat.ready(); line()")
    assert until(tmp_path / "p", lambda said: said.doing != "starting").waits_for == heartbeat.WORK


def test_an_event_loop_that_stands_still_turns_no_more_while_the_process_beats(
    tmp_path: Path, process: Callable[[str], subprocess.Popen[str]]
) -> None:
    its = process("""
async def main():
    heartbeat.follow(asyncio.get_running_loop())
    await asyncio.to_thread(line)
    line()
asyncio.run(main())
""")
    until(tmp_path / "p", lambda said: (said.turns or 0) > 3)
    go_on(its)
    deadline = time.monotonic() + PATIENCE_S
    before = after = until(tmp_path / "p", lambda said: True)
    while after.beats < before.beats + 5:
        assert time.monotonic() < deadline
        after = until(tmp_path / "p", lambda said: True)
        if after.turns != before.turns:  # one was under way
            before = after


def test_half_written_file_is_no_record(tmp_path: Path) -> None:
    assert heartbeat.read(tmp_path / "none") is None
    for text in ("", '{"pid": 1, "bea', json.dumps({"pid": 1})):
        (tmp_path / "p").write_text(text)
        assert heartbeat.read(tmp_path / "p") is None
