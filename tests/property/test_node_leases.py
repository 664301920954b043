"""The lease of the nodes of a run under any order of what owners and reapers do, with clocks that are off: whoever may
change nodes is alone, whoever has lost them learns so, and what was given back stays so."""

from __future__ import annotations

import random
import tempfile
import threading
from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from areal_core.errors import StorageError
from areal_core.storage.lease import LeaseLostError
from areal_core.storage.objects import Storage
from flows.provision.leases import By, Claimant, Clock, Held, HeldError, Leases
from tests.support.turns import Turns, TurnStorage

LENGTH_S, MARGIN_S = 90.0, 10.0
RUN = "r"


class UnsureStorage(TurnStorage):
    """Every operation is a turn of its own; now and then the answer to a write is lost on its way, or the write."""

    def __init__(self, storage: Storage, turns: Turns, rng: random.Random) -> None:
        super().__init__(storage, turns)
        self._rng = rng

    def __getattr__(self, name: str) -> Callable[..., Any]:
        operation = super().__getattr__(name)
        if name != "put_over":
            return operation

        def unsure(*arguments: Any) -> Any:
            if self._rng.random() < 0.1:
                raise StorageError("the write was lost")
            put = operation(*arguments)
            if self._rng.random() < 0.1:
                raise StorageError("the answer was lost")
            return put

        return unsure


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32), owners=st.integers(1, 3), reapers=st.integers(1, 2))
def test_whoever_may_change_nodes_is_alone(seed: int, owners: int, reapers: int) -> None:
    rng = random.Random(seed)
    turns = Turns(rng)
    holding: dict[str, Held] = {}  # those who have not learnt that they have it no more, the dead among them
    given_back: set[str] = set()  # holders
    with tempfile.TemporaryDirectory() as folder:
        storage = Storage.open(folder)

        def alone(me: str) -> None:
            right = {other: held.remaining_s() for other, held in holding.items() if other != me}
            assert max(right.values(), default=0.0) <= 0.0, f"{me} beside {right}"

        def part(by: By) -> None:
            me = threading.current_thread().name
            skew_s = rng.uniform(-MARGIN_S / 2, MARGIN_S / 2)
            clock = Clock(wall=lambda: 1e9 + turns.now + skew_s, passed=lambda: turns.now, sleep=turns.take)
            unsure: Any = UnsureStorage(storage, turns, rng)
            leases = Leases(unsure, margin_s=MARGIN_S, clock=clock)
            for life in range(rng.randint(1, 3)):
                turns.take(rng.uniform(0.0, LENGTH_S))
                claimant = Claimant(owner="somebody", by=by, where=f"{me}-{life}")
                patience_s = rng.choice((0.0, LENGTH_S + MARGIN_S)) if by == "flow" else 0.0
                try:
                    held = leases.acquire(RUN, claimant, LENGTH_S, request={}, patience_s=patience_s)
                except (HeldError, StorageError):
                    continue
                holding[me] = held
                alone(me)
                try:
                    for _ in range(rng.randint(0, 6)):
                        stands_still = rng.random() < 0.2
                        turns.take(rng.uniform(1.0, 3.0) * LENGTH_S if stands_still else LENGTH_S / 3)
                        try:
                            held.renew()
                        except StorageError:
                            continue
                        alone(me)
                    if rng.random() < 0.5:
                        continue  # it dies
                    rng.choice((held.release, lambda held=held: held.put_down(keep=False)))()
                    given_back.add(claimant.holder)
                    del holding[me]
                except LeaseLostError:
                    assert claimant.holder not in given_back
                    del holding[me]
                except StorageError:
                    continue  # it dies in doubt

        parts = {f"flow-{number}": lambda: part("flow") for number in range(owners)}
        parts |= {f"reaper-{number}": lambda: part("reaper") for number in range(reapers)}
        turns.run(parts)
        after = Clock(wall=lambda: 1e9 + turns.now + LENGTH_S + 2 * MARGIN_S)
        last = Leases(storage, margin_s=MARGIN_S, clock=after)
        held = last.acquire(RUN, Claimant(owner="somebody", by="flow", where="last"), LENGTH_S, request={})
        held.release()
        assert last.live() == []
