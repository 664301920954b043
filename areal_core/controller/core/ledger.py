"""The trajectory ledger: every group's state, in SQLite, so that a killed controller loses nothing.

A group goes WAITING -> INFLIGHT -> READY -> CONSUMED, or to DROPPED with a reason. Every public method is one
transaction. Rows are small: they hold a payload's place (tables.py), not the payload. The ledger forgets this place
once a committed checkpoint makes the payload obsolete. The token ledger compares the tokens of the groups with the
servers' own counters (tables.py).

The ledger stays small however long the run is. Triggers count every group in `totals`, by state and reason, as its row
changes. Counting methods read only `totals`. `prune` deletes the rows that no replay needs. No trigger follows a
deletion, so the counts of deleted rows remain.

Each step has one fixed batch. The first call for a step picks its groups. Every later call returns the same groups,
even after a restart. The ledger syncs a fixed batch to disk before anyone trains on it. After a power failure the run
repeats everything later than the last sync. `sync` makes the end of the run durable.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Generator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from areal_core.controller.core.tables import PayloadIndex, Place, PublishedVersions, RunNotes, ServerCounters
from areal_core.errors import LedgerError
from areal_core.storage import durable
from areal_core.types import (
    FORMAT,
    BatchManifest,
    GroupState,
    GroupSummary,
    PolicyVersion,
    Tally,
    TokenLedger,
)


def _count(row: str, sign: str) -> str:
    """Return SQL that adds a row of `groups` to the totals, or subtracts it."""
    return f"""
    INSERT INTO totals VALUES ({row}.state, COALESCE({row}.reason, ''),
        {sign}1, {sign}{row}.tokens, {sign}{row}.lost_tokens, {sign}{row}.unread_tokens)
    ON CONFLICT DO UPDATE SET groups = groups + excluded.groups, tokens = tokens + excluded.tokens,
        lost_tokens = lost_tokens + excluded.lost_tokens, unread_tokens = unread_tokens + excluded.unread_tokens;"""


_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS groups (
    group_id INTEGER PRIMARY KEY,
    prompt_index INTEGER NOT NULL,
    requeues INTEGER NOT NULL,            -- how often this prompt was queued again
    state TEXT NOT NULL,
    reason TEXT,                          -- reason why the group was dropped
    admission INTEGER UNIQUE,             -- order of admission; NULL while waiting
    tries INTEGER NOT NULL DEFAULT 0,     -- failed attempts
    step INTEGER,                         -- step of the batch with this group, once consumed
    tokens INTEGER NOT NULL DEFAULT 0,    -- sampled tokens of its completions, without failed attempts
    lost_tokens INTEGER NOT NULL DEFAULT 0,  -- tokens sampled by failed attempts
    unread_tokens INTEGER NOT NULL DEFAULT 0,  -- upper bound of tokens in unreadable responses
    unsettled INTEGER NOT NULL DEFAULT 0, -- 1 while servers may sample for it; `tokens` is not final
    min_version INTEGER,                  -- of its tokens; until it is ready, the version at its admission
    max_version INTEGER, ready_version INTEGER,
    summary BLOB  -- GroupSummary, as JSON
);
CREATE INDEX IF NOT EXISTS groups_by_state ON groups (state, admission);
CREATE INDEX IF NOT EXISTS groups_by_age ON groups (state, min_version, admission);
CREATE INDEX IF NOT EXISTS groups_by_step ON groups (step, admission);
CREATE INDEX IF NOT EXISTS groups_by_prompt ON groups (prompt_index);
CREATE INDEX IF NOT EXISTS groups_unsettled ON groups (group_id) WHERE unsettled;
CREATE TABLE IF NOT EXISTS totals (       -- of all groups, including deleted rows
    state TEXT NOT NULL, reason TEXT NOT NULL,  -- '' unless dropped
    groups INTEGER NOT NULL, tokens INTEGER NOT NULL, lost_tokens INTEGER NOT NULL, unread_tokens INTEGER NOT NULL,
    PRIMARY KEY (state, reason)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS cut (          -- rollouts ended by the system; their tokens are not trained on
    reason TEXT NOT NULL, length INTEGER NOT NULL,  -- tokens of the rollout, rounded up to a power of two
    rollouts INTEGER NOT NULL,
    PRIMARY KEY (reason, length)
) WITHOUT ROWID;
CREATE TRIGGER IF NOT EXISTS groups_inserted AFTER INSERT ON groups BEGIN {_count("NEW", "+")} END;
CREATE TRIGGER IF NOT EXISTS groups_updated
AFTER UPDATE OF state, reason, tokens, lost_tokens, unread_tokens ON groups
BEGIN {_count("OLD", "-")} {_count("NEW", "+")} END;
"""
# Keeps the rows with the highest group id and prompt index, because new groups count on from them. Also keeps the rows
# of the last step whose payloads are forgotten: it may be the last step of the ledger.
_PRUNE = """
DELETE FROM groups WHERE group_id IN (
    SELECT group_id FROM groups
    WHERE (step < (SELECT step FROM forgotten) OR (state = 'dropped' AND NOT unsettled))
    AND +group_id < (SELECT MAX(group_id) FROM groups)
    AND +prompt_index < (SELECT MAX(prompt_index) FROM groups)
    LIMIT ?
)
"""
_AT_ONCE = 128  # rows that one call of `free` or `prune` deletes, in 1 to 2 ms
_NOTHING = Tally()
_BATCHES_KEPT = 2  # ranks fetch a batch while others still request the previous one


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmittedGroup:
    """An admitted group: its completions may be generated."""

    group_id: int
    prompt_index: int
    requeues: int
    admission: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """How to select the groups of a batch (paper, section 4.1; the gate alone bounds only the average).

    - admit: the READY groups that were admitted first. A straggler may exceed eta.
    - wait: the READY groups with the oldest tokens. The batch waits if the remaining groups could then not all be
      trained within eta.
    - drop: like admit, but drops a group whose oldest token would exceed eta. Its prompt is queued again, at most
      `max_requeues` times.
    """

    groups: int  # P, groups a batch
    rule: str
    max_staleness: int  # eta
    max_requeues: int


