"""The raw history of a run that faults befall: one line of JSON for every fault and for whatever is new in the ledger.

The looks are the harness's own, by SQL: what was once seen can be held against what the run says later. A look is of
the ledger as any process sees it; after a loss of power, those that came after the cut are taken back.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_WAIT_S = 5.0  # for the ledger to be readable: whoever opens it first recovers its log


@dataclass(frozen=True, slots=True)
class Look:
    """The ledger at one moment, as far as it can't change any more."""

    incarnation: int = 0
    versions: dict[int, str] = field(default_factory=dict[int, str])  # published: version -> hash
    folded: int = 0  # rows of earlier steps, versions among them, may be gone
    # Fixed batches by step; of each group: group, prompt, oldest and newest version of its tokens.
    rows: dict[int, list[list[int]]] = field(default_factory=dict[int, list[list[int]]])


def read_ledger(path: Path) -> Look | None:
    """None while no process has the ledger open, or where it can't be read: it may be about to be restored."""
    if not path.with_name(f"{path.name}-shm").exists():  # nobody has it open, and a look would make this file
        return None
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=_WAIT_S)) as ledger:
            ledger.execute("BEGIN")
            return look_at(ledger)
    except (sqlite3.Error, TypeError):  # it is being made, replaced or recovered; or it is damaged
        return None


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
    """The history of one run, in a file that is only appended to."""

    def __init__(self, file: Path, ledger: Path, *, place: Callable[[], int] = lambda: 0) -> None:
        """`place` gives the place of a look among the records of the disk."""
        self.file = file
        self._ledger = ledger
        self._place = place
        self._last = Look()

    def look(self) -> Look | None:
        """What the ledger holds; what is new in it is written."""
        if (seen := read_ledger(self._ledger)) is None:
            return None
        if seen != self._last:
            last = self._last if seen.incarnation == self._last.incarnation else Look()
            self.write(
                "look",
                incarnation=seen.incarnation,
                versions={k: v for k, v in seen.versions.items() if last.versions.get(k) != v},
                rows={k: v for k, v in seen.rows.items() if last.rows.get(k) != v},
                folded=seen.folded,
                gone=sorted(step for step in set(last.rows) - set(seen.rows) if step >= seen.folded),
                place=self._place(),
            )
            self._last = seen
        return seen

    def lost_power(self, cut: int) -> None:
        """Looks after record `cut` of the disk saw what is gone."""
        self.write("power", cut=cut)
        self._last = Look()

    def moved(self, step: int) -> None:
        """The run's folder is lost; it goes on from what the checkpoint of `step` holds."""
        self.write("moved", step=step)
        self._last = Look()

    def write(self, kind: str, **values: Any) -> None:
        with self.file.open("a") as file:
            file.write(json.dumps({"kind": kind, "time": time.time(), "by": os.getpid(), **values}) + "\n")

    def entries(self) -> list[dict[str, Any]]:
        """All that still counts."""
        kept: list[dict[str, Any]] = []
        since = 0  # entries that earlier losses of power have been applied to
        for line in self.file.read_text().splitlines() if self.file.exists() else []:
            entry = json.loads(line)
            if entry["kind"] == "power":
                later = [e for e in kept[since:] if e["kind"] != "look" or e["place"] <= entry["cut"]]
                kept[since:] = later
                since = len(kept) + 1
            kept.append(entry)
        return kept


def looks(entries: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The looks and the moves among them, with numbers for keys again."""
    for entry in entries:
        if entry["kind"] == "moved":
            yield entry
        elif entry["kind"] == "look":
            yield entry | {name: {int(k): v for k, v in entry[name].items()} for name in ("versions", "rows")}
