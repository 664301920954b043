"""Run `prefect server start`; under Python 3.11, collect garbage in a separate thread.

Arguments are those of the command. Prefect's database is usually SQLite. A cursor that found the database locked keeps
its statement, and forms a cycle with the error. Collecting the cursor resets the statement, which waits for the mutex
of its connection. Another statement of that connection may hold the mutex for up to 60 s, while it waits for its turn
to write. If the event loop's thread collects, it can't commit the transaction that the other statement waits for. Then
the server and all workers hang for a minute or two. A separate thread may wait without harm. Python 3.12 does not keep
the statement.
"""

from __future__ import annotations

import gc
import itertools
import sys
import threading
import time

_EVERY_S = 1.0
_OLD_EVERY = 30  # every 30th collection includes the oldest generation


def collect_beside(every_s: float = _EVERY_S) -> None:
    """From now on, collect garbage only in a separate thread, every `every_s` seconds."""
    gc.disable()
    threading.Thread(target=_collect, args=(every_s,), name="garbage", daemon=True).start()


def _collect(every_s: float) -> None:
    for count in itertools.count(1):
        time.sleep(every_s)
        gc.collect(1 if count % _OLD_EVERY else 2)


def main() -> None:
    """Run the server until asked to stop."""
    from prefect.cli import app

    sys.argv[1:1] = ["server", "start"]
    if sys.version_info < (3, 12):
        collect_beside()
    app()


if __name__ == "__main__":
    main()
