"""The trajectory ledger: the state of every group, kept in SQLite so that a killed controller forgets nothing.

A group goes WAITING -> INFLIGHT -> READY -> CONSUMED, or to DROPPED with a reason. Every public method is one
transaction. Rows are small: a payload is somewhere else, the ledger has its place (tables.py), and forgets it once a
committed checkpoint no longer needs it. The token ledger compares the tokens of the groups with the servers' own count
(tables.py).

The ledger stays small however long a run is. Triggers count every group in `totals`, by state and reason, as its row
changes. Counting methods read `totals` alone. `fold` deletes the rows that no replay needs; no trigger follows a
deletion, so their counts stay.

Batches are fixed by step: the first call for a step picks its groups; every later call, also after a restart, gives the
same ones. What a batch was fixed with outlives the machine before anybody trains on it; all else that a loss of power
takes happened after that, and happens again. What the run ends with outlives it too (`sync`).
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
    """SQL that adds a row of `groups` to the totals, or takes it away again."""
    return f"""
    INSERT INTO totals VALUES ({row}.state, COALESCE({row}.reason, ''),
        {sign}1, {sign}{row}.tokens, {sign}{row}.lost_tokens, {sign}{row}.unread_tokens)
    ON CONFLICT DO UPDATE SET groups = groups + excluded.groups, tokens = tokens + excluded.tokens,
        lost_tokens = lost_tokens + excluded.lost_tokens, unread_tokens = unread_tokens + excluded.unread_tokens;"""


_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS groups (
    group_id INTEGER PRIMARY KEY,
    prompt_index INTEGER NOT NULL,
    requeues INTEGER NOT NULL,            -- times that this prompt was queued again before
    state TEXT NOT NULL,
    reason TEXT,                          -- why it was dropped
    admission INTEGER UNIQUE,             -- order of admission; NULL while waiting
    tries INTEGER NOT NULL DEFAULT 0,     -- failed tries
    step INTEGER,                         -- the batch that it belongs to, once consumed
    tokens INTEGER NOT NULL DEFAULT 0,    -- sampled tokens of its completions, of tries that did not fail
    lost_tokens INTEGER NOT NULL DEFAULT 0,  -- sampled by tries that failed
    unread_tokens INTEGER NOT NULL DEFAULT 0,  -- sampled, at most, in response bodies that could not be read
    unsettled INTEGER NOT NULL DEFAULT 0, -- servers may sample for it: `tokens` are still to come
    min_version INTEGER,                  -- of its tokens; the one in force at its admission until it is ready
    max_version INTEGER, ready_version INTEGER,
    summary BLOB  -- GroupSummary, as JSON
);
CREATE INDEX IF NOT EXISTS groups_by_state ON groups (state, admission);
CREATE INDEX IF NOT EXISTS groups_by_age ON groups (state, min_version, admission);
CREATE INDEX IF NOT EXISTS groups_by_step ON groups (step, admission);
CREATE INDEX IF NOT EXISTS groups_by_prompt ON groups (prompt_index);
CREATE INDEX IF NOT EXISTS groups_unsettled ON groups (group_id) WHERE unsettled;
CREATE TABLE IF NOT EXISTS totals (       -- of all groups, also those whose rows are folded
    state TEXT NOT NULL, reason TEXT NOT NULL,  -- '' unless dropped
    groups INTEGER NOT NULL, tokens INTEGER NOT NULL, lost_tokens INTEGER NOT NULL, unread_tokens INTEGER NOT NULL,
    PRIMARY KEY (state, reason)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS cut (          -- rollouts that the system has ended, whose tokens nobody trains on
    reason TEXT NOT NULL, length INTEGER NOT NULL,  -- tokens that it had, rounded up to a power of two
    rollouts INTEGER NOT NULL,
    PRIMARY KEY (reason, length)
) WITHOUT ROWID;
CREATE TRIGGER IF NOT EXISTS groups_inserted AFTER INSERT ON groups BEGIN {_count("NEW", "+")} END;
CREATE TRIGGER IF NOT EXISTS groups_updated
AFTER UPDATE OF state, reason, tokens, lost_tokens, unread_tokens ON groups
BEGIN {_count("OLD", "-")} {_count("NEW", "+")} END;
"""
# The rows with the highest group id and prompt stay, as new ones count on from them. So do those of the step up to
# which payloads are forgotten: it may be the last one.
_FOLD = """
DELETE FROM groups WHERE group_id IN (
    SELECT group_id FROM groups
    WHERE (step < (SELECT step FROM forgotten) OR (state = 'dropped' AND NOT unsettled))
    AND +group_id < (SELECT MAX(group_id) FROM groups)
    AND +prompt_index < (SELECT MAX(prompt_index) FROM groups)
    LIMIT ?
)
"""
_AT_ONCE = 128  # rows that one call of `free` or `fold` deletes: 1 to 2 ms
_NOTHING = Tally()
_BATCHES_KEPT = 2  # ranks fetch the next one while others still ask for the one before


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmittedGroup:
    """A group that is admitted: its completions may be generated."""

    group_id: int
    prompt_index: int
    requeues: int
    admission: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """How a batch is put together (paper, section 4.1; the policies bound what the aggregate rule does not).

    - admit: the READY groups that were admitted first. A straggler may exceed eta.
    - wait: the READY groups with the oldest tokens. Where the groups left could then not all be trained within eta, the
      batch waits.
    - drop: as admit, but a group whose oldest token would exceed eta is dropped. Its prompt is queued again, at most
      `max_requeues` times.
    """

    groups: int  # P
    rule: str
    max_staleness: int  # eta
    max_requeues: int