def length_step(tokens: int) -> int:
    """Round a length in tokens up to a power of two, for counting."""
    return 1 << max(0, tokens - 1).bit_length()


class TrajectoryLedger:
    """The ledger of one run: groups, their `payloads`, `versions`, `notes` and server `counters`.

    Not thread-safe: only the controller's event loop may use it. Raises LedgerError for a file of another format.
    """

    def __init__(self, path: Path | str, *, group_size: int) -> None:
        self._path = Path(path)
        self._db = sqlite3.connect(path, isolation_level=None)
        self._db.row_factory = sqlite3.Row
        found = self._value("PRAGMA user_version")
        if found != FORMAT and self._value("SELECT COUNT(*) FROM sqlite_master"):
            self._db.close()
            raise LedgerError(
                f"{path}: the ledger has format {found}, must be {FORMAT}; start the run under another id"
            )
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._db.executescript(f"PRAGMA user_version = {FORMAT}; {_SCHEMA}")
        self.notes = RunNotes(self._db)
        self.payloads = PayloadIndex(self._db)
        self.versions = PublishedVersions(self._db)
        self.counters = ServerCounters(self._db, lambda: self.tokens().accounted)
        self._group_size = group_size
        self._batches: dict[int, BatchManifest] = {}  # by step: those read last, which every rank requests

    def close(self) -> None:
        self._db.close()

    def sync(self) -> None:
        """Make all writes durable by syncing SQLite's log.
        SQLite itself syncs pages that it has moved out of the log. Raises OSError."""
        durable.sync(self._path.with_name(f"{self._path.name}-wal"))
        durable.sync(self._path.parent)

    def flush(self) -> None:
        """Copy SQLite's log into the database file.
        This waits for the disk, so call it from a thread. It opens its own connection."""
        with closing(sqlite3.connect(self._path)) as db:
            db.execute("PRAGMA wal_checkpoint(PASSIVE)")

    def find_damage(self) -> str | None:
        """Check the whole file. Returns a description of the damage, or None."""
        found = self._db.execute("PRAGMA integrity_check(1)").fetchone()[0]
        return None if found == "ok" else str(found)

    # -- admission ---------------------------------------------------------------------------------------------

    @property
    def admitted(self) -> int:
        """N_r of Eq. 3: trajectories of all running, ready and consumed groups.
        Dropped groups free their slots."""
        admitted = "SELECT COALESCE(SUM(groups), 0) FROM totals WHERE state IN ('inflight', 'ready', 'consumed')"
        return self._value(admitted) * self._group_size

    def admit(self, *, version: int) -> AdmittedGroup:
        """Admit the oldest waiting group, or the next prompt of the source if no group waits.
        `version` is the oldest version that may sample for the group."""
        with self._transaction():
            waiting = self._db.execute("SELECT MIN(group_id) FROM groups WHERE state = 'waiting'").fetchone()[0]
            if waiting is None:
                prompt_index = self._value("SELECT COALESCE(MAX(prompt_index), -1) + 1 FROM groups")
                waiting = self._insert_waiting(prompt_index, requeues=0)
            self._db.execute(
                "UPDATE groups SET state = 'inflight', unsettled = 1, min_version = ?, admission = "
                "(SELECT COALESCE(MAX(admission), -1) + 1 FROM groups) WHERE group_id = ?",
                (version, waiting),
            )
            return self._admitted("group_id = ?", waiting)[0]

    def inflight(self) -> list[AdmittedGroup]:
        """Groups in flight, oldest first. A restarted controller sends them again."""
        return self._admitted("state = 'inflight'")

    def count_failed_attempt(self, group_id: int, lost: Tally = _NOTHING) -> int:
        """Count a failed attempt of a running group, and its `lost` tokens.
        Returns the number of failed attempts."""
        with self._transaction():
            self._add_lost_tokens(group_id, lost)
            self._db.execute("UPDATE groups SET tries = tries + 1 WHERE group_id = ?", (group_id,))
            return self._row(group_id)["tries"]

    def add_lost_tokens(self, group_id: int, lost: Tally) -> None:
        """Record lost tokens of a running group without counting a failed attempt."""
        with self._transaction():
            self._add_lost_tokens(group_id, lost)

    def _add_lost_tokens(self, group_id: int, lost: Tally) -> None:
        self._expect(group_id, GroupState.INFLIGHT)
        self._db.execute(
            "UPDATE groups SET lost_tokens = lost_tokens + ?, unread_tokens = unread_tokens + ? WHERE group_id = ?",
            (lost.tokens, lost.unread, group_id),
        )

    def count_cut(self, reason: str, lengths: Collection[int]) -> None:
        """Count rollouts that the system ended early, by their `lengths` in tokens."""
        with self._transaction():
            self._count_cut(reason, lengths)

    def cut(self) -> dict[str, int]:
        """Rollouts that the system ended early, by reason and length: `deadline/256` had 129 to 256 tokens."""
        rows = self._db.execute("SELECT reason || '/' || length, rollouts FROM cut ORDER BY reason, length")
        return dict(rows.fetchall())

    def settle(self, group_id: int, sampled: Tally) -> None:
        """Record a group's sampled tokens before it is dropped, after that, or at the end of the run."""
        with self._transaction():
            self._expect(group_id, GroupState.INFLIGHT, GroupState.DROPPED)
            self._db.execute(
                "UPDATE groups SET tokens = ?, unread_tokens = unread_tokens + ?, unsettled = 0 WHERE group_id = ?",
                (sampled.tokens, sampled.unread, group_id),
            )

    def resume(self, most_tokens: int) -> None:
        """Continue with this ledger after a restart of the controller.

        Unless the run has ended, its running groups start again, and their tokens are lost. `most_tokens` bounds the
        uncounted tokens of each group."""
        with self._transaction():
            self._db.execute("UPDATE groups SET unread_tokens = unread_tokens + ? WHERE unsettled", (most_tokens,))
            self._db.execute("UPDATE groups SET unsettled = 0 WHERE unsettled AND state != 'inflight'")
            if self.notes.ending is None:
                again = "lost_tokens = lost_tokens + tokens, tokens = 0, unsettled = 1, min_version = ?"
                self._db.execute(f"UPDATE groups SET {again} WHERE state = 'inflight'", (self.versions.last(),))
            self.counters.resume()

    def ready(self, group_id: int, summary: GroupSummary, payload: Place, *, version: int) -> None:
        """Put a scored group into the buffer. `version` is the current policy version."""
        with self._transaction():
            self._expect(group_id, GroupState.INFLIGHT)
            self._db.execute(
                "UPDATE groups SET state = 'ready', unsettled = 0, tokens = ?, lost_tokens = lost_tokens + ?, "
                "min_version = ?, max_version = ?, ready_version = ?, summary = ? WHERE group_id = ?",
                (
                    summary.tokens,
                    summary.unused_tokens,
                    summary.min_version,
                    summary.max_version,
                    max(version, summary.max_version),  # `version` is the lowest version of all servers
                    msgspec.json.encode(summary),
                    group_id,
                ),
            )
            self.payloads.put(group_id, payload)

    def drop(self, group_id: int, reason: str, *, requeue: bool = False) -> None:
        """Drop a running or buffered group, which frees its slot. With `requeue` its prompt is queued again."""
        with self._transaction():
            self._expect(group_id, GroupState.INFLIGHT, GroupState.READY)
            self._drop(group_id, reason, requeue=requeue)

    # -- consumption -------------------------------------------------------------------------------------------

    def batch(self, step: int) -> BatchManifest | None:
        """Return the batch of `step`, or None if it is not fixed.
        Repeated calls return the same object while it is cached."""
        if (known := self._batches.get(step)) is not None:
            return known
        rows = self._db.execute(
            "SELECT group_id, summary, ready_version, COALESCE(segment, '') AS segment, COALESCE(start, 0) AS start "
            "FROM groups LEFT JOIN payloads USING (group_id) WHERE step = ? ORDER BY admission",  # '': forgotten
            (step,),
        ).fetchall()
        if not rows:
            return None
        groups = [msgspec.json.decode(row["summary"]) | dict(row) for row in rows]
        manifest = msgspec.convert({"step": step, "groups": groups}, BatchManifest)
        self._batches[step] = manifest
        if len(self._batches) > _BATCHES_KEPT:
            del self._batches[next(iter(self._batches))]
        return manifest

    def fix_batch(self, step: int, selection: Selection) -> BatchManifest | None:
        """Fix the batch of `step`; None if too few groups are ready, or if the batch must wait.
        Steps are fixed in order. Raises LedgerError for another step, or if the batch would exceed the staleness bound
        of its rule."""
        with self._transaction(synced=True):
            last = self.last_step()
            if step != last + 1:
                raise LedgerError(f"step: must be {last + 1}, the next batch, got {step}")
            if selection.rule == "drop":
                self._drop_stale(step, selection)
            order = "min_version, admission" if selection.rule == "wait" else "admission"
            rows = self._db.execute(
                f"SELECT group_id, min_version FROM groups WHERE state = 'ready' ORDER BY {order} LIMIT ?",
                (selection.groups,),
            ).fetchall()
            if len(rows) < selection.groups or (selection.rule == "wait" and self._must_wait(step, selection)):
                return None
            lag = step - 1 - min(row["min_version"] for row in rows)
            if selection.rule != "admit" and lag > selection.max_staleness:
                raise LedgerError(
                    f"step: batch {step} would train on tokens {lag} versions old, above rollout.max_staleness"
                )
            self._db.executemany(
                "UPDATE groups SET state = 'consumed', step = ? WHERE group_id = ?",
                [(step, row["group_id"]) for row in rows],
            )
        return self.batch(step)

    def payload(self, group_id: int) -> Place:
        """Place of the packed trajectories of a group. Raises LedgerError once they are freed."""
        place = self.payloads.get(group_id)
        if place is None:
            raise LedgerError(f"group_id: the payload of group {group_id} is no longer stored")
        return place

    def step_of(self, group_id: int) -> int | None:
        """The step that consumed a group; None if no step has, or once the group's row is pruned."""
        return self._db.execute("SELECT MAX(step) FROM groups WHERE group_id = ?", (group_id,)).fetchone()[0]

    def summaries(self, step: int) -> list[GroupSummary]:
        """Summaries of the groups of a fixed batch, oldest first."""
        rows = self._db.execute("SELECT summary FROM groups WHERE step = ? ORDER BY admission", (step,))
        return [_summary(row) for row in rows]

    def prompt_indices(self, step: int) -> list[int]:
        """Prompt-source indices of the groups of a fixed batch, oldest first."""
        rows = self._db.execute("SELECT prompt_index FROM groups WHERE step = ? ORDER BY admission", (step,))
        return [row["prompt_index"] for row in rows]

    def free(self, step: int) -> bool:
        """Forget the payloads of steps up to `step`, obsolete after a committed checkpoint.
        One call handles a few steps. Returns whether more remain; then call again."""
        with self._transaction():
            self._batches.clear()
            return self.payloads.forget_consumed(step, _AT_ONCE)

    def prune(self, kept_versions: Collection[int] = ()) -> bool:
        """Delete rows that only the totals need.
        One call deletes a few. Returns whether it deleted any; then call again.

        It deletes dropped groups for which no server samples, and the rows of steps before the last forgotten one.
        These are consumed groups, versions other than the base model and `kept_versions`, and notes of versions without
        a score. Do not call this with `rollout.retain=all`, which keeps the payloads of all steps: these rows hold
        their places."""
        before = self.payloads.forgotten
        with self._transaction():
            pruned = self._db.execute(_PRUNE, (_AT_ONCE,)).rowcount
            pruned += self.versions.prune(before, kept_versions, _AT_ONCE)
            pruned += self.notes.prune(before - 1, kept_versions, _AT_ONCE)  # `record_step` reads the previous step
        return pruned > 0

    # -- versions ----------------------------------------------------------------------------------------------

    def publish(self, version: PolicyVersion) -> str:
        """Record a published version.

        Returns "new", or "same" if it was published before with this content, or is pruned. Returns "replaced" if its
        content differs from the version published before under its number. Then a new incarnation begins. Raises
        LedgerError if the version does not follow the last one.
        """
        with self._transaction():
            last = self.versions.last()
            if version.version > last + 1:
                raise LedgerError(f"version: must be at most {last + 1}, got {version.version}")
            known = self.versions.digest(version.version)
            if known is None and 0 < version.version < last:
                return "same"  # a late message: the version is pruned
            outcome = "new" if known is None else "same" if known == version.digest else "replaced"
            if outcome == "replaced":
                self._new_incarnation(version.version)
            self.versions.put(version)
            return outcome

    def rewind(self, version: int) -> None:
        """Forget the versions after this one, because their files were lost with their machine.

        If there are any, a new incarnation of the run begins: groups with tokens of later versions, and later batches,
        start again. Servers that survived the machine begin new sessions."""
        with self._transaction():
            self.counters.abandon()
            if self.versions.last() > version:
                self._new_incarnation(version + 1)
                self.versions.forget_after(version)

    def drop_damaged(self, group_id: int) -> None:
        """Drop a buffered or consumed group whose payload is damaged, and queue its prompt again.
        If the group is part of a batch, this batch and all later ones are dissolved. If that batch's version was
        already published, a new incarnation of the run begins."""
        with self._transaction():
            self._expect(group_id, GroupState.READY, GroupState.CONSUMED)
            self._batches.clear()
            step = self._row(group_id)["step"]
            if step is not None:
                if self.versions.last() >= step:
                    self._new_incarnation(step)
                    self.versions.forget_after(step - 1)
                self._db.execute("UPDATE groups SET state = 'ready', step = NULL WHERE step >= ?", (step,))
            self._drop(group_id, "damaged", requeue=True)

    # -- queries -----------------------------------------------------------------------------------------------

    def tokens(self) -> TokenLedger:
        """The token ledger: sampled tokens by the state of their group, and the servers' own count."""
        row = self._db.execute(
            "SELECT COALESCE(SUM(CASE WHEN state = 'consumed' THEN tokens END), 0) AS consumed,"
            " COALESCE(SUM(CASE WHEN state = 'dropped' THEN tokens END), 0) + COALESCE(SUM(lost_tokens), 0) AS dropped,"
            " COALESCE(SUM(CASE WHEN state = 'ready' THEN tokens END), 0) AS buffered,"
            " COALESCE(SUM(CASE WHEN state IN ('inflight', 'waiting') THEN tokens END), 0) AS in_flight,"
            " COALESCE(SUM(unread_tokens), 0) AS allowance FROM totals"
        ).fetchone()
        values = dict(row) | {"allowance": row["allowance"] + self.counters.uncounted()}
        return TokenLedger(generated=self.counters.generated(), **values)

    def counts(self) -> dict[GroupState, int]:
        """Number of groups by state."""
        rows = dict(self._db.execute("SELECT state, SUM(groups) FROM totals GROUP BY state").fetchall())
        return {state: rows.get(state.value, 0) for state in GroupState}

    def dropped(self) -> dict[str, int]:
        """Number of dropped groups by reason."""
        rows = self._db.execute("SELECT reason, groups FROM totals WHERE state = 'dropped' ORDER BY reason")
        return dict(rows.fetchall())

    def last_step(self) -> int:
        """The last step with a fixed batch; 0 if there is none."""
        return self._value("SELECT COALESCE(MAX(step), 0) FROM groups")

    # -- inside ------------------------------------------------------------------------------------------------

    def _count_cut(self, reason: str, lengths: Collection[int]) -> None:
        self._db.executemany(
            "INSERT INTO cut VALUES (?, ?, 1) ON CONFLICT DO UPDATE SET rollouts = rollouts + 1",
            [(reason, length_step(length)) for length in lengths],
        )

    def _insert_waiting(self, prompt_index: int, *, requeues: int) -> int:
        cursor = self._db.execute(
            "INSERT INTO groups (prompt_index, requeues, state) VALUES (?, ?, 'waiting')", (prompt_index, requeues)
        )
        assert cursor.lastrowid is not None
        return cursor.lastrowid

    def _drop(self, group_id: int, reason: str, *, requeue: bool) -> None:
        row = self._row(group_id)
        self._db.execute(
            "UPDATE groups SET state = 'dropped', reason = ?, step = NULL WHERE group_id = ?", (reason, group_id)
        )
        self.payloads.forget(group_id)
        if requeue:
            self._insert_waiting(row["prompt_index"], requeues=row["requeues"] + 1)

    def _must_wait(self, step: int, selection: Selection) -> bool:
        """Whether the batch of `step` must wait for a running group, so that no token exceeds eta.

        A group with tokens of version v is due at step v + eta + 1, the last step that may train on it. The steps after
        `step`, up to s, take (s - step) P groups. At most so many of the remaining groups may be due by s. Taking the
        earliest due groups first leaves the fewest for every s. Proof: docs/algorithm.md, "When a batch waits"."""
        ages = self._db.execute(
            "SELECT min_version, COUNT(*) AS groups, SUM(state = 'ready') AS ready FROM groups"
            " WHERE state IN ('inflight', 'ready') GROUP BY min_version ORDER BY min_version"
        ).fetchall()
        free, left = selection.groups, 0
        for age in ages:
            taken = min(free, age["ready"])
            free -= taken
            left += age["groups"] - taken
            later_steps = max(0, age["min_version"] + selection.max_staleness + 1 - step)
            if left > later_steps * selection.groups:
                return any(each["groups"] > each["ready"] for each in ages)
        return False

    def _drop_stale(self, step: int, selection: Selection) -> None:
        oldest_allowed = step - 1 - selection.max_staleness
        rows = self._db.execute(
            "SELECT group_id, requeues, summary FROM groups WHERE state = 'ready' AND min_version < ? "
            "ORDER BY admission",
            (oldest_allowed,),
        ).fetchall()
        for row in rows:
            self._count_cut("stale", _summary(row).trained_lengths)
            self._drop(row["group_id"], "stale", requeue=row["requeues"] < selection.max_requeues)

    def _new_incarnation(self, version: int) -> None:
        """Forget later versions and batches, and drop groups that may hold tokens of the old `version`.
        Running groups may hold them. The prompts of these groups are queued again."""
        self._batches.clear()
        self.notes.count_incarnation()
        self.versions.forget_after(version)
        self._db.execute("UPDATE groups SET state = 'ready', step = NULL WHERE step > ?", (version,))
        rows = self._db.execute(
            "SELECT group_id FROM groups WHERE state = 'inflight' OR (state = 'ready' AND max_version >= ?) "
            "ORDER BY admission",
            (version,),
        ).fetchall()
        for row in rows:
            self._drop(row["group_id"], "replaced", requeue=True)

    def _admitted(self, which: str, *parameters: int) -> list[AdmittedGroup]:
        columns = "SELECT group_id, prompt_index, requeues, admission FROM groups"
        rows = self._db.execute(f"{columns} WHERE {which} ORDER BY admission", parameters)
        return [AdmittedGroup(**dict(row)) for row in rows]

    def _row(self, group_id: int) -> sqlite3.Row:
        row = self._db.execute("SELECT * FROM groups WHERE group_id = ?", (group_id,)).fetchone()
        if row is None:
            raise LedgerError(f"group_id: group {group_id} does not exist")
        return row

    def _expect(self, group_id: int, *states: GroupState) -> None:
        state = self._row(group_id)["state"]
        if state not in states:
            raise LedgerError(f"group_id: group {group_id} is {state}, not {' or '.join(states)}")

    def _value(self, query: str, *parameters: Any) -> int:
        return int(self._db.execute(query, parameters).fetchone()[0])

    @contextmanager
    def _transaction(self, *, synced: bool = False) -> Generator[None]:
        """Run a transaction.
        A `synced` one survives a power failure, with all earlier ones; others survive the process."""
        self._db.execute(f"PRAGMA synchronous = {'FULL' if synced else 'NORMAL'}")
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:  # on a full disk SQLite has already rolled back
                self._db.execute("ROLLBACK")
            raise


