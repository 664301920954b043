"""The versions of a run that were published, in the ledger's database.

A number is published once in an incarnation of the run, and again with the same weights. Where the weights turned out
to be damaged, nobody can load the version until that has happened.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection

from areal_core.types import PolicyVersion

_SCHEMA = """
CREATE TABLE IF NOT EXISTS versions (
    version INTEGER PRIMARY KEY,
    path TEXT NOT NULL,
    digest TEXT NOT NULL,
    damaged INTEGER NOT NULL DEFAULT 0
);
"""


class PublishedVersions:
    """The versions of this incarnation. `put`, `fold` and `forget_after` are parts of the ledger's transactions."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        db.executescript(_SCHEMA)

    def newest(self) -> PolicyVersion | None:
        """The highest version; None if there is none, or it is damaged: what an older one sampled until it is published
        again would be too old."""
        return self.get(self.last())

    def get(self, version: int) -> PolicyVersion | None:
        """What was published under a number, if it can be loaded."""
        row = self._db.execute(
            "SELECT version, path, digest FROM versions WHERE version = ? AND NOT damaged", (version,)
        ).fetchone()
        return None if row is None else PolicyVersion(**dict(row))

    def loadable(self) -> list[PolicyVersion]:
        """All that the trainer has published and that are not damaged, in their order."""
        rows = self._db.execute(
            "SELECT version, path, digest FROM versions WHERE version > 0 AND NOT damaged ORDER BY version"
        )
        return [PolicyVersion(**dict(row)) for row in rows]

    def last(self) -> int:
        """The highest number, damaged or not; 0 if none is published."""
        return int(self._db.execute("SELECT COALESCE(MAX(version), 0) FROM versions").fetchone()[0])

    def digest(self, version: int) -> str | None:
        """The hash of what was published under a number, damaged or not; None if nothing was."""
        row = self._db.execute("SELECT digest FROM versions WHERE version = ?", (version,)).fetchone()
        return None if row is None else str(row["digest"])

    def mark_damaged(self, version: int) -> None:
        """The weights of a version turned out not to be what was published."""
        self._db.execute("UPDATE versions SET damaged = 1 WHERE version = ?", (version,))

    def put(self, version: PolicyVersion) -> None:
        self._db.execute(
            "INSERT OR REPLACE INTO versions (version, path, digest) VALUES (?, ?, ?)",
            (version.version, version.path, version.digest),
        )

    def fold(self, before: int, kept: Collection[int], limit: int) -> int:
        """Delete up to `limit` versions older than `before` but the base model and those `kept`; returns how many."""
        return self._db.execute(
            "DELETE FROM versions WHERE version IN (SELECT version FROM versions WHERE version > 0 AND version < ? "
            "AND version NOT IN (SELECT value FROM json_each(?)) LIMIT ?)",
            (before, json.dumps(sorted(kept)), limit),
        ).rowcount

    def forget_after(self, version: int) -> None:
        self._db.execute("DELETE FROM versions WHERE version > ?", (version,))
