"""What the ledger of a run held while faults befell it: the harness's own looks, by SQL.

What was once seen can be held against what the run says later. A look is of the ledger as any process sees it; after a
loss of power, those that came after the cut are taken back.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

_WAIT_S = 5.0  # for the ledger to be readable: whoever opens it first recovers its log


@dataclass(frozen=True, slots=True)
class Look:
    """The ledger at one moment, as far as it can't change any more."""

    incarnation: int = 0
    versions: dict[int, str] = field(default_factory=dict[int, str])  # published: version -> hash
    folded: int = 0  # rows of earlier steps, versions among them, may be gone
    # Fixed batches by step; of each group: group, prompt, oldest and newest version of its tokens.
    rows: dict[int, list[list[int]]] = field(default_factory=dict[int, list[list[int]]])
    place: int = field(default=0, compare=False)  # among the records of the disk


@dataclass(frozen=True, slots=True)
class Moved:
    """The run's folder is lost; it goes on from what the checkpoint of `step` holds."""

    step: int


def look_at(ledger: sqlite3.Connection) -> Look:
    rows: dict[int, list[list[int]]] = {}
    columns = "step, group_id, prompt_index, min_version, max_version"
    for step, *row in ledger.execute(f"SELECT {columns} FROM groups WHERE state = 'consumed' ORDER BY step, admission"):
        rows.setdefault(step, []).append(row)
    return Look(
        incarnation=ledger.execute("SELECT incarnation FROM run").fetchone()[0],
        versions=dict(ledger.execute("SELECT version, digest FROM versions").fetchall()),
        folded=ledger.execute("SELECT step FROM forgotten").fetchone()[0],
        rows=rows,
    )


class History:
    """The looks at one run's ledger, without those that saw nothing new."""

    def __init__(self, ledger: Path) -> None:
        self._ledger = ledger
        self._kept = 0  # looks that earlier losses of power have been applied to
        self.looks: list[Look | Moved | None] = []  # None for a loss of power

    def look(self, place: Callable[[], int] = lambda: 0) -> Look | None:
        """What the ledger holds. None while no process has it open, which a look would do, or where it can't be read:
        it is being made, replaced or recovered. `place` gives that of a look among the records of the disk."""
        if not self._ledger.with_name(f"{self._ledger.name}-shm").exists():
            return None
        try:
            with closing(sqlite3.connect(f"file:{self._ledger}?mode=ro", uri=True, timeout=_WAIT_S)) as ledger:
                ledger.execute("BEGIN")
                seen = look_at(ledger)
        except (sqlite3.Error, TypeError):
            return None
        if not self.looks or self.looks[-1] != seen:
            self.looks.append(replace(seen, place=place()))
        return seen

    def lost_power(self, cut: int) -> None:
        """Looks after record `cut` of the disk saw what is gone."""
        since = self.looks[self._kept :]
        self.looks[self._kept :] = [*(look for look in since if isinstance(look, Look) and look.place <= cut), None]
        self._kept = len(self.looks)

    def moved(self, step: int) -> None:
        self.looks.append(Moved(step))
