"""Faults at named points: every point is there, and each kind of fault strikes once, where it should."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.faults.points import POINTS, Point, environment, is_wrappable


@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.name)
def test_a_point_is_a_function(point: Point) -> None:
    assert is_wrappable(point.resolve())


def test_names_are_used_once() -> None:
    assert len({point.name for point in POINTS}) == len(POINTS)


_PROGRAM = """
import asyncio
from pathlib import Path
from struck import Thing, called

async def main():
    for number in range(3):
        called(number)
        print("called", number, flush=True)
        await Thing().work(number)
        print("worked", number, flush=True)

asyncio.run(main())
"""
_STRUCK = """
import time

def called(number): print("in called", number, flush=True)

class Thing:
    async def work(self, number): print("in work", number, flush=True)
"""


def struck(tmp_path: Path, *faults: dict[str, Any]) -> tuple[int, list[str]]:
    """The end of a program, and what it had printed."""
    (tmp_path / "struck.py").write_text(_STRUCK)
    process = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        cwd=tmp_path,
        env={**os.environ, **environment(faults, str(tmp_path))},
        capture_output=True,
        text=True,
    )
    return process.returncode, process.stdout.splitlines()


def fault(tmp_path: Path, target: str, when: str, action: str = "kill", **fields: Any) -> dict[str, Any]:
    point = Point(name="p", process="-c", target=f"struck:{target}", when=when, **fields)
    return point.fault(action, tmp_path)


@pytest.mark.parametrize(
    ("target", "when", "nth", "last"),
    [
        ("called", "enter", 1, None),
        ("called", "exit", 1, "in called 0"),
        ("called", "enter", 2, "worked 0"),
        ("Thing.work", "enter", 1, "called 0"),
        ("Thing.work", "exit", 3, "in work 2"),
    ],
)
def test_a_process_is_killed_at_its_point(tmp_path: Path, target: str, when: str, nth: int, last: str | None) -> None:
    status, printed = struck(tmp_path, fault(tmp_path, target, when, nth=nth))
    assert status == -signal.SIGKILL
    assert (printed[-1] if printed else None) == last


def test_a_point_strikes_once(tmp_path: Path) -> None:
    assert struck(tmp_path, fault(tmp_path, "called", "enter"))[0] == -signal.SIGKILL
    status, printed = struck(tmp_path, fault(tmp_path, "called", "enter"))
    assert (status, printed[-1]) == (0, "worked 2")


def test_calls_with_other_arguments_do_not_count(tmp_path: Path) -> None:
    _, printed = struck(tmp_path, fault(tmp_path, "called", "enter", where=r"\(2,\)"))
    assert printed[-1] == "worked 1"


def test_other_processes_are_left_alone(tmp_path: Path) -> None:
    other = Point(name="p", process="another program", target="struck:called", when="enter")
    assert struck(tmp_path, other.fault("kill", tmp_path))[0] == 0


@pytest.mark.parametrize(("action", "ends"), [("exit", 1), ("enospc", 1), ("delay:0.01", 0)])
def test_other_actions(tmp_path: Path, action: str, ends: int) -> None:
    status, _ = struck(tmp_path, fault(tmp_path, "called", "exit", action))
    assert status == ends
