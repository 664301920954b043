"""Faults at named points: every point is there, and each kind of fault strikes once, where it should."""

from __future__ import annotations

import inspect
import re

import psutil

from areal_core.rewards.worker import WorkerProcess
from tests.faults.points import POINTS, REWARD


def test_every_point_has_a_name_and_a_function_of_its_own() -> None:
    assert [point.name for point in POINTS if not inspect.isroutine(point.resolve())] == []
    assert len({point.name for point in POINTS}) == len(POINTS)


def test_reward_workers_are_known_by_their_command_line() -> None:
    worker = WorkerProcess(str, 0, None)
    try:
        command = " ".join(psutil.Process(worker.process.pid).cmdline())
    finally:
        worker.kill()
    assert re.search(REWARD, command)
