"""The lease of the nodes of a run: who gets it, who has lost it, and what stands in the store; and nodes under a lease,
with everything that they live on in memory: what is done, what is put right, what is told."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from areal_core.errors import ProvisionError, StorageError
from areal_core.storage.lease import LeaseLostError
from areal_core.storage.objects import Storage
from flows import cli
from flows.commands import nodes as nodes_command
from flows.commands import reap as reap_command
from flows.provision import leased, reaper
from flows.provision.leased import LeasedNodes
from flows.provision.leases import Claimant, Clock, HeldLease, HolderKind, Lease, LeaseHeldError, Leases, name_of
from flows.provision.nodes import CloudResource
from flows.provision.reaper import ReapResult
from flows.provision.terraform import Plan
from tests.provisioning.model import (
    INSTANCE,
    LEASE,
    LENGTH_S,
    LOCK,
    MARGIN_S,
    REQUEST,
    ROLE,
    RUN,
    WANTED,
    Cloud,
    Nodes,
    World,
    in_memory,
    locked_by,
)

PATIENCE_S = 30.0
EXPIRES_AT = datetime(2037, 1, 31, 12, tzinfo=UTC).timestamp()  # of the request
ALL = "1 aws_iam_role, 2 aws_instance, 1 aws_security_group"


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with in_memory():
        yield World(tmp_path)


def ids(world: World) -> set[str]:
    return {id_ for kind, id_ in world.there if kind == INSTANCE}


def made(world: World, **options: Any) -> None:
    """Nodes that were handed over."""
    with world.nodes("a", **options) as nodes:
        nodes.make()
        nodes.hand_over()


def ended_by_the_reaper(world: World) -> ReapResult:
    (reaped,) = world.reaper("r").reap()
    assert (reaped.failed, world.there, world.lease()) == (None, {}, None)
    return reaped


def strikes(world: World, kind: str, *places: str) -> list[str]:
    """Each of these places is struck once; those that are still to be."""
    left = [*places]

    def strike(_: str, place: str) -> str | None:
        if place not in left:
            return None
        left.remove(place)
        return kind

    world.strike = strike
    return left


def test_nodes_are_made_replaced_and_ended_as_it_was_shown(world: World) -> None:
    shown: list[str] = []

    def show(plan: Plan) -> None:
        shown.append(str(plan))

    with world.nodes("a") as nodes:
        hosts = nodes.make(show)
        assert [host.name for host in hosts] == ["generation-0", "trainer-0"]
        assert {host.id for host in hosts} == ids(world)
        again = nodes.replace(["generation-0"], show)
        assert [host.name for host in again if host not in hosts] == ["generation-0"]
        assert nodes.make(show) == again
        nodes.end(show)
        assert (world.there, world.lease()) == ({}, None)
    assert shown == ["4 to create", "1 to replace", "nothing to change", "4 to delete"]


def test_a_flow_that_ends_without_ending_its_nodes_leaves_its_lease(world: World) -> None:
    with world.nodes("a") as nodes:
        hosts = nodes.make()
    assert (world.lease() or {})["request"].items() >= REQUEST.items()
    assert world.reaper("r").reap() == []
    with pytest.raises(LeaseHeldError), world.nodes("b", patience_s=0.0):
        pass
    with world.nodes("a", prices={"trainer": 1.0}) as nodes:  # the flow run's next process
        assert nodes.make() == hosts
        assert nodes.spent().state()["nodes"].keys() == {host.id for host in hosts}


@pytest.mark.parametrize(
    ("kind", "places"),
    [
        ("throttled", ("terraform plan", "terraform create", "cloud describe")),
        ("unavailable", ("store write", "terraform lock", "terraform unlock")),
        ("unanswered", ("terraform create", "terraform store")),
        ("killed", ("terraform plan", "terraform create", "terraform store")),  # which leaves a lock
    ],
)
def test_failure_that_passes_is_tried_again(world: World, kind: str, places: tuple[str, ...]) -> None:
    with world.nodes("a") as nodes:
        left = strikes(world, kind, *places)
        assert {host.id for host in nodes.make()} == ids(world)
        assert (left, len(world.there)) == ([], len(WANTED))
        nodes.end()
    assert world.there == {}


def test_lock_of_somebody_who_came_later_is_not_removed(world: World) -> None:
    with world.nodes("a") as nodes:
        world.objects[LOCK] = locked_by("somebody", world.now - 1000.0, "old")

        def strike(_: str, place: str) -> None:
            if place == "terraform force-unlock":
                world.objects.pop(LOCK)  # it is gone meanwhile

        world.strike = strike
        assert len(nodes.make()) == 2
        world.objects[LOCK] = late = locked_by("somebody", world.now + 1000.0, "late")
        with pytest.raises(ProvisionError, match="locked"):
            nodes.make()
        assert world.objects.pop(LOCK) == late
        nodes.end()


def test_nodes_that_are_handed_over_are_ended_and_forgotten_by_the_next_reaper(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    with world.nodes("a", prices={"generation": 3600.0, "trainer": 3600.0}) as nodes:
        nodes.make()
        world.pass_(10.0)
        for _ in range(2):  # again is fine
            nodes.hand_over()
        with pytest.raises(
            LeaseLostError, match=f"^run {RUN}: its nodes were handed over to the reaper, which destroys them$"
        ):
            nodes.make()
    seen: list[Any] = []
    reaper = world.reaper("r")
    monkeypatch.setattr(reaper, "_forget", lambda run: seen.append((run, world.lease()["by"], dict(world.there))))  # type: ignore[index]
    (reaped,) = reaper.reap()
    owner = "somebody@example.org"
    assert dataclasses.astuple(reaped) == (RUN, owner, "no holder", ALL, reaped.cost, None)
    assert float(reaped.cost.removeprefix("$")) >= 20.0  # two nodes, a dollar a second
    assert seen == [(RUN, "reaper", {})]  # while the reaper has its lease


class AskedToEndError(BaseException):
    """As Prefect raises it in the main thread where the process is sent SIGTERM."""


def ask_to_end(nodes: LeasedNodes) -> None:
    raise AskedToEndError


def hand_over(nodes: LeasedNodes) -> None:
    """By another thread, which must not wait for the one that is at the nodes."""
    handing = threading.Thread(target=nodes.hand_over, daemon=True)
    handing.start()
    handing.join(PATIENCE_S)
    assert not handing.is_alive()


def replace(nodes: LeasedNodes) -> None:
    nodes.replace(["trainer-0"])


@pytest.mark.parametrize("work", [replace, LeasedNodes.end])
@pytest.mark.parametrize(("happens", "error"), [(ask_to_end, AskedToEndError), (hand_over, LeaseLostError)])
def test_nodes_are_handed_over_whatever_the_flow_is_at(
    world: World, happens: Callable[[LeasedNodes], None], error: type[BaseException], work: Callable[[LeasedNodes], Any]
) -> None:
    for at in itertools.count():
        left, before = itertools.count(-at), list[tuple[str, set[Any]]]()
        world.strike = lambda me, place: None
        with suppress(error), world.nodes("a") as nodes:
            nodes.make()
            world.there[INSTANCE, "stray"] = world.now

            def strike(me: str, place: str) -> None:
                # a write of the lease is waited for: the store has its patience
                if not place.startswith("store") and next(left) == 0:  # noqa: B023 - of this round
                    before.append((place, set(world.there)))  # noqa: B023
                    happens(nodes)

            world.strike = strike
            work(nodes)
            break
        ((place, there),) = before
        if place != "cloud delete":  # of what no state holds, and whose name is not given again
            assert set(world.there) == there, place
        assert ended_by_the_reaper(world).over_since == "no holder"
    assert at > 10


def test_a_terraform_whose_end_is_not_seen_costs_the_margin_of_clocks(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Nodes, "stop", lambda self, within_s: False)
    made(world)
    assert world.reaper("r").reap() == []
    world.pass_(MARGIN_S)
    ended_by_the_reaper(world)


# ---- the reaper ----


def test_reaper_repeats_what_fails_for_reasons_that_pass(world: World) -> None:
    made(world)
    left = strikes(world, "throttled", "cloud describe", "cloud delete")
    assert ended_by_the_reaper(world).ended == ALL  # in all tries
    assert left == []
    made(world)
    strikes(world, "quota", "cloud delete")
    (reaped,) = world.reaper("r").reap()
    assert reaped.failed is not None
    assert str(reaped).endswith(f"the next reaper retries: {reaped.failed}")
    world.pass_a_lease()
    ended_by_the_reaper(world)


@pytest.mark.parametrize("code", ["DependencyViolation", "DeleteConflict", "InvalidPlacementGroup.InUse"])
def test_what_is_still_used_is_ended_a_little_later(code: str) -> None:
    assert leased.is_transient(ProvisionError(f"aws: An error occurred ({code}) when calling Delete: in use"))


def test_what_the_cloud_still_lists_is_looked_for_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    made(world)
    world.there.clear()
    looks = itertools.count()
    listed = [CloudResource(kind=ROLE, id="areal-r", run=RUN)]
    monkeypatch.setattr(Cloud, "found", lambda self, run=None: listed if next(looks) < 3 else [])
    assert ended_by_the_reaper(world).ended == "1 aws_iam_role"


@pytest.mark.parametrize("changes", [{"held_until": 1e300}, {"request": {"run": RUN, "foundation": "bucket"}}])
def test_a_lease_that_can_t_be_read_blocks_nobody(world: World, changes: dict[str, Any]) -> None:
    made(world)
    world.objects[LEASE] = json.dumps((world.lease() or {}) | changes).encode(), world.objects[LEASE][1]
    assert ended_by_the_reaper(world).ended == ALL


def test_a_clone_of_a_machine_is_another_place(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    with world.nodes("a") as nodes:
        nodes.make()
        monkeypatch.setattr(leased, "boot_id", lambda: "of another boot")
        shutil.copytree(world.folder / "a", world.folder / "clone")
        with (
            pytest.raises(LeaseHeldError, match="holds the lease of its nodes until "),
            world.nodes("clone", patience_s=0.0),
        ):
            pass


def test_what_has_no_lease_is_swept(world: World) -> None:
    made(world)
    del world.objects[LEASE]
    young = world.reaper("r", young_s=300.0)
    assert young.reap() == []
    world.pass_(301.0)
    (reaped,) = young.reap()
    assert (reaped.over_since, reaped.failed, world.there) == ("no lease", None, {})


def test_runs_of_another_store_are_left_alone_and_a_store_that_is_away_is_told(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(world)
    found = [dataclasses.replace(each, own_vpc=False) for each in Cloud(world, "r").found()]
    del world.objects[LEASE]
    monkeypatch.setattr(Cloud, "found", lambda self, run=None: found)
    assert world.reaper("r").reap() == []
    assert len(world.there) == len(WANTED)
    world.strike = lambda me, place: "unavailable" if len(world.calls) > looked else None
    looked = len(world.calls) + 1
    (reaped,) = world.reaper("r").reap()
    assert (reaped.failed or "").startswith("could not search for resources without a lease: store list: ")


# ---- commands ----


@pytest.fixture
def run_nodes(world: World, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """`areal nodes` in this world."""
    file = world.folder / "nodes.json"
    file.write_text(json.dumps(REQUEST))
    monkeypatch.setattr(nodes_command, "STATE", world.folder / "by-hand")
    monkeypatch.setattr(nodes_command, "cloud_of", lambda foundation: Cloud(world, "by-hand"))
    monkeypatch.setattr(nodes_command, "Nodes", Nodes)

    def leased_nodes(request: dict[str, Any], state: Path, **options: Any) -> LeasedNodes:
        return world.nodes("by-hand", **options)

    monkeypatch.setattr(nodes_command, "LeasedNodes", leased_nodes)

    def run(action: str, *options: str) -> int:
        return cli.main(["nodes", action, str(file), *options])

    return run


def test_nodes_by_hand_live_until_they_expire(
    run_nodes: Callable[..., int], world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_nodes("apply") == 1  # nobody is there to say yes
    assert world.lease() is None
    assert run_nodes("apply", "--yes") == 0
    assert len(world.there) == len(WANTED)
    lease = world.lease() or {}
    assert lease.items() >= {"by": "command", "held_until": None, "kept_until": EXPIRES_AT}.items()
    world.pass_(3600.0)
    assert world.reaper("r").reap() == []
    assert run_nodes("destroy") == 1
    assert len(world.there) == len(WANTED)
    assert run_nodes("apply", "--yes", "--replace", "trainer-0") == 0
    assert run_nodes("hosts") == 0
    assert world.state["trainer-0"][1] in capsys.readouterr().out
    with pytest.raises(LeaseHeldError, match="created its nodes by hand"), world.nodes("a", patience_s=0.0):
        pass
    world.now = EXPIRES_AT + MARGIN_S + 1.0
    assert ended_by_the_reaper(world).over_since == "2037-01-31T12:00:00Z"
    capsys.readouterr()
    assert run_nodes("hosts") == 0
    assert capsys.readouterr().out == "No nodes.\n"  # whatever Terraform's state says
    assert run_nodes("destroy", "--yes") == 0
    assert (world.there, world.lease()) == ({}, None)


def test_reaping_by_hand(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reap_command.main([], tmp_path)
    assert capsys.readouterr().out == (
        "Nothing to destroy: no store of leases is known. Run `make control` here, or give --store.\n"
    )
    made(world)
    monkeypatch.setattr(reaper, "cloud_of", lambda foundation: Cloud(world, "r"))
    monkeypatch.setattr(reaper, "Leases", lambda storage: world.leases("r"))
    named = ["--store", str(tmp_path / "store")]
    reap_command.main(named, tmp_path)
    assert f"run {RUN}: deleted {ALL}" in capsys.readouterr().out
    reap_command.main(named, tmp_path)
    assert capsys.readouterr().out == "Nothing to destroy.\n"


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


def acquire(leases: Leases, where: str = "a", by: HolderKind = "flow", **options: Any) -> HeldLease:
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
    refused = (
        rf"^run {RUN}: a flow of a@example\.org on a holds the lease of its nodes until 2001-09-09T01:51:40Z or lo"
    )
    with pytest.raises(LeaseHeldError, match=refused):
        acquire(leases, "b")


def test_an_earlier_process_in_the_same_place_is_dead(leases: Leases) -> None:
    first = acquire(leases)
    first.note({"nodes": {"i-1": ["trainer", 1.0, 2.0]}})
    first.renew()
    second = acquire(leases)
    assert second.lease.spent == {"nodes": {"i-1": ("trainer", 1.0, 2.0)}}
    with pytest.raises(LeaseLostError):
        first.renew()
    with pytest.raises(LeaseHeldError):  # a command is not the flow's next process
        acquire(leases, by="command")


def test_dead_holder_is_waited_for_and_a_living_one_is_not(leases: Leases, time: Time) -> None:
    began = time.now
    acquire(leases)
    second = acquire(leases, "b", patience_s=LENGTH_S + MARGIN_S + 2.0)
    assert LENGTH_S + MARGIN_S < time.now - began <= LENGTH_S + MARGIN_S + 2.0
    began, time.meanwhile = time.now, [lambda: None, second.renew]
    with pytest.raises(LeaseHeldError):
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
    with pytest.raises(LeaseHeldError, match=rf"^run {RUN}: the lease of a@example\.org on its nodes runs until "):
        acquire(leases, "reaper", by="reaper", request=None)
    time.now += LENGTH_S + MARGIN_S + 0.1
    reaper = acquire(leases, "reaper", by="reaper", request=None)
    assert (reaper.lease.owner, reaper.lease.request) == ("a@example.org", REQUEST)
    with pytest.raises(LeaseHeldError):
        acquire(leases, "other", by="reaper", request=None)
    with pytest.raises(LeaseLostError, match=r"a reaper on reaper has taken over the lease of its nodes$"):
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
    assert f"{file}: damaged lease, treated as expired: " in caplog.records[0].getMessage()
    assert leases.live() == [RUN]
    reaper = acquire(leases, "reaper", by="reaper", request=None)
    assert reaper.lease.request is None
    with pytest.raises(LeaseLostError):
        first.renew()


def test_a_write_whose_answer_was_lost_is_one_s_own(leases: Leases, monkeypatch: pytest.MonkeyPatch) -> None:
    held, put = acquire(leases), leases.storage.put_if_unchanged

    def unanswered(name: str, data: bytes, mark: str | None) -> str:
        put(name, data, mark)
        raise StorageError("no answer")

    monkeypatch.setattr(leases.storage, "put_if_unchanged", unanswered)
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
    assert held.lost == f"run {RUN}: a flow on a has taken over the lease of its nodes"
