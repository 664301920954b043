"""A run's record of its metrics, and its queue to the tracking server, in one SQLite file.

Several processes open the file. Metric points are keyed (run, key, step). Until a point is first attempted, a later
write replaces it. Then it is frozen, so that sending it again after a failure only repeats a value that the server may
hold. Rejected points are not sent again.

Points stay as the run's record, sent or not: about 200 bytes each, 14 kB for a step of 70 curves. Of a sent document
only a digest stays. The size of waiting documents is bounded.
"""

from __future__ import annotations

import hashlib
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
from typing import Any, Literal, get_args

from areal_core.errors import TrackingError
from areal_core.types import MetricRow

DocumentKind = Literal["dataset_report", "evaluation", "staleness_histogram", "summary", "trajectories"]
EndStatus = Literal["FINISHED", "FAILED", "KILLED"]

_KEY = re.compile(r"[\w\- ][\w\-. /]{0,249}")  # metric names that MLflow accepts
_ATTEMPTED, _SETTLED = 1, 2  # states of a row; 0: not attempted yet
_MANY = ("trajectories", "staleness_histogram")  # documents that are written every few steps
_MAX_BYTES = 256 << 20  # size limit of waiting documents; above it none of _MANY is added

_SCHEMA = """
CREATE TABLE IF NOT EXISTS metrics (run TEXT NOT NULL, key TEXT NOT NULL, step INTEGER NOT NULL,
    value REAL,  -- NULL: not a number
    time_s REAL NOT NULL, state INTEGER NOT NULL DEFAULT 0, UNIQUE (run, key, step));
CREATE INDEX IF NOT EXISTS unsent ON metrics (run) WHERE state < 2;
CREATE TABLE IF NOT EXISTS documents (run TEXT NOT NULL, kind TEXT NOT NULL, step INTEGER NOT NULL, data TEXT NOT NULL,
    time_s REAL NOT NULL, state INTEGER NOT NULL DEFAULT 0, UNIQUE (run, kind, step));
CREATE TABLE IF NOT EXISTS ends (run TEXT PRIMARY KEY, status TEXT NOT NULL);
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A record for people: a table, the numbers of a plot, or a summary."""

    kind: DocumentKind
    step: int
    data: dict[str, Any]
    time_s: float  # seconds since the epoch


def points(step: int, values: Mapping[str, Any], *, ago_s: float = 0.0) -> list[MetricRow]:
    """Points of one step, time-stamped `ago_s` seconds before now, with values as plain numbers.
    Raises TrackingError naming a metric whose value is not a number."""
    now, rows = time.time() - ago_s, list[MetricRow]()
    for key, value in values.items():
        try:
            rows.append(MetricRow(key=str(key), step=step, value=float(value), time_s=now))
        except (TypeError, ValueError, ArithmeticError, RuntimeError) as error:  # RuntimeError comes from torch
            raise TrackingError(f"metric {key!r}: must be a number, got {value!r:.80}") from error
    return rows


