"""Where the payloads of groups lie, in the ledger's database.

The payloads themselves are parts of files, the segments, that the process around the rollout core writes. Forgetting
one is the deletion of a small row, whatever its size.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import astuple, dataclass

_SCHEMA = """
CREATE TABLE IF NOT EXISTS payloads (
    group_id INTEGER PRIMARY KEY,
    segment TEXT NOT NULL, start INTEGER NOT NULL, bytes INTEGER NOT NULL, crc32 INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS payloads_by_segment ON payloads (segment);
CREATE TABLE IF NOT EXISTS forgotten (one INTEGER PRIMARY KEY CHECK (one = 1), step INTEGER NOT NULL);
INSERT OR IGNORE INTO forgotten VALUES (1, 0);
"""
_PAGE = 256  # places that are read at once


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
        self._db.execute("INSERT INTO payloads VALUES (?, ?, ?, ?, ?)", (group_id, *astuple(place)))

    def forget(self, group_id: int) -> None:
        self._db.execute("DELETE FROM payloads WHERE group_id = ?", (group_id,))

    @property
    def forgotten(self) -> int:
        """The last step whose payloads are forgotten; 0 if none is."""
        return self._db.execute("SELECT step FROM forgotten").fetchone()[0]

    def forget_consumed(self, step: int, limit: int = -1) -> bool:
        """Those that steps up to `step` have consumed: whole steps, until there are `limit` groups. Returns whether
        more are left."""
        first = self.forgotten
        at_limit = "SELECT step FROM groups WHERE step > ? ORDER BY step LIMIT 1 OFFSET ?"
        row = self._db.execute(at_limit, (first, limit)).fetchone() if limit >= 0 else None
        last = step if row is None else min(step, row["step"])
        groups = "SELECT group_id FROM groups WHERE step > ? AND step <= ?"
        self._db.execute(f"DELETE FROM payloads WHERE group_id IN ({groups})", (first, last))
        self._db.execute("UPDATE forgotten SET step = MAX(step, ?)", (last,))
        return last < step

    def all(self) -> Iterator[tuple[int, Place]]:
        """Groups and the places of their payloads, all that are kept. What comes meanwhile is among them."""
        last = -1
        page = "SELECT * FROM payloads WHERE group_id > ? ORDER BY group_id LIMIT ?"
        while rows := self._db.execute(page, (last, _PAGE)).fetchall():
            for row in rows:
                yield row["group_id"], _place(row)
            last = rows[-1]["group_id"]

    def segments(self) -> set[str]:
        """Names of the segments in which a payload lies that is kept."""
        # DISTINCT would read all places; this goes from each name to the next one in the index.
        rows = self._db.execute(
            "WITH RECURSIVE names (name) AS (SELECT MIN(segment) FROM payloads UNION ALL "
            "SELECT (SELECT MIN(segment) FROM payloads WHERE segment > name) FROM names WHERE name NOT NULL) "
            "SELECT name FROM names WHERE name NOT NULL"
        )
        return {row["name"] for row in rows}


def _place(row: sqlite3.Row) -> Place:
    return Place(segment=row["segment"], start=row["start"], bytes=row["bytes"], crc32=row["crc32"])
