"""The ledger's tables beside its groups: notes, versions, payload places, servers' token counters.

Writes are parts of the ledger's transactions.

Versions: an incarnation of the run publishes each number once, or again with the same content. Servers can't load a
damaged version until the trainer publishes it again.

Payloads are parts of files, the segments, which PayloadStore writes. Forgetting a payload only deletes a small row.

Counters: a server counts the tokens that it samples for the rollout from 0 at its start, including discarded ones. A
row is one *server session*: from its join until it leaves or is lost. The sum over all rows is the servers' count in
the token ledger, independent of the groups' count. No counter includes the tokens that a dead server sampled after its
last report. Its session holds an upper bound on them, derived from its completions in flight. The same holds for
counts that a killed controller had not stored.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, astuple, dataclass

from areal_core.types import Evaluation, PolicyVersion


def _add_staleness(row: str, sign: str) -> str:
    """Return SQL that adds the staleness of a row of `steps` to the run's total, or subtracts it."""
    return f"""
    INSERT INTO staleness SELECT key, {sign}value FROM json_each({row}.staleness) WHERE true
    ON CONFLICT DO UPDATE SET tokens = tokens + excluded.tokens;"""


_NOTES = f"""
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
    staleness TEXT     -- tokens of the batch, by staleness
);
CREATE TABLE IF NOT EXISTS staleness (lag TEXT PRIMARY KEY, tokens INTEGER NOT NULL) WITHOUT ROWID;  -- of all steps
CREATE TRIGGER IF NOT EXISTS steps_inserted AFTER INSERT ON steps BEGIN {_add_staleness("NEW", "+")} END;
CREATE TRIGGER IF NOT EXISTS steps_updated AFTER UPDATE OF staleness ON steps
BEGIN {_add_staleness("OLD", "-")} {_add_staleness("NEW", "+")} END;
CREATE TABLE IF NOT EXISTS evaluations (
    version INTEGER PRIMARY KEY, digest TEXT NOT NULL, accuracy REAL NOT NULL, prompts INTEGER NOT NULL,
    no_result INTEGER NOT NULL, mean_tokens REAL NOT NULL, wall_s REAL NOT NULL,
    scores TEXT NOT NULL -- by name
);
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How the trainer finished."""

    reason: str  # as in RunSummary
    version: int
    model_url: str


