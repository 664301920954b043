"""When the controller's process looks for unreachable cycles: a full look goes through all objects that there are, for a
second where thousands of completions are in flight, and nothing else goes on meanwhile."""

from __future__ import annotations

import gc

_YOUNG = 700  # new objects after which the youngest are looked at: Python's own number
_FULL = 1000  # of the looks at young ones, one in so many is at all


def collect_rarely() -> None:
    """What exists by now is for good. Of what comes later nearly nothing is part of a cycle, and that is found when it
    is young."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, 10, _FULL)
