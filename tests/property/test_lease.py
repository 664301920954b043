"""The lease under any order of what launchers do: one of them at a time, numbers that only grow, and no dead end."""

from __future__ import annotations

import random
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_core.errors import ProcessError, StorageError
from areal_core.storage.lease import NAME, Claim, Lease, LeaseLostError
from areal_core.storage.objects import Storage
from flows.provision.leases import Claimant, Clock, HeldLease, HolderKind, LeaseHeldError, Leases
from tests.support.turns import Turns, TurnStorage

TTL_S = 30.0


@settings(max_examples=15)
@given(seed=st.integers(0, 2**32), launchers=st.integers(2, 4))
def test_of_launchers_that_live_one_has_the_run_at_a_time(seed: int, launchers: int) -> None:
    """Some end in order, some die with the lease in hand, some fall silent for longer than it lasts and come back."""
    rng = random.Random(seed)
    turns = Turns(rng)
    holders: list[str] = []  # that know of no later one
    numbers: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        storage = Storage.open(folder)

        def launcher() -> None:
            me = threading.current_thread().name
            for _ in range(rng.randint(1, 3)):
                lease = Lease(
                    TurnStorage(storage, turns),  # type: ignore[arg-type]
                    me,
                    ttl_s=TTL_S,
                    clock=lambda: turns.now,
                    sleep=turns.take,
                )
                turns.take(rng.uniform(0.0, 100.0))
                try:
                    number = lease.acquire()
                except ProcessError:  # another one runs it
                    continue
                assert not holders, f"{me} and {holders} both run the run"
                assert all(number > before for before in numbers)
                numbers.append(number)
                holders.append(me)
                try:
                    for _ in range(rng.randint(0, 20)):
                        turns.take(lease.renewal_s)
                        lease.renew()
                    if rng.random() < 0.3:  # it is stopped
                        holders.remove(me)
                        turns.take(rng.uniform(1.0, 4.0) * TTL_S)
                        lease.renew()  # and goes on, unless another one has taken over
                        assert not holders
                        holders.append(me)
                    holders.remove(me)
                    if rng.random() < 0.7:  # else it dies
                        lease.release()
                except LeaseLostError:
                    assert me not in holders

        turns.run({f"launcher-{number}": launcher for number in range(launchers)})
    assert numbers


class Alone:
    """Leases of one store, whose clock goes on while they sleep."""

    def __init__(self, folder: Path) -> None:
        self.storage, self.now = Storage.open(str(folder)), 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def lease(self, where: str, ttl_s: float = TTL_S) -> Lease:
        return Lease(self.storage, where, ttl_s=ttl_s, clock=lambda: self.now, sleep=self.sleep)


@pytest.fixture
def alone(tmp_path: Path) -> Alone:
    return Alone(tmp_path)


def test_a_launcher_that_died_is_waited_for_once(alone: Alone) -> None:
    assert alone.lease("a").acquire() == 1
    assert alone.lease("b").acquire() == 2
    assert TTL_S <= alone.now < TTL_S + 1.0
    before = alone.now
    again = alone.lease("b")  # which holds the lock of its folder, so that the one before is dead
    assert again.acquire() == 3
    again.release()
    assert alone.lease("c").acquire() == 4
    assert alone.now == before
    assert alone.storage.list() == (NAME,)


def test_a_holder_is_given_the_time_that_it_has_asked_for(alone: Alone) -> None:
    """Its launcher has a longer storage.lease_s, and renews more seldom."""
    assert alone.lease("a", 10 * TTL_S).acquire() == 1
    assert alone.lease("b").acquire() == 2
    assert alone.now >= 10 * TTL_S


def test_a_number_is_above_what_names_show_when_the_lease_is_taken(alone: Alone) -> None:
    alone.storage.put_bytes(NAME, b"no lease")  # whose launcher goes on meanwhile
    assert alone.lease("a").acquire(above=lambda: 7 if alone.now else 1) == 8


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b'{"number": 1, "holder": "a", "wh',
        b'{"number": "7", "holder": "a", "where": "b"}',
        b'{"number": 1%s, "holder": "a", "where": "b"}' % (b"0" * 400),
        b'{"number": NaN, "holder": "a", "where": "b"}',
        b"[" * 100_000,
        b'"\xff"',
    ],
    ids=lambda data: repr(data[:20]),
)
def test_what_is_no_claim_blocks_nobody_and_is_written_over_by_who_has_the_run(alone: Alone, data: bytes) -> None:
    alone.storage.put_bytes(NAME, data)
    held = alone.lease("a")
    assert held.acquire(above=lambda: 6) == 7  # what names show, as the object tells nothing
    alone.storage.put_bytes(NAME, data)
    held.renew()
    assert msgspec.json.decode(alone.storage.get_bytes(NAME), type=Claim).number == 7
    alone.storage.delete(NAME)
    held.renew()
    assert msgspec.json.decode(alone.storage.get_bytes(NAME), type=Claim).number == 7


def test_an_answer_that_is_lost_costs_nothing(alone: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    put = alone.storage.put_if_unchanged

    def unanswered(name: str, data: bytes, mark: str | None) -> str:
        put(name, data, mark)
        return put(name, data, mark)  # as it is tried again

    with monkeypatch.context() as patched:
        patched.setattr(alone.storage, "put_if_unchanged", unanswered)
        lease = alone.lease("a")
        assert lease.acquire() == 1
        lease.renew()
        lease.release()
    assert alone.lease("b").acquire() == 2
    assert alone.now == 0.0


LENGTH_S, MARGIN_S = 90.0, 10.0
RUN = "r"


class UnsureStorage(TurnStorage):
    """Every operation is a turn of its own; now and then the answer to a write is lost on its way, or the write."""

    def __init__(self, storage: Storage, turns: Turns, rng: random.Random) -> None:
        super().__init__(storage, turns)
        self._rng = rng

    def __getattr__(self, name: str) -> Callable[..., Any]:
        operation = super().__getattr__(name)
        if name != "put_if_unchanged":
            return operation

        def unsure(*arguments: Any) -> Any:
            if self._rng.random() < 0.1:
                raise StorageError("the write was lost")
            put = operation(*arguments)
            if self._rng.random() < 0.1:
                raise StorageError("the answer was lost")
            return put

        return unsure


@settings(max_examples=50)
@given(seed=st.integers(0, 2**32), owners=st.integers(1, 3), reapers=st.integers(1, 2))
def test_whoever_may_change_nodes_is_alone(seed: int, owners: int, reapers: int) -> None:
    rng = random.Random(seed)
    turns = Turns(rng)
    holding: dict[str, HeldLease] = {}  # those who have not learnt that they have it no more, the dead among them
    given_back: set[str] = set()  # holders
    with tempfile.TemporaryDirectory() as folder:
        storage = Storage.open(folder)

        def alone(me: str) -> None:
            right = {other: held.remaining_s() for other, held in holding.items() if other != me}
            assert max(right.values(), default=0.0) <= 0.0, f"{me} beside {right}"

        def part(by: HolderKind) -> None:
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
                except (LeaseHeldError, StorageError):
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