def snapshot(source: Path, target: Path, consumed: int | None = None) -> set[str]:
    """Copy a ledger in use, consistently, to `target`.
    Returns the names of the segments that hold its payloads.

    Runs in any thread: it opens its own connections. `consumed`, the checkpoint's step, makes the copy small. The copy
    forgets the payloads of steps up to `consumed`, and prunes the groups of earlier steps. A run restored from this
    checkpoint trains only later steps, and other checkpoints have their own copies. None keeps all rows, as
    `rollout.retain=all` requires."""
    target.unlink(missing_ok=True)
    reader = sqlite3.connect(f"{source.absolute().as_uri()}?mode=rw", uri=True)  # this mode creates no empty file
    writer = sqlite3.connect(target, isolation_level=None)
    writer.row_factory = sqlite3.Row
    try:
        reader.backup(writer)
        index = PayloadIndex(writer)
        if consumed is not None:
            writer.execute("PRAGMA journal_mode = OFF")  # after a failure the caller makes a new copy
            writer.execute("PRAGMA synchronous = OFF")
            index.forget_consumed(consumed)
            writer.execute(_PRUNE, (-1,))
            writer.execute("VACUUM")
        return index.segments()
    finally:
        reader.close()
        writer.close()


def _summary(row: sqlite3.Row) -> GroupSummary:
    return msgspec.json.decode(row["summary"], type=GroupSummary)