class Outbox:
    """Metrics and documents of a run. Writers use methods up to `reopen`, the forwarder the others.

    Writing needs neither network nor MLflow. Safe between threads and between processes.
    """

    def __init__(self, path: Path, run_key: str, *, timeout_s: float = 30.0) -> None:
        """Open the file `path` for the run `run_key`, creating it if missing. Raises TrackingError.
        `timeout_s` bounds the wait for other writing processes."""
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
        """Queue points of curves. Raises TrackingError for an invalid key, after queueing all other points."""
        values: list[tuple[object, ...]] = []
        refused: str | None = None
        for row in rows:
            if not _KEY.fullmatch(row.key) or posixpath.normpath(row.key) != row.key:
                refused = row.key
                continue
            values.append((self._run, row.key, row.step, None if math.isnan(row.value) else row.value, row.time_s))
        self._write(
            "INSERT INTO metrics (run, key, step, value, time_s) VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE "
            "SET value = excluded.value, time_s = excluded.time_s WHERE state = 0",
            values,
        )
        if refused is not None:
            raise TrackingError(
                f"metric key {refused!r}: must be a relative path of up to 250 letters, digits, spaces, _ - . /"
            )

    def document(self, kind: str, step: int, data: Mapping[str, Any]) -> None:
        """Queue a document, replacing any of the same kind and step, sent or not. `data` by kind:

        - trajectories: {"rows": [{column: value, ...}, ...]}. It becomes a table with a row for each trajectory.
        - evaluation: {"file": path}, JSON. It becomes a table with a row for each problem; `step` is the version.
        - staleness_histogram: {"counts": {"0": tokens, "1": tokens, ...}}. It becomes a plot.
        - summary: the fields of RunSummary. They become a file and a few final metrics.
        - dataset_report: the dataset report, which becomes a file.

        Raises TrackingError for another kind, and for tables and plots once the outbox is full.
        """
        if kind not in get_args(DocumentKind):
            raise TrackingError(f"document kind {kind!r}: must be one of {', '.join(get_args(DocumentKind))}")
        self._check_room(kind)
        text = json.dumps(data)
        self._write(
            "INSERT INTO documents (run, kind, step, data, time_s) VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE "
            "SET data = excluded.data, time_s = excluded.time_s, state = 0 WHERE data NOT IN (excluded.data, ?)",
            [(self._run, kind, step, text, time.time(), _digest(text))],
        )

    def end(self, status: EndStatus) -> None:
        """Record how the run ended; nothing is added afterwards, so the forwarder finishes."""
        self._write("INSERT OR REPLACE INTO ends (run, status) VALUES (?, ?)", [(self._run, status)])

    def reopen(self) -> None:
        """Revoke an earlier `end`, for a resumed run."""
        self._write("DELETE FROM ends WHERE run = ?", [(self._run,)])

    def ended(self) -> EndStatus | None:
        rows = self._read("SELECT status FROM ends WHERE run = ?", self._run)
        return rows[0][0] if rows else None

    def unsent(self) -> int:
        """Number of waiting points and documents."""
        return sum(
            self._read(f"SELECT count(*) FROM {table} WHERE run = ? AND state < 2", self._run)[0][0]
            for table in ("metrics", "documents")
        )

    def history(self) -> dict[str, list[tuple[int, float]]]:
        """All points of all curves, sent or not: key -> [(step, value), ...] sorted by step."""
        curves: dict[str, list[tuple[int, float]]] = {}
        for key, step, value in self._read(
            "SELECT key, step, value FROM metrics WHERE run = ? ORDER BY key, step", self._run
        ):
            curves.setdefault(key, []).append((step, math.nan if value is None else value))
        return curves

    def mean(self, key: str) -> float | None:
        """The mean of a curve's points; None without points."""
        [[mean]] = self._read("SELECT avg(value) FROM metrics WHERE run = ? AND key = ?", self._run, key)
        return mean

    def attempt_metrics(self, limit: int) -> list[MetricRow]:
        """Freeze and return the oldest `limit` unsent points, previously attempted ones first."""
        self._write(
            f"UPDATE metrics SET state = {_ATTEMPTED} WHERE rowid IN "
            "(SELECT rowid FROM metrics WHERE run = ? AND state < 2 ORDER BY state DESC, rowid LIMIT ?)",
            [(self._run, limit)],
        )
        return self.attempted_metrics(limit)

    def attempted_metrics(self, limit: int = -1) -> list[MetricRow]:
        """The oldest `limit` attempted points (negative: all), which the server may or may not hold."""
        rows = self._read(  # the condition `state < 2` selects the partial index
            f"SELECT key, step, value, time_s FROM metrics WHERE run = ? AND state < 2 AND state = {_ATTEMPTED} "
            "ORDER BY rowid LIMIT ?",
            self._run,
            limit,
        )
        return [
            MetricRow(key=key, step=step, value=math.nan if value is None else value, time_s=time_s)
            for key, step, value, time_s in rows
        ]

    def settle_metrics(self, rows: Iterable[MetricRow]) -> None:
        """Mark points as settled: the server holds or rejects them."""
        self._write(
            f"UPDATE metrics SET state = {_SETTLED} WHERE run = ? AND key = ? AND step = ?",
            [(self._run, row.key, row.step) for row in rows],
        )

    def pending_document(self) -> Document | None:
        """The oldest waiting document, or None."""
        query = "SELECT kind, step, data, time_s FROM documents WHERE run = ? AND state < 2 ORDER BY rowid LIMIT 1"
        for kind, step, data, time_s in self._read(query, self._run):
            return Document(kind=kind, step=step, data=json.loads(data), time_s=time_s)
        return None

    def settle_document(self, document: Document) -> None:
        """Mark a document as settled unless it was replaced meanwhile, and keep only its digest.
        The digest recognises an equal document later."""
        which = (self._run, document.kind, document.step, document.time_s)
        self._write(
            f"UPDATE documents SET state = {_SETTLED}, data = ? WHERE run = ? AND kind = ? AND step = ? AND time_s = ?",
            [(_digest(json.dumps(document.data)), *which)],
        )

    def _check_room(self, kind: str) -> None:
        """Raise TrackingError for a frequent kind of document if too many bytes of documents wait."""
        pages, page_size = (self._read(f"PRAGMA {name}")[0][0] for name in ("page_count", "page_size"))
        if pages * page_size < _MAX_BYTES:  # the whole file is smaller: no closer look needed
            return
        waiting = self._read("SELECT TOTAL(LENGTH(data)) FROM documents WHERE run = ? AND state < 2", self._run)[0][0]
        if waiting > _MAX_BYTES and kind in _MANY:
            raise TrackingError(
                f"document {kind}: {_MAX_BYTES >> 20} MiB of documents are queued; tables and plots are skipped until "
                "the tracking server accepts some"
            )

    def _write(self, statement: str, values: Sequence[tuple[object, ...]]) -> None:
        with self._lock, self._db:
            self._db.executemany(statement, values)

    def _read(self, query: str, *values: object) -> list[Any]:
        with self._lock, closing(self._db.execute(query, values)) as cursor:
            return cursor.fetchall()


def curves_of(path: Path, run: str) -> dict[str, list[tuple[int, float]]]:
    """The history of a run; empty if the run failed before it had an outbox."""
    if not path.exists():
        return {}
    with closing(Outbox(path, run)) as outbox:
        return outbox.history()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