def length_step(tokens: int) -> int:
    """The power of two that a length is counted by: at least as many tokens, and less than twice as many."""
    return 1 << max(0, tokens - 1).bit_length()


class TrajectoryLedger:
    """The ledger of one run: its groups and the places of their `payloads`, its `versions`, its `notes` and the
    `counters` of its servers. Not thread-safe: it belongs to the controller's event loop. Raises LedgerError for a file
    of another format."""

    def __init__(self, path: Path | str, *, group_size: int) -> None:
        self._path = Path(path)
        self._db = sqlite3.connect(path, isolation_level=None)
        self._db.row_factory = sqlite3.Row
        found = self._value("PRAGMA user_version")
        if found != FORMAT and self._value("SELECT COUNT(*) FROM sqlite_master"):
            self._db.close()
            raise LedgerError(f"{path}: a ledger of format {found}, needed is {FORMAT}; start the run under another id")
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._db.executescript(f"PRAGMA user_version = {FORMAT}; {_SCHEMA}")
        self.notes = RunNotes(self._db)
        self.payloads = PayloadIndex(self._db)
        self.versions = PublishedVersions(self._db)
        self.counters = ServerCounters(self._db, lambda: self.tokens().accounted)
        self._group_size = group_size
        self._batches: dict[int, BatchManifest] = {}  # by step: those read last, which every rank asks for

    def close(self) -> None:
        self._db.close()

    def sync(self) -> None:
        """Have all that was written outlive the machine: SQLite's log, since it syncs itself what it takes out of it.
        Raises OSError."""
        durable.sync(self._path.with_name(f"{self._path.name}-wal"))
        durable.sync(self._path.parent)

    def flush(self) -> None:
        """Copy SQLite's log into the file, which waits for the disk: a bulk of changes would make the event loop wait.
        Runs in any thread, on a connection of its own."""
        with closing(sqlite3.connect(self._path)) as db:
            db.execute("PRAGMA wal_checkpoint(PASSIVE)")

    def damage(self) -> str | None:
        """What is wrong with the file, which may have been torn; None if nothing is. Reads all of it."""
        found = self._db.execute("PRAGMA integrity_check(1)").fetchone()[0]
        return None if found == "ok" else str(found)

    # -- admission ---------------------------------------------------------------------------------------------

    @property
    def admitted(self) -> int:
        """N_r of Eq. 3: trajectories admitted so far, finished and running; dropped groups gave their slots back."""
        admitted = "SELECT COALESCE(SUM(groups), 0) FROM totals WHERE state IN ('inflight', 'ready', 'consumed')"
        return self._value(admitted) * self._group_size

    def admit(self, *, version: int) -> AdmittedGroup:
        """Admit the oldest waiting group, or the next prompt of the source where none waits. `version`: the oldest that
        may sample for it."""
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
        """Groups that were admitted and are not finished, oldest first: what a restarted controller sends again."""
        return self._admitted("state = 'inflight'")

    def failed_try(self, group_id: int, lost: Tally = _NOTHING) -> int:
        """Count a failed try of a running group, and the tokens sampled for it that are lost with it; returns the
        number of failed tries."""
        with self._transaction():
            self._lose(group_id, lost)
            self._db.execute("UPDATE groups SET tries = tries + 1 WHERE group_id = ?", (group_id,))
            return self._row(group_id)["tries"]

    def lose_tokens(self, group_id: int, lost: Tally) -> None:
        """Record tokens sampled for a running group that are lost, without its fault."""
        with self._transaction():
            self._lose(group_id, lost)

    def _lose(self, group_id: int, lost: Tally) -> None:
        self._expect(group_id, GroupState.INFLIGHT)
        self._db.execute(
            "UPDATE groups SET lost_tokens = lost_tokens + ?, unread_tokens = unread_tokens + ? WHERE group_id = ?",
            (lost.tokens, lost.unread, group_id),
        )

    def count_cut(self, reason: str, lengths: Collection[int]) -> None:
        """Count rollouts that the system has ended, by the tokens that each had."""
        with self._transaction():
            self._count_cut(reason, lengths)

    def cut(self) -> dict[str, int]:
        """Rollouts that the system has ended, by reason and length: `deadline/256` had 129 to 256 tokens."""
        rows = self._db.execute("SELECT reason || '/' || length, rollouts FROM cut ORDER BY reason, length")
        return dict(rows.fetchall())

    def settle(self, group_id: int, sampled: Tally) -> None:
        """Record the tokens sampled for a running group that stays in flight as the run ends or is dropped next, or
        for one that was dropped while it ran."""
        with self._transaction():
            self._expect(group_id, GroupState.INFLIGHT, GroupState.DROPPED)
            self._db.execute(
                "UPDATE groups SET tokens = ?, unread_tokens = unread_tokens + ?, unsettled = 0 WHERE group_id = ?",
                (sampled.tokens, sampled.unread, group_id),
            )

    def resume(self, most_tokens: int) -> None:
        """A restarted controller goes on with this ledger. The groups that were running start again, unless the run
        has ended; the tokens sampled for them, at most `most_tokens` each where they were not counted, are lost."""
        with self._transaction():
            self._db.execute("UPDATE groups SET unread_tokens = unread_tokens + ? WHERE unsettled", (most_tokens,))
            self._db.execute("UPDATE groups SET unsettled = 0 WHERE unsettled AND state != 'inflight'")
            if self.notes.ending is None:
                again = "lost_tokens = lost_tokens + tokens, tokens = 0, unsettled = 1, min_version = ?"
                self._db.execute(f"UPDATE groups SET {again} WHERE state = 'inflight'", (self.versions.last(),))
            self.counters.resume()

    def ready(self, group_id: int, summary: GroupSummary, payload: Place, *, version: int) -> None:
        """A scored group enters the buffer while `version` is the policy version in force."""
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
                    max(version, summary.max_version),  # `version` is the lowest of all servers
                    msgspec.json.encode(summary),
                    group_id,
                ),
            )
            self.payloads.put(group_id, payload)

    def drop(self, group_id: int, reason: str, *, requeue: bool = False) -> None:
        """Drop a running or buffered group: its slot is free again, and its prompt is queued again if `requeue`."""
        with self._transaction():
            self._expect(group_id, GroupState.INFLIGHT, GroupState.READY)
            self._drop(group_id, reason, requeue=requeue)

    # -- consumption -------------------------------------------------------------------------------------------

    def batch(self, step: int) -> BatchManifest | None:
        """The batch of `step`, if it has been fixed: the same object as long as it is the same."""
        if (known := self._batches.get(step)) is not None:
            return known
        rows = self._db.execute(
            "SELECT group_id, summary, ready_version, COALESCE(segment, '') AS segment, COALESCE(start, 0) AS start "
            "FROM groups LEFT JOIN payloads USING (group_id) WHERE step = ? ORDER BY admission",  # '': it is forgotten
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
        """Fix the batch of `step` if enough groups are ready; None if they are not. Steps are fixed in order. Raises
        LedgerError where a rule that promises a bound would break it."""
        with self._transaction(synced=True):
            last = self.last_step()
            if step != last + 1:
                raise LedgerError(f"step: batch {step} can't be fixed, the next one is {last + 1}")
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
                    f"step: batch {step} would train on tokens of {lag} versions before, above max_staleness"
                )
            self._db.executemany(
                "UPDATE groups SET state = 'consumed', step = ? WHERE group_id = ?",
                [(step, row["group_id"]) for row in rows],
            )
        return self.batch(step)

    def payload(self, group_id: int) -> Place:
        """Where the packed trajectories of a group lie; LedgerError once they are freed."""
        place = self.payloads.get(group_id)
        if place is None:
            raise LedgerError(f"group_id: no payload is kept for group {group_id}")
        return place

    def step_of(self, group_id: int) -> int | None:
        """The step that has consumed a group; None while none has, or once its row is folded."""
        return self._db.execute("SELECT MAX(step) FROM groups WHERE group_id = ?", (group_id,)).fetchone()[0]

    def summaries(self, step: int) -> list[GroupSummary]:
        """The summaries of the groups of a fixed batch, oldest first."""
        rows = self._db.execute("SELECT summary FROM groups WHERE step = ? ORDER BY admission", (step,))
        return [_summary(row) for row in rows]

    def prompt_indices(self, step: int) -> list[int]:
        """Indices in the prompt source of the groups of a fixed batch, oldest first."""
        rows = self._db.execute("SELECT prompt_index FROM groups WHERE step = ? ORDER BY admission", (step,))
        return [row["prompt_index"] for row in rows]

    def free(self, step: int) -> bool:
        """Forget payloads that steps up to `step` consumed: a committed checkpoint makes them needless. One call takes
        a few steps. Returns whether more are left: then call again."""
        with self._transaction():
            self._batches.clear()
            return self.payloads.forget_consumed(step, _AT_ONCE)

    def fold(self, kept_versions: Collection[int] = ()) -> bool:
        """Delete rows of which only the totals are needed. One call deletes a few. Returns whether it found any: then
        call again.

        These rows are dropped groups that no server samples for any more, and what steps before the last forgotten one
        have left: consumed groups, versions other than the base model and `kept_versions`, and notes of versions that
        have no score. A run with `rollout.retain=all` must not call this: it promises to keep the payloads of all
        steps, and without these rows nobody finds them."""
        before = self.payloads.forgotten
        with self._transaction():
            folded = self._db.execute(_FOLD, (_AT_ONCE,)).rowcount
            folded += self.versions.fold(before, kept_versions, _AT_ONCE)
            folded += self.notes.fold(before - 1, kept_versions, _AT_ONCE)  # `published` asks for the step before
        return folded > 0

    # -- versions ----------------------------------------------------------------------------------------------

    def publish(self, version: PolicyVersion) -> str:
        """Record a published version.

        Returns "new", or "same" if it was published before with this content, or is folded. Returns "replaced" if its
        content differs from what was published under its number. Then all that depends on the old content starts again.
        """
        with self._transaction():
            last = self.versions.last()
            if version.version > last + 1:
                raise LedgerError(f"version: {version.version} can't follow {last}")
            known = self.versions.digest(version.version)
            if known is None and 0 < version.version < last:
                return "same"  # it is folded: a message that comes late
            outcome = "new" if known is None else "same" if known == version.digest else "replaced"
            if outcome == "replaced":
                self._new_incarnation(version.version)
            self.versions.put(version)
            return outcome

    def rewind(self, version: int) -> None:
        """Forget the versions after this one, whose weights are lost with their machine: a new incarnation of the run,
        unless there are none. What later versions sampled, and batches that they were to be trained on, start again;
        servers that have outlived that machine begin as new ones."""
        with self._transaction():
            self.counters.abandon()
            if self.versions.last() > version:
                self._new_incarnation(version + 1)
                self.versions.forget_after(version)

    def lose(self, group_id: int) -> None:
        """The payload of a buffered or consumed group turned out to be damaged: the group is dropped and its prompt
        queued again. A batch that it was part of is dissolved, with all later ones; where its version was published
        already, that is a new incarnation of the run."""
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
        """The token ledger: sampled tokens by the state of their group, beside the servers' own count."""
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
        """Groups by state."""
        rows = dict(self._db.execute("SELECT state, SUM(groups) FROM totals GROUP BY state").fetchall())
        return {state: rows.get(state.value, 0) for state in GroupState}

    def dropped(self) -> dict[str, int]:
        """Dropped groups by reason."""
        rows = self._db.execute("SELECT reason, groups FROM totals WHERE state = 'dropped' ORDER BY reason")
        return dict(rows.fetchall())

    def last_step(self) -> int:
        """The last step whose batch is fixed; 0 if none is."""
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
        """Whether the batch of `step` has to wait for a running group, so that no token exceeds eta.

        A group with tokens of version v is due at step v + eta + 1, the last that may train on it. The steps after this
        one, up to s, take (s - step) P groups: no more may be left that are due by s. Taking first what is due first
        leaves the fewest for every s. docs/algorithm.md has the proof, under "When a batch waits"."""
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
        """Forget what depends on the old content of `version`: later versions, batches fixed for later steps, and
        groups that hold its tokens, or may (the running ones). Their prompts are queued again."""
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
            raise LedgerError(f"group_id: there is no group {group_id}")
        return row

    def _expect(self, group_id: int, *states: GroupState) -> None:
        state = self._row(group_id)["state"]
        if state not in states:
            raise LedgerError(f"group_id: group {group_id} is {state}, not {' or '.join(states)}")

    def _value(self, query: str, *parameters: Any) -> int:
        return int(self._db.execute(query, parameters).fetchone()[0])

    @contextmanager
    def _transaction(self, *, synced: bool = False) -> Generator[None]:
        """`synced`: it outlives the machine, with all before it; else the process."""
        self._db.execute(f"PRAGMA synchronous = {'FULL' if synced else 'NORMAL'}")
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:  # SQLite itself has rolled back what met a full disk
                self._db.execute("ROLLBACK")
            raise


