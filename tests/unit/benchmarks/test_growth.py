"""What grows with a ledger, at sizes that take seconds: counted are bytes, and SQLite's own steps rather than time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

import pytest

from areal_core.controller.core.ledger import TrajectoryLedger
from benchmarks import growth

T = TypeVar("T")
PER_STEP = 4
_Stopwatch = growth.Stopwatch
_UNIT = 10  # SQLite's steps between two of its calls of a progress handler


def steps_of_calls(folder: Path, monkeypatch: pytest.MonkeyPatch, groups: int, *, fold: bool) -> dict[str, int]:
    """By call, the most steps of SQLite's virtual machine that it takes with so many groups in the ledger."""
    with closing(TrajectoryLedger(folder / f"{groups}.sqlite", group_size=growth.GROUP)) as ledger:
        taken: dict[str, int] = {}

        class Counter(_Stopwatch):
            def __call__(self, name: str, call: Callable[..., T], *arguments: Any, **named: Any) -> T:
                units = 0

                def progress() -> int:
                    nonlocal units
                    units += 1
                    return 0

                ledger._db.set_progress_handler(progress, _UNIT)
                result = call(*arguments, **named)
                ledger._db.set_progress_handler(None, _UNIT)
                taken[name] = max(units, taken.get(name, 0))
                return super().__call__(name, lambda: result)

        monkeypatch.setattr(growth, "Stopwatch", Counter)
        first = growth.fill(ledger, groups, PER_STEP) + 1
        before = ledger.tokens(), ledger.counts(), ledger.dropped(), ledger.admitted, ledger.last_step()
        if fold:
            growth.fold(ledger, first - 1)
            assert (ledger.tokens(), ledger.counts(), ledger.dropped(), ledger.admitted, ledger.last_step()) == before
            rows = ledger._db.execute("SELECT COUNT(*) FROM groups").fetchone()[0]
            assert rows <= PER_STEP + 1
        growth.calls(ledger, first, 6, PER_STEP)
    return taken


@pytest.mark.parametrize("fold", [False, True], ids=["unfolded", "folded"])
def test_no_call_of_the_event_loop_takes_longer_with_more_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fold: bool
) -> None:
    few, many = (steps_of_calls(tmp_path, monkeypatch, groups, fold=fold) for groups in (2_000, 20_000))
    assert {"free", "fold"} <= many.keys() or not fold
    assert {name: (few[name], units) for name, units in many.items() if units > 1.5 * few[name] + 5} == {}