class RunNotes:
    """The notes of one run. Each write is one statement of the current transaction."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        db.executescript(_NOTES)

    @property
    def incarnation(self) -> int:
        """How often recovery could not reproduce the model weights of a version."""
        return self._db.execute("SELECT incarnation FROM run").fetchone()[0]

    def count_incarnation(self) -> None:
        self._db.execute("UPDATE run SET incarnation = incarnation + 1")

    @property
    def starts(self) -> int:
        """How often a controller was started and had a server at work."""
        return self._db.execute("SELECT starts FROM run").fetchone()[0]

    def count_start(self) -> None:
        self._db.execute("UPDATE run SET starts = starts + 1")

    @property
    def elapsed_s(self) -> float:
        """RL wall time of the last publication, in seconds."""
        return self._db.execute("SELECT elapsed_s FROM run").fetchone()[0]

    @property
    def ending(self) -> Ending | None:
        row = self._db.execute("SELECT reason, version, model_url FROM run").fetchone()
        return None if row["reason"] is None else Ending(**dict(row))

    def end(self, ending: Ending) -> None:
        self._db.execute("UPDATE run SET reason = ?, version = ?, model_url = ?", astuple(ending))

    def reopen(self) -> None:
        """Forget how the trainer finished, because the run continues."""
        self._db.execute("UPDATE run SET reason = NULL")

    def published_s(self, step: int) -> float | None:
        """RL wall time in seconds when `step` published; None if it did not, or recovery has replaced it."""
        row = self._db.execute("SELECT published_s FROM steps WHERE step = ?", (step,)).fetchone()
        return None if row is None else row["published_s"]

    def publish(self, step: int, elapsed_s: float) -> None:
        self._db.execute("UPDATE run SET elapsed_s = ?", (elapsed_s,))
        self._db.execute(
            "INSERT INTO steps (step, published_s) VALUES (?1, ?2) ON CONFLICT DO UPDATE SET published_s = ?2",
            (step, elapsed_s),
        )

    def staleness(self) -> dict[str, int]:
        """Tokens trained on in all steps that recovery has not replaced, by their staleness."""
        return dict(self._db.execute("SELECT lag, tokens FROM staleness WHERE tokens").fetchall())

    def add_staleness(self, step: int, counts: Mapping[str, int]) -> None:
        """Store the counts of one step; a replayed step stores the same counts again."""
        self._db.execute(
            "INSERT INTO steps (step, staleness) VALUES (?1, ?2) ON CONFLICT DO UPDATE SET staleness = ?2",
            (step, json.dumps(counts)),
        )

    def evaluations(self) -> list[Evaluation]:
        """All evaluations, ordered by version."""
        rows = map(dict, self._db.execute("SELECT * FROM evaluations ORDER BY version"))
        return [Evaluation(**{**row, "scores": json.loads(row["scores"])}) for row in rows]

    def add_evaluation(self, evaluation: Evaluation) -> None:
        row = {**asdict(evaluation), "scores": json.dumps(evaluation.scores)}
        marks = ", ".join(f":{name}" for name in row)
        self._db.execute(f"INSERT INTO evaluations VALUES ({marks})", row)

    def forget(self, version: int) -> None:
        """Delete the steps and evaluations of `version` and later ones, which recovery has replaced."""
        self._db.execute("DELETE FROM evaluations WHERE version >= ?", (version,))
        self._db.execute("UPDATE steps SET staleness = NULL WHERE step >= ?", (version,))
        self._db.execute("DELETE FROM steps WHERE step >= ?", (version,))

    def prune(self, before: int, kept: Collection[int], limit: int) -> int:
        """Delete up to `limit` steps before `before` whose versions have no score and are not in `kept`.
        Returns how many. Their staleness remains in the total."""
        return self._db.execute(
            "DELETE FROM steps WHERE step IN (SELECT step FROM steps WHERE step < ? AND step NOT IN "
            "(SELECT version FROM evaluations UNION ALL SELECT value FROM json_each(?)) LIMIT ?)",
            (before, json.dumps(sorted(kept)), limit),
        ).rowcount


_VERSIONS = """
CREATE TABLE IF NOT EXISTS versions (
    version INTEGER PRIMARY KEY,
    path TEXT NOT NULL,
    digest TEXT NOT NULL,
    damaged INTEGER NOT NULL DEFAULT 0
);
"""


class PublishedVersions:
    """The versions of this incarnation. Writes are parts of the ledger's transactions."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        db.executescript(_VERSIONS)

    def newest(self) -> PolicyVersion | None:
        """The highest version; None if there is none, or if it is damaged.
        Tokens sampled by an older version, while the trainer repeats the damaged one, would be too stale."""
        return self.get(self.last())

    def get(self, version: int) -> PolicyVersion | None:
        """The version published under a number; None if there is none or it is damaged."""
        row = self._db.execute(
            "SELECT version, path, digest FROM versions WHERE version = ? AND NOT damaged", (version,)
        ).fetchone()
        return None if row is None else PolicyVersion(**dict(row))

    def loadable(self) -> list[PolicyVersion]:
        """All undamaged versions that the trainer has published, in order."""
        rows = self._db.execute(
            "SELECT version, path, digest FROM versions WHERE version > 0 AND NOT damaged ORDER BY version"
        )
        return [PolicyVersion(**dict(row)) for row in rows]

    def last(self) -> int:
        """The highest version number, damaged or not; 0 if none is published."""
        return int(self._db.execute("SELECT COALESCE(MAX(version), 0) FROM versions").fetchone()[0])

    def digest(self, version: int) -> str | None:
        """The hash of the version published under a number, damaged or not; None if there is none."""
        row = self._db.execute("SELECT digest FROM versions WHERE version = ?", (version,)).fetchone()
        return None if row is None else str(row["digest"])

    def mark_damaged(self, version: int) -> None:
        """Record that the files of a version differ from the published ones."""
        self._db.execute("UPDATE versions SET damaged = 1 WHERE version = ?", (version,))

    def put(self, version: PolicyVersion) -> None:
        self._db.execute(
            "INSERT OR REPLACE INTO versions (version, path, digest) VALUES (?, ?, ?)",
            (version.version, version.path, version.digest),
        )

    def prune(self, before: int, kept: Collection[int], limit: int) -> int:
        """Delete up to `limit` versions older than `before`, except the base model and `kept`.
        Returns how many."""
        return self._db.execute(
            "DELETE FROM versions WHERE version IN (SELECT version FROM versions WHERE version > 0 AND version < ? "
            "AND version NOT IN (SELECT value FROM json_each(?)) LIMIT ?)",
            (before, json.dumps(sorted(kept)), limit),
        ).rowcount

    def forget_after(self, version: int) -> None:
        self._db.execute("DELETE FROM versions WHERE version > ?", (version,))


