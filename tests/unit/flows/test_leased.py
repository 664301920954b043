"""Nodes under a lease, with a terraform and a cloud by script (tests/provisioning): what is done, what is put right."""

from __future__ import annotations

import dataclasses
import json
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from areal_core.errors import ProcessError, ProvisionError, StorageError
from areal_core.run.command import run_command
from areal_core.storage.lease import LeaseLostError
from flows import nodes_command, reap_command
from flows.provision import leased, reaper
from flows.provision.leased import LeasedNodes
from flows.provision.leases import Claimant, HeldError, Leases, name_of
from flows.provision.nodes import Found
from flows.provision.reaper import Reaped
from flows.provision.terraform import Plan, Terraform
from tests.provisioning import ledger
from tests.provisioning.world import RUN, ScriptedCloud, World
from tests.support import signals

NAMES = ["generation-0", "generation-1", "trainer-0"]
LEASE = name_of(RUN)
PATIENCE_S = 30.0
EXPIRES_AT = datetime(2037, 1, 31, 12, tzinfo=UTC).timestamp()  # of requests here


@pytest.fixture(autouse=True)
def python_s_own_signals() -> Iterator[None]:
    with signals.pythons_own():
        yield


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = World(tmp_path / "world")
    for name, value in made.environment("flow").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(leased, "_PAUSE_S", 0.01)
    return made


def ids(world: World) -> dict[str, str]:
    return {each["name"]: id_ for id_, each in world.living().items() if each["kind"] == "aws_instance"}


def effects(world: World) -> list[tuple[str, str]]:
    return [(entry["op"], entry["name"]) for entry in world.entries() if entry["op"] != "lease"]


def lease_of(world: World) -> Any:
    """None where there is none."""
    file = world.folder / "store" / LEASE
    return json.loads(file.read_bytes() or b"null") if file.exists() else None


def ended_by_the_reaper(world: World) -> Reaped:
    (reaped,) = world.reaper("r").reap()
    assert (reaped.failed, world.living(), lease_of(world)) == (None, {}, None)
    return reaped


def lock_of(world: World, year: str) -> Path:
    """A lock of the state that somebody else has left."""
    lock = world.folder / "store" / "terraform" / "runs" / f"{RUN}.tfstate.tflock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    lock.write_text(json.dumps({"ID": "1", "Who": "somebody@elsewhere", "Created": f"{year}-01-01T00:00:00Z"}))
    return lock


def struck(world: World, *faults: tuple[str, str] | tuple[str, str, int]) -> None:
    """These are to strike, each the first or n-th time."""
    world.plan([{"place": place, "kind": kind, "nth": nth[0] if nth else 0} for place, kind, *nth in faults])


