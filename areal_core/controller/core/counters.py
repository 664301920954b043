"""The generation servers' own token counters, kept across restarts of servers and of the controller.

A server counts the tokens that it samples for the rollout, whatever becomes of them, from 0 at its start. A row here is
one *stay* of a server: from its join until it leaves or is lost. The sum over all stays is the servers' count in the
token ledger, independent of the groups'.

A server that dies has sampled tokens since its last report that are in no counter. Its stay holds an upper bound on
them, from what was in flight there; likewise for what a controller had not stored when it was killed.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable

_SCHEMA = """
CREATE TABLE IF NOT EXISTS server_sessions (
    session INTEGER PRIMARY KEY,
    name TEXT NOT NULL,
    url TEXT NOT NULL,
    joined INTEGER NOT NULL,         -- its counter when it joined
    counted INTEGER NOT NULL,        -- its counter at the last report
    accounted INTEGER NOT NULL,      -- tokens of the ledger's groups when that report was requested
    uncounted INTEGER NOT NULL DEFAULT 0,  -- sampled after that, at most
    over INTEGER NOT NULL DEFAULT 0  -- it has left or is lost
);
"""


class ServerCounters:
    """The counters of one run's servers. `accounted` gives the tokens that the run's groups account for."""

    def __init__(self, db: sqlite3.Connection, accounted: Callable[[], int] = lambda: 0) -> None:
        db.row_factory = sqlite3.Row
        self._db = db
        self.accounted = accounted
        db.executescript(_SCHEMA)

    def join(self, name: str, url: str, counter: int) -> None:
        """A server takes up work. One that an earlier controller knew continues its stay, unless it was restarted
        meanwhile."""
        row = self._open(name)
        if row is not None and row["url"] == url and row["counted"] <= counter:
            self.report(name, counter, self.accounted())
        else:
            self.end(name)
            insert = "INSERT INTO server_sessions (name, url, joined, counted, accounted) VALUES (?, ?, ?, ?, ?)"
            self._db.execute(insert, (name, url, counter, counter, self.accounted()))

    def report(self, name: str, counter: int, accounted: int) -> None:
        """Store a server's counter, and `accounted` as it was when the counter was requested."""
        self._db.execute(
            "UPDATE server_sessions SET counted = ?, accounted = ? WHERE name = ? AND NOT over",
            (counter, accounted, name),
        )

    def end(self, name: str, *, uncounted: int = 0) -> None:
        """A server has left, or is lost with up to `uncounted` tokens that it had not reported."""
        update = "UPDATE server_sessions SET over = 1, uncounted = uncounted + ? WHERE name = ? AND NOT over"
        self._db.execute(update, (uncounted, name))

    def resume(self) -> None:
        """A restarted controller goes on. Servers may have ended with the one before it: then the tokens that groups
        gained since their last report are in no counter."""
        self._db.execute(
            "UPDATE server_sessions SET uncounted = uncounted + ? - accounted "
            "WHERE session = (SELECT session FROM server_sessions WHERE NOT over ORDER BY accounted LIMIT 1)",
            (self.accounted(),),
        )

    def abandon(self) -> None:
        """These counters are of a time before the servers' last reports, which are lost: what servers that are still
        there have sampled since is nobody's. All begin new stays."""
        self.resume()
        self._db.execute("UPDATE server_sessions SET over = 1 WHERE NOT over")

    def generated(self) -> int:
        """Tokens that the servers have counted since they joined."""
        return self._db.execute("SELECT COALESCE(SUM(counted - joined), 0) FROM server_sessions").fetchone()[0]

    def uncounted(self) -> int:
        """Upper bound on the tokens that they sampled and never reported."""
        return self._db.execute("SELECT COALESCE(SUM(uncounted), 0) FROM server_sessions").fetchone()[0]

    def _open(self, name: str) -> sqlite3.Row | None:
        return self._db.execute("SELECT * FROM server_sessions WHERE name = ? AND NOT over", (name,)).fetchone()