_PAYLOADS = """
CREATE TABLE IF NOT EXISTS payloads (
    group_id INTEGER PRIMARY KEY,
    segment TEXT NOT NULL, start INTEGER NOT NULL, bytes INTEGER NOT NULL, crc32 INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS payloads_by_segment ON payloads (segment);
CREATE TABLE IF NOT EXISTS forgotten (one INTEGER PRIMARY KEY CHECK (one = 1), step INTEGER NOT NULL);
INSERT OR IGNORE INTO forgotten VALUES (1, 0);
"""
_PLACE = "segment, start, bytes, crc32"
_PLACES_AT_ONCE = 256  # places read by one query


@dataclass(frozen=True, slots=True)
class Place:
    """Where a payload lies in its segment."""

    segment: str  # file name of the segment
    start: int  # bytes from the beginning of the file
    bytes: int
    crc32: int


class PayloadIndex:
    """The places of a run's payloads. Writes are parts of the ledger's transactions."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        db.executescript(_PAYLOADS)

    def get(self, group_id: int) -> Place | None:
        """Place of a group's payload; None if it is not kept."""
        row = self._db.execute(f"SELECT {_PLACE} FROM payloads WHERE group_id = ?", (group_id,)).fetchone()
        return None if row is None else Place(*row)

    def put(self, group_id: int, place: Place) -> None:
        self._db.execute("INSERT INTO payloads VALUES (?, ?, ?, ?, ?)", (group_id, *astuple(place)))

    def forget(self, group_id: int) -> None:
        self._db.execute("DELETE FROM payloads WHERE group_id = ?", (group_id,))

    @property
    def forgotten(self) -> int:
        """The last step whose payloads are forgotten; 0 if there is none."""
        return self._db.execute("SELECT step FROM forgotten").fetchone()[0]

    def forget_consumed(self, step: int, limit: int = -1) -> bool:
        """Forget the payloads consumed by steps up to `step`, in whole steps, until there are `limit` groups.
        Returns whether more remain."""
        first = self.forgotten
        at_limit = "SELECT step FROM groups WHERE step > ? ORDER BY step LIMIT 1 OFFSET ?"
        row = self._db.execute(at_limit, (first, limit)).fetchone() if limit >= 0 else None
        last = step if row is None else min(step, row["step"])
        groups = "SELECT group_id FROM groups WHERE step > ? AND step <= ?"
        self._db.execute(f"DELETE FROM payloads WHERE group_id IN ({groups})", (first, last))
        self._db.execute("UPDATE forgotten SET step = MAX(step, ?)", (last,))
        return last < step

    def all(self) -> Iterator[tuple[int, Place]]:
        """Iterate over groups and the places of their kept payloads, including those added meanwhile."""
        last = -1
        page = f"SELECT group_id, {_PLACE} FROM payloads WHERE group_id > ? ORDER BY group_id LIMIT ?"
        while rows := self._db.execute(page, (last, _PLACES_AT_ONCE)).fetchall():
            for last, *place in rows:
                yield last, Place(*place)

    def segments(self) -> set[str]:
        """Names of the segments that hold kept payloads."""
        # DISTINCT would read all places; this query jumps from each name to the next in the index.
        rows = self._db.execute(
            "WITH RECURSIVE names (name) AS (SELECT MIN(segment) FROM payloads UNION ALL "
            "SELECT (SELECT MIN(segment) FROM payloads WHERE segment > name) FROM names WHERE name NOT NULL) "
            "SELECT name FROM names WHERE name NOT NULL"
        )
        return {row["name"] for row in rows}