def until(look: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not look():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_nodes_are_made_replaced_and_ended_as_it_was_shown(world: World) -> None:
    shown: list[str] = []

    def show(plan: Plan) -> None:
        shown.append(str(plan))

    with world.nodes("a") as nodes:
        hosts = nodes.make(show)
        assert [host.name for host in hosts] == NAMES
        assert {host.name: host.id for host in hosts} == ids(world)
        again = nodes.replace(["generation-1"], show)
        assert {host.name for host in again if host not in hosts} == {"generation-1"}
        assert nodes.make(show) == again
        nodes.end(show)
        assert world.living() == {}
        assert lease_of(world) is None
    assert sorted(path.name for path in (world.folder / "a" / "provision" / RUN).iterdir()) == ["lock", "place"]
    assert shown == ["6 to create", "1 to replace", "nothing to change", "6 to delete"]


def test_a_flow_that_ends_without_ending_its_nodes_leaves_its_lease(world: World) -> None:
    with world.nodes("a") as nodes:
        hosts = nodes.make()
    assert lease_of(world)["request"] == world.request()
    assert world.reaper("r").reap() == []
    with pytest.raises(HeldError), world.nodes("b", patience_s=0.0):
        pass
    with world.nodes("a", prices={"trainer": 1.0}) as nodes:  # the flow run's next process
        assert nodes.make() == hosts
        assert nodes.spent().noted()["nodes"].keys() == {host.id for host in hosts}


@pytest.mark.parametrize(
    ("place", "kind"),
    [
        ("plan:locked", "throttling"),
        ("plan:unlock", "unlock fails"),
        ("store:before-renewal", "store error"),
        ("apply:middle", "unavailable"),
        ("apply:middle", "kill"),  # which leaves a lock
        ("apply:unanswered", "unavailable"),
        ("apply:unanswered", "kill"),
        ("apply:stored", "kill"),
    ],
)
def test_failure_that_passes_is_tried_again(world: World, place: str, kind: str) -> None:
    struck(world, (place, kind), ("output", kind))
    with world.nodes("a") as nodes:
        assert {host.name: host.id for host in nodes.make()} == ids(world)
        assert len(world.living()) == 6
        nodes.end()
    assert world.living() == {}
    assert len(world.struck()) >= 1


def test_lasting_failure_is_told_and_put_right_by_the_next_process(world: World) -> None:
    struck(world, ("apply:middle", "quota", 3))
    with world.nodes("a") as nodes:
        with pytest.raises(ProvisionError, match=r"^terraform apply: creating EC2 Instance: .*VcpuLimitExceeded"):
            nodes.make()
        assert 0 < len(world.living()) < 6
    world.forward(40.0)
    with world.nodes("b") as nodes:
        assert [host.name for host in nodes.make()] == NAMES
    assert len(world.living()) == 6


@pytest.mark.parametrize("elsewhere", [False, True])
def test_state_that_could_not_be_stored_is_stored_by_the_next_process_unless_it_is_old(
    world: World, elsewhere: bool
) -> None:
    struck(world, ("apply:write", "unwritable"), ("push:start", "quota"))  # which is told, as it would last
    with world.nodes("a") as nodes, pytest.raises(ProvisionError, match=r"^terraform state push: .*VcpuLimitExceeded"):
        nodes.make()
    there = ids(world)
    if elsewhere:
        world.forward(40.0)
        with world.nodes("b") as nodes:  # on another machine, where nobody knows of it
            there = {host.name: host.id for host in nodes.make()}
        world.forward(40.0)
    with world.nodes("a") as nodes:
        assert {host.name: host.id for host in nodes.make()} == ids(world) == there
        nodes.end()
    assert world.living() == {}


def test_lock_of_somebody_who_came_later_is_not_removed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = lock_of(world, "2020")

    def unlock(self: Terraform, id_: str) -> None:
        lock.unlink()
        raise ProvisionError("terraform force-unlock: there is no lock")

    with world.nodes("a") as nodes:
        with monkeypatch.context() as patched:
            patched.setattr(Terraform, "unlock", unlock)
            assert len(nodes.make()) == 3  # although the old lock has gone meanwhile
            assert not lock.exists()
        lock_of(world, "2037")
        with pytest.raises(ProvisionError, match=r"^terraform plan: Error acquiring the state lock"):
            nodes.make()
        assert lock.exists()
        lock.unlink()
        nodes.end()


def test_nodes_that_are_handed_over_are_ended_and_forgotten_by_the_next_reaper(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    with world.nodes("a", prices={"generation": 3600.0, "trainer": 3600.0}) as nodes:
        nodes.make()
        world.forward(10.0)
        nodes.hand_over()
    seen: list[tuple[str, str, dict[str, Any]]] = []

    def forget(run: str) -> None:
        seen.append((run, lease_of(world)["by"], world.living()))

    reaper = world.reaper("r")
    monkeypatch.setattr(reaper, "_forget", forget)
    (reaped,) = reaper.reap()
    assert dataclasses.asdict(reaped) == {
        "run": RUN,
        "owner": "somebody@example.org",
        "over_since": "it was put down",
        "ended": "3 aws_instance, 2 aws_launch_template, 1 aws_security_group",
        "cost": reaped.cost,
        "failed": None,
    }
    assert float(reaped.cost.removeprefix("$")) >= 30.0  # three nodes, a dollar a second
    assert seen == [(RUN, "reaper", {})]  # while the reaper has its lease


class Waits:
    """Somebody comes here, and goes on when a test wants it."""

    def __init__(self) -> None:
        self.there, self.go_on = threading.Event(), threading.Event()

    def __call__(self, *_: object) -> None:
        self.there.set()
        assert self.go_on.wait(PATIENCE_S)


def in_terraform(world: World, here: Waits, patched: pytest.MonkeyPatch) -> None:
    slow = {"kind": "slow", "nth": 0, "seconds": 10 * PATIENCE_S}
    world.plan({"place": f"{command}:middle", **slow} for command in ("apply", "destroy"))


def before_the_apply(world: World, here: Waits, patched: pytest.MonkeyPatch) -> None:
    patched.setattr(LeasedNodes, "_apply", lambda self, plan, apply=LeasedNodes._apply: (here(), apply(self, plan)))


def at_a_stray(world: World, here: Waits, patched: pytest.MonkeyPatch) -> None:
    patched.setattr("tests.provisioning.world.ScriptedCloud.end", lambda self, found, confirm: (here(), confirm()))
    ledger.make(str(world.folder), RUN, "aws_instance", "stray", "trainer")


@pytest.mark.parametrize(
    ("where", "what"),
    [
        (in_terraform, "replace"),
        (in_terraform, "end"),
        (before_the_apply, "replace"),
        (at_a_stray, "replace"),
    ],
)
def test_nodes_are_handed_over_whatever_another_thread_is_at(
    world: World, monkeypatch: pytest.MonkeyPatch, where: Callable[..., None], what: str
) -> None:
    monkeypatch.setattr(leased, "_STOP_S", 0.2)
    here, raised = Waits(), list[BaseException]()

    def change() -> None:
        try:
            nodes.replace(["generation-1"]) if what == "replace" else nodes.end()
        except ProcessError as error:
            raised.append(error)

    with world.nodes("a") as nodes, monkeypatch.context() as patched:
        nodes.make()
        where(world, here, patched)
        thread = threading.Thread(target=change, daemon=True)
        thread.start()
        until(lambda: here.there.is_set() or any(fault["kind"] == "slow" for fault in world.struck()))
        handing = threading.Thread(target=nodes.hand_over, daemon=True)
        handing.start()
        handing.join(PATIENCE_S)
        assert not handing.is_alive()  # the other thread is still there
        assert lease_of(world)["held_until"] is None
        before = effects(world)
        here.go_on.set()
        thread.join(PATIENCE_S)
        assert effects(world) == before
        assert [type(error) for error in raised] == [LeaseLostError]
        assert str(raised[0]) == f"run {RUN}: its nodes were handed over, to be ended by the reaper"
        nodes.hand_over()  # again is fine
        with pytest.raises(LeaseLostError):
            nodes.make()
    world.plan([])
    ended_by_the_reaper(world)


class AskedToEndError(BaseException):
    """As Prefect raises it in the main thread where the process is sent SIGTERM."""


@pytest.mark.parametrize("place", ["init", "apply:middle"])
def test_a_flow_that_is_asked_to_end_hands_its_nodes_over(
    world: World, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """As its own thread waits for terraform."""
    monkeypatch.setattr(leased, "_STOP_S", 0.2)
    with world.nodes("a") as nodes:
        nodes.make()
    world.plan([{"place": place, "kind": "slow", "nth": 0, "seconds": 10 * PATIENCE_S}])

    def ask_to_end(*_: object) -> None:
        raise AskedToEndError

    def send() -> None:
        until(world.struck)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, ask_to_end)
    threading.Thread(target=send, daemon=True).start()
    try:
        with suppress(AskedToEndError), world.nodes("a") as nodes:
            nodes.replace(["trainer-0"])
            nodes.end()
    finally:
        signal.signal(signal.SIGUSR1, before)
    world.plan([])
    assert ended_by_the_reaper(world).over_since == "it was put down"


def test_a_terraform_whose_end_is_not_seen_costs_the_margin_of_clocks(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Terraform, "stop", lambda self, within_s: False)
    with world.nodes("a") as nodes:
        nodes.make()
        nodes.hand_over()
    assert world.reaper("r").reap() == []
    world.forward(world.margin_s + 0.1)
    ended_by_the_reaper(world)


# ---- the reaper ----


def test_what_a_reaper_did_not_end_the_next_one_does(world: World) -> None:
    with world.nodes("a") as nodes:
        nodes.make()
    world.forward(40.0)
    struck(world, ("cloud:end", "quota", 2))
    (reaped,) = world.reaper("r").reap()
    assert reaped.failed is not None
    assert str(reaped).endswith(f"to be tried again: {reaped.failed}")
    ended_by_the_reaper(world)
    with world.nodes("a") as nodes:  # whose state says that all is there
        assert len(nodes.make()) == 3
        nodes.end()
    assert world.living() == {}


@pytest.mark.parametrize("fault", [("cloud:found", "throttling"), ("cloud:end", "unavailable", 1)])
def test_reaper_repeats_what_fails_for_reasons_that_pass(world: World, fault: tuple[str, str]) -> None:
    with world.nodes("a") as nodes:
        nodes.make()
        nodes.hand_over()
    struck(world, fault)
    reaped = ended_by_the_reaper(world)
    assert reaped.ended == "3 aws_instance, 2 aws_launch_template, 1 aws_security_group"  # in all tries
    assert len(world.struck()) == 1


@pytest.mark.parametrize("code", ["DependencyViolation", "DeleteConflict", "InvalidPlacementGroup.InUse"])
def test_what_is_still_used_is_ended_a_little_later(code: str) -> None:
    assert leased.passes(ProvisionError(f"aws: An error occurred ({code}) when calling the Delete operation: in use"))


def test_what_the_cloud_still_lists_is_looked_for_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    role, looks = Found(kind="aws_iam_role", id="areal-r", run=RUN), list[str | None]()

    def found(self: ScriptedCloud, run: str | None = None) -> list[Found]:
        looks.append(run)
        return [role] if len(looks) <= 3 else []

    with world.nodes("a") as nodes:
        nodes.make()
        nodes.hand_over()
    monkeypatch.setattr(ScriptedCloud, "found", found)
    monkeypatch.setattr(ScriptedCloud, "end", lambda *_: None)
    (reaped,) = world.reaper("r").reap()
    assert (reaped.failed, reaped.ended) == (None, "1 aws_iam_role")


def test_cost_is_unknown_where_no_node_was_ever_seen(world: World) -> None:
    world.leases().acquire(RUN, Claimant(owner="o", by="flow", where="w"), 30.0, request=None)  # and its flow dies
    world.forward(40.0)
    reaped = ended_by_the_reaper(world)
    assert (reaped.ended, reaped.cost) == ("nothing was left", "-")


def test_empty_cloud_is_swept_without_the_store(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: object) -> None:
        raise StorageError("away")

    reaper = world.reaper("r")
    monkeypatch.setattr(Leases, "known", away)
    assert reaper.reap() == []
    ledger.make(str(world.folder), RUN, "aws_instance", "stray", "trainer")
    assert [one.failed for one in reaper.reap()] == ["the sweep: away"]


@pytest.mark.parametrize(
    "changes",
    [
        {"held_until": 1e300},
        {"request": {"run": RUN, "foundation": "bucket"}},
    ],
)
def test_a_lease_that_can_t_be_read_blocks_nobody(world: World, changes: dict[str, Any]) -> None:
    for run in (RUN, "second"):
        with world.nodes("a", run) as nodes:
            nodes.make()
            nodes.hand_over()
    file = world.folder / "store" / LEASE
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    reaped = {one.run: one for one in world.reaper("r").reap()}
    assert [(run, one.failed) for run, one in reaped.items()] == [(RUN, None), ("second", None)]
    assert world.living() == {}
    assert lease_of(world) is None


def test_a_clone_of_a_machine_is_another_place(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    with world.nodes("a") as nodes:
        nodes.make()
        monkeypatch.setattr(leased, "boot_id", lambda: "of another boot")
        (world.folder / "a").rename(world.folder / "original")
        shutil.copytree(world.folder / "original", world.folder / "a")
        with pytest.raises(HeldError, match="is at its nodes, on "), world.nodes("a", patience_s=0.0):
            pass


def test_what_has_no_lease_is_swept(world: World) -> None:
    with world.nodes("a") as nodes:
        nodes.make()
    (world.folder / "store" / LEASE).unlink()
    young = world.reaper("r", young_s=300.0)
    assert young.reap() == []
    world.forward(301.0)
    (reaped,) = young.reap()
    assert (reaped.over_since, reaped.failed) == ("no lease", None)
    assert world.living() == {}


def test_runs_of_another_store_are_left_alone(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    with world.nodes("a") as nodes:
        nodes.make()
    found = [dataclasses.replace(each, near=False) for each in world.cloud().found()]
    (world.folder / "store" / LEASE).unlink()
    (world.folder / "store" / "terraform" / "runs" / f"{RUN}.tfstate").unlink()
    monkeypatch.setattr("tests.provisioning.world.ScriptedCloud.found", lambda self, run=None: found)
    assert world.reaper("r").reap() == []
    assert len(world.living()) == 6


# ---- commands ----


@pytest.fixture
def run_nodes(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """`make nodes` in this world."""
    file, request = tmp_path / "nodes.json", world.request()
    file.write_text(json.dumps(request))
    monkeypatch.setattr(nodes_command, "STATE", world.folder / "by-hand")
    monkeypatch.setattr(nodes_command, "cloud_of", lambda foundation: world.cloud())

    def leased_nodes(request: dict[str, Any], state: Path, **options: Any) -> LeasedNodes:
        return LeasedNodes(request, state, leases=world.leases(), cloud=world.cloud(), length_s=30.0, **options)

    monkeypatch.setattr(nodes_command, "LeasedNodes", leased_nodes)

    def run(action: str, *options: str) -> int:
        monkeypatch.setattr(sys, "argv", ["nodes", action, str(file), *options])
        return run_command(nodes_command.main)

    return run


def test_nodes_by_hand_live_until_they_expire(
    run_nodes: Callable[..., int], world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_nodes("apply") == 1  # nobody is there to say yes
    assert lease_of(world) is None
    assert run_nodes("apply", "--yes") == 0
    assert len(world.living()) == 6
    assert lease_of(world).items() >= {"by": "command", "held_until": None, "kept_until": EXPIRES_AT}.items()
    world.forward(3600.0)
    assert world.reaper("r").reap() == []
    assert run_nodes("destroy") == 1
    assert len(world.living()) == 6
    assert run_nodes("apply", "--yes", "--replace", "trainer-0") == 0
    assert run_nodes("hosts") == 0
    assert ids(world)["trainer-0"] in capsys.readouterr().out
    with pytest.raises(HeldError, match="keeps its nodes by hand"), world.nodes("a", patience_s=0.0):
        pass
    world.forward(EXPIRES_AT - world.clock().wall() + 10.0)
    assert ended_by_the_reaper(world).over_since == "2037-01-31T12:00:00Z"
    capsys.readouterr()
    assert run_nodes("hosts") == 0
    assert capsys.readouterr().out == "No nodes.\n"  # whatever Terraform's state says
    assert run_nodes("destroy", "--yes") == 0
    assert (world.living(), lease_of(world)) == ({}, None)


def test_reaping_by_hand(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["reap"])
    reap_command.reap(tmp_path)
    assert capsys.readouterr().out == "Nothing to reap: no cloud is known here.\n"
    with world.nodes("a") as nodes:
        nodes.make()
        nodes.hand_over()
    monkeypatch.setattr(reaper, "cloud_of", lambda foundation: world.cloud())
    monkeypatch.setattr(sys, "argv", ["reap", "--store", str(world.folder / "store")])
    reap_command.reap(tmp_path)
    assert f"run {RUN}: 3 aws_instance" in capsys.readouterr().out
    reap_command.reap(tmp_path)
    assert capsys.readouterr().out == "Nothing to reap.\n"
