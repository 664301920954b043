"""Faults at named points: every point is there, and each kind of fault strikes once, where it should."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from areal_core.rewards.worker import WorkerProcess
from tests.faults.points import POINTS, REWARD, Point, environment, is_wrappable

_PROGRAM = """
import asyncio
from struck import Thing, called

async def main():
    for number in range(3):
        called(number)
        await Thing().work(number)
        print("worked", number, flush=True)

asyncio.run(main())
"""
_STRUCK = """
def called(number): print("called", number, flush=True)

class Thing:
    async def work(self, number): print("in work", number, flush=True)
"""


def test_every_point_has_a_name_and_a_function_of_its_own() -> None:
    assert [point.name for point in POINTS if not is_wrappable(point.resolve())] == []
    assert len({point.name for point in POINTS}) == len(POINTS)


def test_reward_workers_are_known_by_their_command_line() -> None:
    worker = WorkerProcess(str, 0, None)
    try:
        command = " ".join(psutil.Process(worker.process.pid).cmdline())
    finally:
        worker.kill()
    assert re.search(REWARD, command)


def struck(tmp_path: Path, target: str, when: str, action: str = "kill", **fields: Any) -> tuple[int, str | None]:
    """The exit status of a program, and the last line that it printed."""
    (tmp_path / "struck.py").write_text(_STRUCK)
    point = Point(**{"name": "p", "process": "-c", "target": f"struck:{target}", "when": when, **fields})
    process = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        cwd=tmp_path,
        env={**os.environ, **environment([point.fault(action, tmp_path)], str(tmp_path))},
        capture_output=True,
        text=True,
    )
    return process.returncode, (process.stdout.splitlines() or [None])[-1]


@pytest.mark.parametrize(
    ("target", "when", "fields", "last"),
    [
        ("called", "enter", {}, None),
        ("called", "enter", {"nth": 2}, "worked 0"),
        ("called", "enter", {"where": r"\(2,\)"}, "worked 1"),
        ("Thing.work", "exit", {"nth": 3}, "in work 2"),
    ],
)
def test_process_is_killed_at_its_point_once(
    tmp_path: Path, target: str, when: str, fields: dict[str, Any], last: str | None
) -> None:
    assert struck(tmp_path, target, when, process="another program", **fields) == (0, "worked 2")
    assert struck(tmp_path, target, when, **fields) == (-signal.SIGKILL, last)
    assert struck(tmp_path, target, when, **fields) == (0, "worked 2")


@pytest.mark.parametrize(("action", "status"), [("exit", 1), ("enospc", 1), ("delay:0.01", 0)])
def test_other_actions_strike(tmp_path: Path, action: str, status: int) -> None:
    assert struck(tmp_path, "called", "exit", action)[0] == status
