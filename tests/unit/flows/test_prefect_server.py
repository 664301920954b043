"""What Prefect's server does beside Prefect's own: its garbage may wait, and nobody else does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# A writer has the database, and another one waits for it, on a connection of which garbage holds a cursor that once
# did so in vain.
_SCRIPT = """
import sqlite3, sys, threading, time, weakref
from flows import prefect_server

prefect_server.collect_beside(every_s=0.05)
first = sqlite3.connect(sys.argv[1], isolation_level=None)
first.execute("PRAGMA journal_mode = WAL")
first.execute("CREATE TABLE t (value)")
second = sqlite3.connect(sys.argv[1], isolation_level=None, check_same_thread=False, timeout=0.1)
first.execute("BEGIN IMMEDIATE")
class Cycle: ...

cycle = Cycle()
cycle.itself, cycle.cursor = cycle, second.cursor()
there = weakref.ref(cycle)
try:
    cycle.cursor.execute("INSERT INTO t VALUES (1)")
except sqlite3.OperationalError:
    pass
second.execute("PRAGMA busy_timeout = 5000")
said = []

def write():
    try:
        second.execute("INSERT INTO t VALUES (1)")
        said.append("written")
    except sqlite3.OperationalError as error:
        said.append(str(error))

waiting = threading.Thread(target=write)
waiting.start()
time.sleep(1.0)
del cycle
kept = []
while there():  # this thread collects if any may, as it is the one that makes objects
    kept += [[] for _ in range(100)]
    time.sleep(0.001)
time.sleep(1.0)
first.execute("COMMIT")
waiting.join()
print(*said)
"""


def test_commit_does_not_wait_for_a_cursor_in_garbage(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _SCRIPT, str(tmp_path / "prefect.db")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "written"
