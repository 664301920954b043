"""The short form of the campaign of faults: a run under kills and stops, one that loses power, messages, files.

`make bench NAME=chaos` is the long one.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from pathlib import Path

import pytest

from areal_core.controller.core.ledger import TrajectoryLedger
from areal_core.types import GroupState
from tests.faults import books, messages, objects, power_offs, processes
from tests.faults.checker import Findings
from tests.faults.disk import compiler
from tests.faults.points import POINTS

_STRUCK = (  # one of each kind of process, on both sides of what matters most there
    *("ledger.after-batch-fixed", "publish.before-announce", "publish.after-announce", "weights.before-manifest"),
    *("checkpoint.before-manifest", "update.after-paused", "server.before-swap", "reward.before-result"),
)


def problems(found: list[Findings]) -> list[str]:
    return [line for findings in found for line in findings.problems()]


@pytest.mark.slow
@pytest.mark.cpu_seconds(120)
@pytest.mark.nightly
def test_a_run_under_kills_and_stops_of_its_processes(tmp_path: Path) -> None:
    points = [
        point
        for point in processes.reachable(POINTS, scored=False, tracked=False, moved=False)
        if point.name in _STRUCK
    ]
    kinds = ("trainer", "controller", "generation", "reward", "launcher")
    struck = processes.strike(tmp_path / "run", 1, 5, points, kinds=kinds, scored=False, tracked=False)
    assert struck.findings.problems() == [], struck.output
    assert struck.points == set(_STRUCK)
    assert struck.faults.total() >= len(_STRUCK) + 5


@pytest.mark.slow
@pytest.mark.cpu_seconds(60)
@pytest.mark.nightly
def test_a_run_whose_processes_are_killed_makes_the_same_weights(tmp_path: Path) -> None:
    struck, same = processes.repeat(tmp_path, 3, 4, steps=16)
    assert struck.findings.problems() == [], struck.output
    assert struck.faults.total() == 4
    assert same


@pytest.mark.slow
@pytest.mark.cpu_seconds(60)
@pytest.mark.skipif(compiler() is None, reason="needs a C compiler")
@pytest.mark.nightly
def test_a_run_that_loses_power(tmp_path: Path) -> None:
    found = power_offs.lose_power(tmp_path / "run", 1, 2)
    assert found.findings.problems() == [], found.output
    assert found.losses == 2


@pytest.mark.slow
@pytest.mark.cpu_seconds(40)
@pytest.mark.nightly
def test_messages_that_are_lost_late_and_repeated(tmp_path: Path) -> None:
    found = messages.strike(tmp_path / "run", 1, steps=20)
    assert found.findings.problems() == []
    assert set(found.faults) == {"request lost", "response lost", "late", "repeated late"}


@pytest.mark.nightly
def test_checkpoints_in_a_store_that_fails(tmp_path: Path) -> None:
    found = [objects.strike(tmp_path / str(seed), seed) for seed in range(30)]
    assert problems([one.findings for one in found]) == []
    assert set(sum((one.faults for one in found), Counter[str]())) == set(objects.KINDS)


@pytest.mark.nightly
def test_books_under_damage(tmp_path: Path) -> None:
    found = [books.strike(tmp_path / str(seed), seed, steps=10) for seed in range(12)]
    assert problems([one.findings for one in found]) == []


@pytest.mark.parametrize("seed", [62, 215])
def test_a_flipped_byte_of_a_manifest_is_noticed(tmp_path: Path, seed: int) -> None:
    assert objects.strike(tmp_path / "run", seed).findings.problems() == []


@pytest.mark.parametrize("seed", [182, 241, 361])
def test_a_run_begins_anew_where_its_ledger_is_torn_before_the_first_checkpoint(tmp_path: Path, seed: int) -> None:
    assert books.strike(tmp_path / "run", seed).findings.problems() == []


@pytest.mark.parametrize("seed", [38, 55])
def test_a_torn_ledger_gives_way_to_the_checkpoint(tmp_path: Path, seed: int) -> None:
    assert books.strike(tmp_path / "run", seed).findings.problems() == []


def test_a_full_disk_leaves_the_gate_s_count_right(tmp_path: Path) -> None:
    ledger = TrajectoryLedger(tmp_path / "ledger.sqlite", group_size=1)
    database = ledger._db  # nothing else can fill its disk  # pyright: ignore[reportPrivateUsage]
    database.execute(f"PRAGMA max_page_count = {database.execute('PRAGMA page_count').fetchone()[0]}")
    with pytest.raises(sqlite3.OperationalError):  # noqa: PT012 - which call it strikes is not known
        while True:
            ledger.drop(ledger.admit().group_id, "generation", requeue=True)
    counts = ledger.counts()
    assert ledger.admitted == sum(
        counts[state] for state in (GroupState.INFLIGHT, GroupState.READY, GroupState.CONSUMED)
    )
    ledger.close()
