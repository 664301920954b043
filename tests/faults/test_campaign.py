"""The short form of the campaign of faults: a run under kills and stops, one that loses power, messages, a store.

`make bench NAME=chaos` is the long one.
"""

from __future__ import annotations

import inspect
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from areal_core.controller.core.ledger import TrajectoryLedger
from areal_core.types import GroupState
from tests.faults import objects, outside, processes
from tests.faults.disk import compiler
from tests.faults.points import POINTS

_STRUCK = (  # one of each kind of process, on both sides of what matters most there
    *("ledger.after-batch-fixed", "publish.before-announce", "publish.after-announce", "weights.before-manifest"),
    *("checkpoint.before-manifest", "update.after-paused", "server.before-swap", "reward.before-result"),
)


@pytest.mark.nightly
def test_run_survives_kills_and_stops_of_its_processes(tmp_path: Path) -> None:
    points = [point for point in POINTS if point.name in _STRUCK]
    struck = processes.strike(tmp_path / "run", 1, len(processes.KINDS), points)
    assert struck.findings.problems() == [], struck.output
    assert struck.points == set(_STRUCK)
    assert struck.faults.total() >= len(_STRUCK) + len(processes.KINDS)


@pytest.mark.nightly
def test_killed_processes_change_no_bit_of_a_synchronous_run(tmp_path: Path) -> None:
    struck, same = processes.repeat(tmp_path, 3, 4, steps=16)
    assert struck.findings.problems() == [], struck.output
    assert struck.faults.total() == 4
    assert same


@pytest.mark.skipif(compiler() is None, reason="needs a C compiler")
@pytest.mark.nightly
def test_run_survives_losses_of_power(tmp_path: Path) -> None:
    found = outside.lose_power(tmp_path / "run", 1, 2)
    assert found.findings.problems() == [], found.output
    assert found.faults.total() == 2


@pytest.mark.nightly
def test_run_survives_lost_late_and_repeated_messages(tmp_path: Path) -> None:
    found = outside.lose_messages(tmp_path / "run", 1, steps=20)
    assert found.findings.problems() == []
    assert set(found.faults) == {"request lost", "response lost", "late", "repeated late"}


def test_newest_whole_checkpoint_is_found_in_a_store_that_fails(tmp_path: Path) -> None:
    """Some of these seeds flip a byte of a manifest."""
    found = [objects.strike(tmp_path / str(seed), seed) for seed in range(10)]
    assert [line for one in found for line in one.findings.problems()] == []
    assert set(sum((one.faults for one in found), Counter[str]())) == set(objects.KINDS)


def test_every_point_has_a_name_and_a_function_of_its_own() -> None:
    assert [point.name for point in POINTS if not inspect.isroutine(point.resolve())] == []
    assert len({point.name for point in POINTS}) == len(POINTS)


def test_full_disk_leaves_the_gates_count_correct(tmp_path: Path) -> None:
    with closing(TrajectoryLedger(tmp_path / "ledger.sqlite", group_size=1)) as ledger:
        database = ledger._db  # nothing else can fill its disk  # pyright: ignore[reportPrivateUsage]
        database.execute(f"PRAGMA max_page_count = {database.execute('PRAGMA page_count').fetchone()[0]}")
        with pytest.raises(sqlite3.OperationalError):  # noqa: PT012 - which call it strikes is not known
            while True:
                ledger.drop(ledger.admit(version=0).group_id, "generation", requeue=True)
        counts = ledger.counts()
        held = (GroupState.INFLIGHT, GroupState.READY, GroupState.CONSUMED)
        assert ledger.admitted == sum(counts[state] for state in held)
