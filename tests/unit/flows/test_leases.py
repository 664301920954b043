"""The lease of the nodes of a run: who gets it, who has lost it, and what stands in the store."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from areal_core.errors import StorageError
from areal_core.storage.lease import LeaseLostError
from areal_core.storage.objects import Storage
from flows.provision.leases import By, Claimant, Clock, Held, HeldError, Lease, Leases, name_of

RUN, LENGTH_S, MARGIN_S = "cpu-1.5b", 90.0, 10.0
REQUEST: dict[str, Any] = {"run": RUN, "nodes": {"trainer": {"count": 1}}}


class Time:
    """Two clocks of one machine, which are set by hand."""

    def __init__(self) -> None:
        self.now = 1e9
        self.clock = Clock(wall=lambda: self.now, passed=lambda: self.now, sleep=self.pass_)
        self.meanwhile: list[Any] = []

    def pass_(self, seconds: float) -> None:
        self.now += seconds
        if self.meanwhile:
            self.meanwhile.pop(0)()


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def leases(tmp_path: Path, time: Time) -> Leases:
    return Leases(Storage.open(str(tmp_path)), margin_s=MARGIN_S, clock=time.clock)


def acquire(leases: Leases, where: str = "a", by: By = "flow", **options: Any) -> Held:
    options = {"request": REQUEST, **options}
    return leases.acquire(RUN, Claimant(owner=f"{where}@example.org", by=by, where=where), LENGTH_S, **options)


def read(leases: Leases) -> Lease:
    lease = leases.read(RUN)
    assert lease is not None
    return lease


def test_new_lease_says_all_that_it_takes_to_end_the_nodes(leases: Leases, time: Time) -> None:
    held = acquire(leases)
    assert held.fresh
    lease = read(leases)
    assert lease == held.lease
    assert (lease.run, lease.owner, lease.by, lease.root) == (RUN, "a@example.org", "flow", "run")
    assert lease.request == REQUEST
    assert (lease.taken_at, lease.held_until, lease.expires_at) == (time.now, time.now + LENGTH_S, time.now + LENGTH_S)
    assert leases.live() == [RUN]
    refused = rf"^run {RUN}: a flow of a@example\.org is at its nodes, on a, until 2001-09-09T01:48:10Z if not for lo"
    with pytest.raises(HeldError, match=refused):
        acquire(leases, "b")


def test_an_earlier_process_in_the_same_place_is_dead(leases: Leases) -> None:
    first = acquire(leases)
    first.note({"nodes": {"i-1": ["trainer", 1.0, 2.0]}})
    first.renew()
    second = acquire(leases)
    assert second.lease.spent == {"nodes": {"i-1": ("trainer", 1.0, 2.0)}}
    with pytest.raises(LeaseLostError):
        first.renew()
    with pytest.raises(HeldError):  # a command is not the flow's next process
        acquire(leases, by="command")


def test_dead_holder_is_waited_for_and_a_living_one_is_not(leases: Leases, time: Time) -> None:
    began = time.now
    acquire(leases)
    second = acquire(leases, "b", patience_s=LENGTH_S + MARGIN_S + 2.0)
    assert LENGTH_S + MARGIN_S < time.now - began <= LENGTH_S + MARGIN_S + 2.0
    began, time.meanwhile = time.now, [lambda: None, second.renew]
    with pytest.raises(HeldError):
        acquire(leases, "c", patience_s=1e6)
    assert time.now - began < LENGTH_S


def test_one_that_was_given_back_is_anybody_s(leases: Leases, tmp_path: Path) -> None:
    first = acquire(leases)
    first.release()
    assert (tmp_path / name_of(RUN)).read_bytes() == b""
    assert (leases.read(RUN), leases.live(), leases.known()) == (None, [], [RUN])
    second = acquire(leases, "b")
    assert second.fresh
    with pytest.raises(LeaseLostError, match=r"was given back$"):
        first.renew()
    second.renew()


def test_a_reaper_gets_what_is_over_and_what_it_takes_to_end_it(leases: Leases, time: Time) -> None:
    first = acquire(leases)
    with pytest.raises(HeldError, match=rf"^run {RUN}: a@example\.org has its nodes until "):
        acquire(leases, "reaper", by="reaper", request=None)
    time.now += LENGTH_S + MARGIN_S + 0.1
    reaper = acquire(leases, "reaper", by="reaper", request=None)
    assert (reaper.lease.owner, reaper.lease.request) == ("a@example.org", REQUEST)
    with pytest.raises(HeldError):
        acquire(leases, "other", by="reaper", request=None)
    with pytest.raises(LeaseLostError, match=r"is lost to a reaper on reaper$"):
        first.renew()
    time.meanwhile = [reaper.renew, reaper.release]
    acquire(leases, patience_s=LENGTH_S)  # which a reaper that lives gives back soon


@pytest.mark.parametrize(
    "said",
    [
        {"run": "another"},
        {"held_until": 1e300},
        {"request": "everything"},
        {"spent": {"nodes": 7}},
        b'{"run": "\xff"}',
        b'{"request": ' + 100_000 * b'{"a": ',
    ],
    ids=lambda said: repr(said)[:40],
)
def test_object_that_is_no_lease_counts_as_over(
    leases: Leases, tmp_path: Path, caplog: pytest.LogCaptureFixture, said: bytes | dict[str, Any]
) -> None:
    first, file = acquire(leases), tmp_path / name_of(RUN)
    file.write_bytes(said if isinstance(said, bytes) else json.dumps(json.loads(file.read_text()) | said).encode())
    assert (read(leases).request, read(leases).expires_at, leases.is_over(read(leases))) == (None, 0.0, True)
    assert f"{file} must be a lease, and counts as over: " in caplog.records[0].getMessage()
    assert leases.live() == [RUN]
    reaper = acquire(leases, "reaper", by="reaper", request=None)
    assert reaper.lease.request is None
    with pytest.raises(LeaseLostError):
        first.renew()


def test_a_write_whose_answer_was_lost_is_one_s_own(leases: Leases, monkeypatch: pytest.MonkeyPatch) -> None:
    held, put = acquire(leases), leases.storage.put_over

    def unanswered(name: str, data: bytes, mark: str | None) -> str:
        put(name, data, mark)
        raise StorageError("no answer")

    monkeypatch.setattr(leases.storage, "put_over", unanswered)
    with pytest.raises(StorageError):
        held.put_down()
    assert held.remaining_s() < 0.0  # it may be anybody's
    monkeypatch.undo()
    held.renew()
    assert held.remaining_s() == LENGTH_S


def test_it_is_renewed_by_itself_until_it_is_lost(tmp_path: Path) -> None:
    leases = Leases(Storage.open(str(tmp_path)), margin_s=0.0)
    renewed, lost = threading.Event(), threading.Event()
    held = leases.acquire(RUN, Claimant(owner="a", by="flow", where="a"), 0.3, request={})
    held.on_renewed, held.on_lost = renewed.set, lambda reason: lost.set()
    with held:
        assert renewed.wait(30.0)
        leases.acquire(RUN, Claimant(owner="a", by="flow", where="a"), 0.3, request={})  # the same place
        assert lost.wait(30.0)
    assert held.lost == f"run {RUN}: the lease of its nodes is lost to a flow on a"