def snapshot(source: Path, target: Path, consumed: int | None = None) -> set[str]:
    """Copy a ledger in use, consistently, to `target`. Returns the names of the segments in which its payloads lie.
    Runs in any thread: it opens connections of its own.

    `consumed`, the checkpoint's step, makes the copy small: it forgets the payloads of steps up to that one, and folds
    the groups of earlier steps. A run that is restored from this checkpoint trains later steps only, and the other
    checkpoints have copies of their own. With None, as `rollout.retain=all` needs it, the copy has all rows."""
    target.unlink(missing_ok=True)
    reader = sqlite3.connect(f"{source.absolute().as_uri()}?mode=rw", uri=True)  # which makes no empty one
    writer = sqlite3.connect(target, isolation_level=None)
    writer.row_factory = sqlite3.Row
    try:
        reader.backup(writer)
        index = PayloadIndex(writer)
        if consumed is not None:
            writer.execute("PRAGMA journal_mode = OFF")  # whoever fails begins with another copy
            writer.execute("PRAGMA synchronous = OFF")
            index.forget_consumed(consumed)
            writer.execute(_FOLD, (-1,))
            writer.execute("VACUUM")
        return index.segments()
    finally:
        reader.close()
        writer.close()


def _summary(row: sqlite3.Row) -> GroupSummary:
    return msgspec.json.decode(row["summary"], type=GroupSummary)
