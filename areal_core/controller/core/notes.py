"""What the ledger's file stores beside groups: incarnation, starts, RL wall time, steps, evaluations, the ending."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection, Mapping
from dataclasses import asdict, astuple, dataclass

from areal_core.types import Evaluation


def _count(row: str, sign: str) -> str:
    """SQL that adds the staleness of a row of `steps` to the whole run's, or takes it away again."""
    return f"""
    INSERT INTO staleness SELECT key, {sign}value FROM json_each({row}.staleness) WHERE true
    ON CONFLICT DO UPDATE SET tokens = tokens + excluded.tokens;"""


_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS run (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    incarnation INTEGER NOT NULL DEFAULT 0,
    starts INTEGER NOT NULL DEFAULT 0,
    elapsed_s REAL NOT NULL DEFAULT 0,
    reason TEXT, version INTEGER, model_url TEXT  -- how the trainer finished
);
INSERT OR IGNORE INTO run (one) VALUES (1);
CREATE TABLE IF NOT EXISTS steps (
    step INTEGER PRIMARY KEY,
    published_s REAL,  -- RL wall time when its version was published
    staleness TEXT     -- tokens that it trained on, by their staleness
);
CREATE TABLE IF NOT EXISTS staleness (lag TEXT PRIMARY KEY, tokens INTEGER NOT NULL) WITHOUT ROWID;  -- of all steps
CREATE TRIGGER IF NOT EXISTS steps_inserted AFTER INSERT ON steps BEGIN {_count("NEW", "+")} END;
CREATE TRIGGER IF NOT EXISTS steps_updated AFTER UPDATE OF staleness ON steps
BEGIN {_count("OLD", "-")} {_count("NEW", "+")} END;
CREATE TABLE IF NOT EXISTS evaluations (
    version INTEGER PRIMARY KEY, digest TEXT NOT NULL, accuracy REAL NOT NULL, prompts INTEGER NOT NULL,
    no_result INTEGER NOT NULL, mean_tokens REAL NOT NULL, wall_s REAL NOT NULL,
    scores TEXT NOT NULL -- by name
);
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How the trainer finished."""

    reason: str  # as RunSummary has it
    version: int
    model_url: str


class RunNotes:
    """The notes of one run. A write is one statement, part of the transaction that it is made in."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        db.executescript(_SCHEMA)

    @property
    def incarnation(self) -> int:
        """Times that recovery could not reproduce a version's weights."""
        return self._db.execute("SELECT incarnation FROM run").fetchone()[0]

    def count_incarnation(self) -> None:
        self._db.execute("UPDATE run SET incarnation = incarnation + 1")

    @property
    def starts(self) -> int:
        """Times that a controller was started and got to work."""
        return self._db.execute("SELECT starts FROM run").fetchone()[0]

    def count_start(self) -> None:
        self._db.execute("UPDATE run SET starts = starts + 1")

    @property
    def elapsed_s(self) -> float:
        """RL wall time of the last publication."""
        return self._db.execute("SELECT elapsed_s FROM run").fetchone()[0]

    @property
    def ending(self) -> Ending | None:
        row = self._db.execute("SELECT reason, version, model_url FROM run").fetchone()
        return None if row["reason"] is None else Ending(**dict(row))

    def end(self, ending: Ending) -> None:
        self._db.execute("UPDATE run SET reason = ?, version = ?, model_url = ?", astuple(ending))

    def reopen(self) -> None:
        """Forget how the trainer finished: the run goes on."""
        self._db.execute("UPDATE run SET reason = NULL")

    def published_s(self, step: int) -> float | None:
        """RL wall time when the version of `step` was published; None if it was not, or recovery has replaced it."""
        row = self._db.execute("SELECT published_s FROM steps WHERE step = ?", (step,)).fetchone()
        return None if row is None else row["published_s"]

    def publish(self, step: int, elapsed_s: float) -> None:
        self._db.execute("UPDATE run SET elapsed_s = ?", (elapsed_s,))
        self._db.execute(
            "INSERT INTO steps (step, published_s) VALUES (?1, ?2) ON CONFLICT DO UPDATE SET published_s = ?2",
            (step, elapsed_s),
        )

    def staleness(self) -> dict[str, int]:
        """Tokens trained on by all steps that recovery has not replaced, by their staleness."""
        return dict(self._db.execute("SELECT lag, tokens FROM staleness WHERE tokens").fetchall())

    def add_staleness(self, step: int, counts: Mapping[str, int]) -> None:
        """Store those of one step; a replayed step stores the same again."""
        self._db.execute(
            "INSERT INTO steps (step, staleness) VALUES (?1, ?2) ON CONFLICT DO UPDATE SET staleness = ?2",
            (step, json.dumps(counts)),
        )

    def evaluations(self) -> list[Evaluation]:
        """All evaluations, by version."""
        rows = map(dict, self._db.execute("SELECT * FROM evaluations ORDER BY version"))
        return [Evaluation(**{**row, "scores": json.loads(row["scores"])}) for row in rows]

    def add_evaluation(self, evaluation: Evaluation) -> None:
        row = {**asdict(evaluation), "scores": json.dumps(evaluation.scores)}
        marks = ", ".join(f":{name}" for name in row)
        self._db.execute(f"INSERT INTO evaluations VALUES ({marks})", row)

    def forget(self, version: int) -> None:
        """Delete the steps and evaluations of `version` and later ones: recovery has replaced their weights."""
        self._db.execute("DELETE FROM evaluations WHERE version >= ?", (version,))
        self._db.execute("UPDATE steps SET staleness = NULL WHERE step >= ?", (version,))
        self._db.execute("DELETE FROM steps WHERE step >= ?", (version,))

    def fold(self, before: int, kept: Collection[int], limit: int) -> int:
        """Delete up to `limit` steps earlier than `before` whose versions have no score and are not among those `kept`;
        returns how many. Their staleness stays counted."""
        return self._db.execute(
            "DELETE FROM steps WHERE step IN (SELECT step FROM steps WHERE step < ? AND step NOT IN "
            "(SELECT version FROM evaluations UNION ALL SELECT value FROM json_each(?)) LIMIT ?)",
            (before, json.dumps(sorted(kept)), limit),
        ).rowcount
