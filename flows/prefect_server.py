"""Prefect's server, as `prefect server start` with the arguments given; under Python 3.11 its garbage is collected
beside its event loop.

Its database is usually SQLite. A cursor that has found the database locked keeps its statement there, and is in a cycle
with the error. When it is collected, the statement is reset, which waits for the mutex of its connection; and that is
held for as long as another statement of the same connection waits for its turn to write, for up to 60 s. If it is the
thread of the event loop that collects, it does not go on to commit what the turn is waited for: the whole server stands
still for a minute, at times for two, and all workers with it. A thread that does nothing else may wait. Python 3.12
does not keep the statement.
"""

from __future__ import annotations

import gc
import itertools
import sys
import threading
import time

_EVERY_S = 1.0
_OLD_EVERY = 30  # so many of the above


def collect_beside(every_s: float = _EVERY_S) -> None:
    """From now on no thread of this process collects garbage but one of its own."""
    gc.disable()
    threading.Thread(target=_collect, args=(every_s,), name="garbage", daemon=True).start()


def _collect(every_s: float) -> None:
    for count in itertools.count(1):
        time.sleep(every_s)
        gc.collect(1 if count % _OLD_EVERY else 2)


def main() -> None:
    """Until it is asked to stop."""
    from prefect.cli import app

    sys.argv[1:1] = ["server", "start"]
    if sys.version_info < (3, 12):
        collect_beside()
    app()


if __name__ == "__main__":
    main()
