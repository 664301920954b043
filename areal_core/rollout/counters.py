"""The generation servers' own token counters, kept over the ends of servers and of controllers.

A server counts what it samples for the rollout, whatever becomes of it, and starts at 0 whenever it is started. A row
here is one *stay* of a server: from its join until it leaves or is lost. What all stays have counted is the servers'
figure of the token ledger, which knows nothing of groups.

A server that dies unasked takes tokens along that nobody has counted: those after its last report. The stay bounds
them, by what was in flight there since; so it does for what a controller had not stored when it was killed.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable

_SCHEMA = """
CREATE TABLE IF NOT EXISTS stays (
    stay INTEGER PRIMARY KEY,
    name TEXT NOT NULL,
    url TEXT NOT NULL,
    joined INTEGER NOT NULL,         -- its counter then
    counted INTEGER NOT NULL,        -- its counter at the last report
    accounted INTEGER NOT NULL,      -- tokens of the ledger's groups when it was asked for that
    uncounted INTEGER NOT NULL DEFAULT 0,  -- sampled after that, at most
    over INTEGER NOT NULL DEFAULT 0  -- it has left or is lost
);
"""


class ServerCounters:
    """The counters of one run's servers. `accounted` says how many tokens its groups have come to."""

    def __init__(self, db: sqlite3.Connection, accounted: Callable[[], int] = lambda: 0) -> None:
        db.row_factory = sqlite3.Row
        self._db = db
        self.accounted = accounted
        db.executescript(_SCHEMA)

    def join(self, name: str, url: str, counter: int) -> None:
        """A server takes work from now on. One that a controller before this one knew goes on counting, unless it was
        started again meanwhile."""
        row = self._open(name)
        if row is not None and row["url"] == url and row["counted"] <= counter:
            self.report(name, counter, self.accounted())
        else:
            self.end(name)
            insert = "INSERT INTO stays (name, url, joined, counted, accounted) VALUES (?, ?, ?, ?, ?)"
            self._db.execute(insert, (name, url, counter, counter, self.accounted()))

    def report(self, name: str, counter: int, accounted: int) -> None:
        """What a server's counter says; `accounted` by the time that it was asked."""
        self._db.execute(
            "UPDATE stays SET counted = ?, accounted = ? WHERE name = ? AND NOT over", (counter, accounted, name)
        )

    def end(self, name: str, *, uncounted: int = 0) -> None:
        """A server has left, or is lost with up to `uncounted` tokens that it had not reported."""
        update = "UPDATE stays SET over = 1, uncounted = uncounted + ? WHERE name = ? AND NOT over"
        self._db.execute(update, (uncounted, name))

    def resume(self) -> None:
        """Another controller goes on. Servers may have ended with the one before: then what groups have come to since
        their last report is in no counter."""
        self._db.execute(
            "UPDATE stays SET uncounted = uncounted + ? - accounted "
            "WHERE stay = (SELECT stay FROM stays WHERE NOT over ORDER BY accounted LIMIT 1)",
            (self.accounted(),),
        )

    def generated(self) -> int:
        """Tokens that the servers have counted since they joined."""
        return self._db.execute("SELECT COALESCE(SUM(counted - joined), 0) FROM stays").fetchone()[0]

    def uncounted(self) -> int:
        """Tokens, at most, that they sampled and never reported."""
        return self._db.execute("SELECT COALESCE(SUM(uncounted), 0) FROM stays").fetchone()[0]

    def _open(self, name: str) -> sqlite3.Row | None:
        return self._db.execute("SELECT * FROM stays WHERE name = ? AND NOT over", (name,)).fetchone()