_COUNTERS = """
CREATE TABLE IF NOT EXISTS server_sessions (
    session INTEGER PRIMARY KEY,
    name TEXT NOT NULL,
    url TEXT NOT NULL,
    joined INTEGER NOT NULL,         -- token counter when the server joined
    counted INTEGER NOT NULL,        -- token counter at the last report
    accounted INTEGER NOT NULL,      -- tokens of the ledger's groups when the report was requested
    uncounted INTEGER NOT NULL DEFAULT 0,  -- upper bound of tokens sampled after the report
    over INTEGER NOT NULL DEFAULT 0  -- 1 once the server has left or is lost
);
"""


class ServerCounters:
    """Token counters of one run's servers.
    `accounted()` returns the tokens that the run's groups account for."""

    def __init__(self, db: sqlite3.Connection, accounted: Callable[[], int] = lambda: 0) -> None:
        db.row_factory = sqlite3.Row
        self._db = db
        self.accounted = accounted
        db.executescript(_COUNTERS)

    def join(self, name: str, url: str, counter: int) -> None:
        """Record that a server has joined.
        It continues its open session, unless the server was restarted meanwhile."""
        row = self._db.execute("SELECT * FROM server_sessions WHERE name = ? AND NOT over", (name,)).fetchone()
        if row is not None and row["url"] == url and row["counted"] <= counter:
            self.report(name, counter, self.accounted())
        else:
            self.end(name)
            insert = "INSERT INTO server_sessions (name, url, joined, counted, accounted) VALUES (?, ?, ?, ?, ?)"
            self._db.execute(insert, (name, url, counter, counter, self.accounted()))

    def report(self, name: str, counter: int, accounted: int) -> None:
        """Store a server's counter, and the value of `accounted` when the counter was requested."""
        self._db.execute(
            "UPDATE server_sessions SET counted = ?, accounted = ? WHERE name = ? AND NOT over",
            (counter, accounted, name),
        )

    def end(self, name: str, *, uncounted: int = 0) -> None:
        """Close the session of a server that has left, or is lost with up to `uncounted` unreported tokens."""
        update = "UPDATE server_sessions SET over = 1, uncounted = uncounted + ? WHERE name = ? AND NOT over"
        self._db.execute(update, (uncounted, name))

    def resume(self) -> None:
        """Continue after a restart of the controller.
        Servers may have ended meanwhile. Then no counter includes the tokens that groups gained since the last
        report."""
        self._db.execute(
            "UPDATE server_sessions SET uncounted = uncounted + ? - accounted "
            "WHERE session = (SELECT session FROM server_sessions WHERE NOT over ORDER BY accounted LIMIT 1)",
            (self.accounted(),),
        )

    def abandon(self) -> None:
        """Close all sessions, because the servers' last reports and the groups' later tokens were lost.
        Servers that still run begin new sessions."""
        self.resume()
        self._db.execute("UPDATE server_sessions SET over = 1 WHERE NOT over")

    def generated(self) -> int:
        """Tokens counted by the servers since they joined."""
        return self._db.execute("SELECT COALESCE(SUM(counted - joined), 0) FROM server_sessions").fetchone()[0]

    def uncounted(self) -> int:
        """Upper bound on the tokens that the servers sampled and never reported."""
        return self._db.execute("SELECT COALESCE(SUM(uncounted), 0) FROM server_sessions").fetchone()[0]
