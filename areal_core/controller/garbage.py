"""When the controller looks for unreachable cycles. A look goes through all objects, for a second where thousands of
completions are in flight, while nothing else goes on: Python would take one, of young objects at least, whenever many
have come into being, as in every update. Nearly nothing here is ever part of a cycle."""

from __future__ import annotations

import asyncio
import gc
import time

_EVERY_S = 60.0  # at least
_SHARE = 1 / 300  # of the time that looks may take


async def collect_rarely() -> None:
    """Until cancelled; what exists by now stays for good."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        took_s = 0.0
        while True:
            await asyncio.sleep(max(_EVERY_S, took_s / _SHARE))
            start = time.perf_counter()
            gc.collect()
            took_s = time.perf_counter() - start
    finally:
        gc.enable()
        gc.unfreeze()
