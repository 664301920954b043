"""Where the payloads of groups lie, in the ledger's database.

The payloads themselves are parts of files, the segments, that the process around the rollout core writes. Forgetting
one is the deletion of a small row, whatever its size.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

_SCHEMA = """
CREATE TABLE IF NOT EXISTS payloads (
    group_id INTEGER PRIMARY KEY,
    segment TEXT NOT NULL, start INTEGER NOT NULL, bytes INTEGER NOT NULL, crc32 INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS payloads_by_segment ON payloads (segment);
CREATE TABLE IF NOT EXISTS forgotten (one INTEGER PRIMARY KEY CHECK (one = 1), step INTEGER NOT NULL);
INSERT OR IGNORE INTO forgotten VALUES (1, 0);
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a payload lies."""

    segment: str  # name of the file
    start: int  # bytes from its beginning
    bytes: int
    crc32: int


class PayloadIndex:
    """The places of a run's payloads. Writes are parts of the ledger's transactions."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        db.executescript(_SCHEMA)

    def get(self, group_id: int) -> Place | None:
        """None where no payload of the group is kept."""
        row = self._db.execute("SELECT * FROM payloads WHERE group_id = ?", (group_id,)).fetchone()
        return None if row is None else _place(row)

    def put(self, group_id: int, place: Place) -> None:
        self._db.execute(
            "INSERT INTO payloads VALUES (?, ?, ?, ?, ?)",
            (group_id, place.segment, place.start, place.bytes, place.crc32),
        )

    def forget(self, group_id: int) -> None:
        self._db.execute("DELETE FROM payloads WHERE group_id = ?", (group_id,))

    @property
    def forgotten(self) -> int:
        """The last step whose payloads are forgotten; 0 if none is."""
        return self._db.execute("SELECT step FROM forgotten").fetchone()[0]

    def forget_consumed(self, step: int) -> None:
        """Those that steps up to `step` have consumed."""
        self._db.execute("UPDATE forgotten SET step = MAX(step, ?)", (step,))
        self._db.execute(
            "DELETE FROM payloads WHERE group_id IN (SELECT group_id FROM groups WHERE step <= ?)", (step,)
        )

    def all(self) -> dict[int, Place]:
        """The places of all payloads that are kept, by group."""
        rows = self._db.execute("SELECT * FROM payloads ORDER BY segment, start").fetchall()
        return {row["group_id"]: _place(row) for row in rows}

    def segments(self) -> set[str]:
        """Names of the segments in which a payload lies that is kept."""
        return {row["segment"] for row in self._db.execute("SELECT DISTINCT segment FROM payloads")}


def _place(row: sqlite3.Row) -> Place:
    return Place(segment=row["segment"], start=row["start"], bytes=row["bytes"], crc32=row["crc32"])
