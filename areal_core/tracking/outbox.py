"""A run's own record of its metrics, and the queue to its tracking server: one SQLite file, open in several processes.

Metric points are keyed (run, key, step). Until a point is first attempted, a later write of it wins; from then on it is
frozen, so that sending it again after a failure can only repeat what the server may already hold.
"""

from __future__ import annotations

import json
import math
import posixpath
import re
import sqlite3
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from areal_core.errors import TrackingError
from areal_core.types import MetricRow

DocumentKind = Literal["census", "config", "evaluation", "model", "staleness_histogram", "summary", "trajectories"]
LabelKind = Literal["param", "tag"]
EndStatus = Literal["FINISHED", "FAILED", "KILLED"]

_DOCUMENT_FIELD = {
    "census": None,
    "config": None,
    "evaluation": "file",
    "model": "url",
    "staleness_histogram": "counts",
    "summary": None,
    "trajectories": "rows",
}
_END_STATUSES = ("FINISHED", "FAILED", "KILLED")
_KEY = re.compile(r"[\w\- ][\w\-. /]{0,249}")  # what MLflow takes as a metric's name
_ATTEMPTED, _SENT = 1, 2  # states of a row; 0: not attempted yet

_SCHEMA = """
CREATE TABLE IF NOT EXISTS metrics (run TEXT NOT NULL, key TEXT NOT NULL, step INTEGER NOT NULL,
    value REAL,  -- NULL: not a number
    time_s REAL NOT NULL, state INTEGER NOT NULL DEFAULT 0, UNIQUE (run, key, step));
CREATE INDEX IF NOT EXISTS unsent ON metrics (run) WHERE state < 2;
CREATE TABLE IF NOT EXISTS labels (run TEXT NOT NULL, kind TEXT NOT NULL, name TEXT NOT NULL, value TEXT NOT NULL,
    state INTEGER NOT NULL DEFAULT 0, UNIQUE (run, kind, name));
CREATE TABLE IF NOT EXISTS documents (run TEXT NOT NULL, kind TEXT NOT NULL, step INTEGER NOT NULL, data TEXT NOT NULL,
    time_s REAL NOT NULL, state INTEGER NOT NULL DEFAULT 0, UNIQUE (run, kind, step));
CREATE TABLE IF NOT EXISTS ends (run TEXT PRIMARY KEY, status TEXT NOT NULL);
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """Something for people to look at: a table, the numbers of a plot, a summary."""

    kind: DocumentKind
    step: int
    data: dict[str, Any]
    time_s: float  # seconds since the epoch


class Outbox:
    """The metrics, labels and documents of a run. The first half is for writers, the second for the one forwarder.

    Writing takes no network and no MLflow. Safe between threads and between processes.
    """

    def __init__(self, path: Path, run_key: str, *, timeout_s: float = 30.0) -> None:
        """Open the file `path`, made if absent, for the run `run_key`. `timeout_s` bounds the wait for another
        process that writes. Raises TrackingError."""
        self._run = run_key
        self._lock = threading.Lock()
        try:
            self._db = sqlite3.connect(path, timeout=timeout_s, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.executescript(_SCHEMA)
        except sqlite3.Error as error:
            raise TrackingError(f"can't open the outbox {path}: {error}") from error

    def close(self) -> None:
        self._db.close()

    def log(self, rows: Iterable[MetricRow]) -> None:
        """Queue points of curves. Raises TrackingError for a key that MLflow would refuse."""
        values: list[tuple[object, ...]] = []
        for row in rows:
            if not _KEY.fullmatch(row.key) or posixpath.normpath(row.key) != row.key:
                raise TrackingError(
                    f"metric key {row.key!r}: must be a relative path of up to 250 letters, digits, spaces, _ - . /"
                )
            values.append((self._run, row.key, row.step, None if math.isnan(row.value) else row.value, row.time_s))
        self._write(
            "INSERT INTO metrics (run, key, step, value, time_s) VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE "
            "SET value = excluded.value, time_s = excluded.time_s WHERE state = 0",
            values,
        )

    def document(self, kind: str, step: int, data: Mapping[str, Any]) -> None:
        """Queue a document; the same (kind, step) again replaces it, sent or not.

        "trajectories": {"rows": [{column: value, ...}, ...]}, a table with one row a trajectory;
        "evaluation": {"file": path}, likewise, with one row a problem, in a JSON file; the step is the version;
        "staleness_histogram": {"counts": {"0": tokens, "1": tokens, ...}}, a plot;
        "summary": the fields of RunSummary, a file and a few final metrics; "config", "census": a file;
        "model": {"name", "url", "run", "version", "accuracy", "held_out"}, a version of a registered model.
        """
        if kind not in _DOCUMENT_FIELD:
            raise TrackingError(f"document kind {kind!r}: must be one of {', '.join(_DOCUMENT_FIELD)}")
        field = _DOCUMENT_FIELD[kind]
        if field is not None and field not in data:
            raise TrackingError(f"document {kind}: needs the field {field!r}, got {', '.join(data) or 'none'}")
        self._write(
            "INSERT INTO documents (run, kind, step, data, time_s) VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE "
            "SET data = excluded.data, time_s = excluded.time_s, state = 0 WHERE data != excluded.data",
            [(self._run, kind, step, json.dumps(data), time.time())],
        )

    def params(self, params: Mapping[str, str]) -> None:
        """Queue parameters; as in MLflow the first value of a name stays."""
        self._write(
            "INSERT INTO labels (run, kind, name, value) VALUES (?, 'param', ?, ?) ON CONFLICT DO NOTHING",
            [(self._run, name, value) for name, value in params.items()],
        )

    def tags(self, tags: Mapping[str, str]) -> None:
        """Queue tags; a later value of a name replaces the earlier one."""
        self._write(
            "INSERT INTO labels (run, kind, name, value) VALUES (?, 'tag', ?, ?) ON CONFLICT DO UPDATE "
            "SET value = excluded.value, state = 0 WHERE value != excluded.value",
            [(self._run, name, value) for name, value in tags.items()],
        )

    def end(self, status: str) -> None:
        """Record how the run ended, after which nothing more comes: the forwarder finishes."""
        if status not in _END_STATUSES:
            raise TrackingError(f"end status {status!r}: must be one of {', '.join(_END_STATUSES)}")
        self._write("INSERT OR REPLACE INTO ends (run, status) VALUES (?, ?)", [(self._run, status)])

    def reopen(self) -> None:
        """Take an earlier `end` back: the run goes on."""
        self._write("DELETE FROM ends WHERE run = ?", [(self._run,)])

    def ended(self) -> EndStatus | None:
        rows = self._read("SELECT status FROM ends WHERE run = ?", self._run)
        return rows[0][0] if rows else None

    def unsent(self) -> int:
        """The number of points, labels and documents that wait."""
        return sum(
            self._read(f"SELECT count(*) FROM {table} WHERE run = ? AND state < 2", self._run)[0][0]
            for table in ("metrics", "labels", "documents")
        )

    def history(self) -> dict[str, list[tuple[int, float]]]:
        """All points of all curves, sent or not: key -> (step, value), by step."""
        curves: dict[str, list[tuple[int, float]]] = {}
        for key, step, value in self._read(
            "SELECT key, step, value FROM metrics WHERE run = ? ORDER BY key, step", self._run
        ):
            curves.setdefault(key, []).append((step, math.nan if value is None else value))
        return curves

    def attempt_metrics(self, limit: int) -> list[MetricRow]:
        """The oldest `limit` unsent points, frozen from here on; those that were attempted before come first."""
        self._write(
            f"UPDATE metrics SET state = {_ATTEMPTED} WHERE rowid IN "
            "(SELECT rowid FROM metrics WHERE run = ? AND state < 2 ORDER BY state DESC, rowid LIMIT ?)",
            [(self._run, limit)],
        )
        return self.attempted_metrics()

    def attempted_metrics(self) -> list[MetricRow]:
        """Points that were being sent when the forwarder failed or died: the server may hold them or not."""
        rows = self._read(  # the first condition names the partial index
            f"SELECT key, step, value, time_s FROM metrics WHERE run = ? AND state < 2 AND state = {_ATTEMPTED}",
            self._run,
        )
        return [
            MetricRow(key=key, step=step, value=math.nan if value is None else value, time_s=time_s)
            for key, step, value, time_s in rows
        ]

    def sent_metrics(self, rows: Iterable[MetricRow]) -> None:
        self._write(
            f"UPDATE metrics SET state = {_SENT} WHERE run = ? AND key = ? AND step = ?",
            [(self._run, row.key, row.step) for row in rows],
        )

    def pending_labels(self, kind: LabelKind, limit: int) -> dict[str, str]:
        query = "SELECT name, value FROM labels WHERE run = ? AND kind = ? AND state < 2 ORDER BY rowid LIMIT ?"
        return dict(self._read(query, self._run, kind, limit))

    def sent_labels(self, kind: LabelKind, labels: Mapping[str, str]) -> None:
        """Mark labels as sent, unless they have another value by now."""
        self._write(
            f"UPDATE labels SET state = {_SENT} WHERE run = ? AND kind = ? AND name = ? AND value = ?",
            [(self._run, kind, name, value) for name, value in labels.items()],
        )

    def pending_document(self) -> Document | None:
        """The oldest document that waits."""
        query = "SELECT kind, step, data, time_s FROM documents WHERE run = ? AND state < 2 ORDER BY rowid LIMIT 1"
        for kind, step, data, time_s in self._read(query, self._run):
            return Document(kind=kind, step=step, data=json.loads(data), time_s=time_s)
        return None

    def sent_document(self, document: Document) -> None:
        """Mark a document as sent, unless it was replaced by now."""
        self._write(
            f"UPDATE documents SET state = {_SENT} WHERE run = ? AND kind = ? AND step = ? AND time_s = ?",
            [(self._run, document.kind, document.step, document.time_s)],
        )

    def _write(self, statement: str, values: Sequence[tuple[object, ...]]) -> None:
        with self._lock, self._db:
            self._db.executemany(statement, values)

    def _read(self, query: str, *values: object) -> list[Any]:
        with self._lock, closing(self._db.execute(query, values)) as cursor:
            return cursor.fetchall()
