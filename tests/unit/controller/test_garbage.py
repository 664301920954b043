"""Unreachable cycles are looked for now and then, and by nobody else meanwhile."""

import asyncio
import gc
import weakref

from areal_core.controller import service


class Cycle:
    def __init__(self) -> None:
        self.own = self


async def test_a_cycle_stays_until_the_next_look_and_python_takes_over_afterwards(monkeypatch):
    monkeypatch.setattr(service, "_COLLECT_S", 0.05)
    collecting = asyncio.ensure_future(service.collect_rarely())
    await asyncio.sleep(0)
    assert not gc.isenabled()
    looked = asyncio.Event()
    weakref.finalize(Cycle(), looked.set)
    assert not looked.is_set()
    await asyncio.wait_for(looked.wait(), 10)
    collecting.cancel()
    await asyncio.gather(collecting, return_exceptions=True)
    assert gc.isenabled()
