"""One who works on the nodes of a run stands still before any of its calls, another one takes over, and it goes on.

The store, the cloud and Terraform are in memory; the code between them is the project's. A call is what goes over the
network. Whoever stands still has looked before, and acts after: nothing that the present holder relies on may be gone
then, and one more look of the reaper leaves nothing.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from areal_core.errors import ArealError, ProvisionError
from areal_core.storage.objects import ChangedError, MissingError
from flows.provision import leased
from flows.provision.leased import LeasedNodes
from flows.provision.leases import Clock, Leases, name_of
from flows.provision.nodes import Found, Host
from flows.provision.reaper import Reaper
from flows.provision.terraform import Change, KilledError, LockedError, Plan

RUN, LENGTH_S, MARGIN_S = "r", 300.0, 60.0
STATE = f"terraform/runs/{RUN}.tfstate"
INSTANCE, ROLE, GROUP = "aws_instance", "aws_iam_role", "aws_security_group"
WANTED = {"group": GROUP, "role": ROLE, "trainer-0": INSTANCE}
REQUEST = {"run": RUN, "foundation": {"bucket": "areal", "region": "us-east-1", "vpc_id": "vpc-1"}}
PATIENCE_S = 120.0

Key = tuple[str, str]  # kind and id


@dataclass
class World:
    """All that there is; of those who call, one named first may stand still before a call."""

    folder: Path
    stands_at: int | None = None
    epochs: bool = True  # names have them
    marks: bool = True  # leases say that somebody is ending the nodes
    now: float = 1e9
    there: set[Key] = field(default_factory=set)
    state: dict[str, Key] = field(default_factory=dict)
    serial: int = 0
    objects: dict[str, tuple[bytes, str]] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)  # of the first
    stands: threading.Event = field(default_factory=threading.Event)
    go_on: threading.Event = field(default_factory=threading.Event)
    numbers: Iterable[int] = field(default_factory=itertools.count)

    def call(self, me: str, what: str) -> None:
        if me != "first":
            return
        self.calls.append(what)
        if len(self.calls) - 1 == self.stands_at:
            self.stands.set()
            assert self.go_on.wait(PATIENCE_S)

    def number(self) -> str:
        return str(next(iter(self.numbers)))

    def leases(self, me: str) -> Leases:
        store: Any = Store(self, me)
        clock = Clock(wall=lambda: self.now, passed=lambda: self.now, sleep=lambda seconds: None)
        return Leases(store, margin_s=MARGIN_S, clock=clock)

    def nodes(self, me: str) -> LeasedNodes:
        return LeasedNodes(
            REQUEST,
            self.folder / me,
            length_s=LENGTH_S,
            leases=self.leases(me),
            cloud=Cloud(self, me),
            patience_s=0.0,
            log=lambda line: None,
        )

    def reap(self, me: str) -> None:
        reaper = Reaper(
            self.leases(me),
            self.folder / me,
            cloud_of=lambda _: Cloud(self, me),
            foundation=REQUEST["foundation"],
            length_s=LENGTH_S,
            young_s=0.0,
            log=lambda line: None,
        )
        reaper.reap()

    def pass_a_lease(self) -> None:
        self.now += LENGTH_S + MARGIN_S + 1.0


class Store:
    """As far as leases need one."""

    url = "store"

    def __init__(self, world: World, me: str) -> None:
        self._world, self._me = world, me

    def get_marked(self, name: str) -> tuple[bytes, str]:
        self._world.call(self._me, "read")
        if name not in self._world.objects:
            raise MissingError(name)
        return self._world.objects[name]

    def get_bytes(self, name: str) -> bytes:
        return self.get_marked(name)[0]

    def put_over(self, name: str, data: bytes, mark: str | None) -> str:
        self._world.call(self._me, "write" if data else "release")
        if self._world.objects.get(name, (b"", None))[1] != mark:
            raise ChangedError(name)
        data = data if self._world.marks else data.replace(b'"ending":true', b'"ending":false')
        self._world.objects[name] = data, self._world.number()
        return self._world.objects[name][1]

    def sizes(self, prefix: str) -> dict[str, int]:
        self._world.call(self._me, "list")
        return {name: len(data) for name, (data, _) in self._world.objects.items() if name.startswith(f"{prefix}/")}

    def list(self, prefix: str) -> list[str]:
        return sorted(self.sizes(prefix))


class Cloud:
    """Roles are deleted by name, whosever they are; the rest has ids of its own."""

    def __init__(self, world: World, me: str) -> None:
        self._world, self._me = world, me

    def found(self, run: str | None = None) -> list[Found]:
        self._world.call(self._me, "describe")
        return [Found(kind=kind, id=id_, run=RUN, near=True) for kind, id_ in sorted(self._world.there)]

    def end(self, found: Iterable[Found], confirm: Callable[[], None]) -> None:
        for each in found:
            confirm()
            self._world.call(self._me, f"delete {each.kind}")
            self._world.there.discard(each.key)


class Nodes:
    """Those of Terraform, of which no call is carried out once its guard is to have killed it."""

    state_name = STATE

    def __init__(self, request: Mapping[str, Any], state: Path, *, remaining_s: Any, **_: Any) -> None:
        self.variables: dict[str, Any] = dict(request)
        self._world, self.folder, self._remaining_s, self.terraform = WORLDS[-1], state / "provision", remaining_s, self
        self.folder.mkdir(parents=True, exist_ok=True)
        self._me = state.name
        self._planned: dict[Path, tuple[int, list[tuple[str, str]]]] = {}
        self._stopped = False

    def __exit__(self, *_: object) -> None:
        pass

    init = extend = clean = store_unstored = lambda self: None

    def stop(self, within_s: float) -> bool:
        self._stopped = True
        return True

    def held(self) -> set[Key]:
        self._world.call(self._me, "state pull")
        return set(self._world.state.values())

    def hosts(self) -> list[Host]:
        self._world.call(self._me, "output")
        its = [(name, key) for name, key in self._world.state.items() if key[0] == INSTANCE]
        return [Host(name=name, role="trainer", address="", id=id_, type="", spot=False) for name, (_, id_) in its]

    def plan(self, *, replace: Iterable[str] = ()) -> Plan:
        return self._plan(WANTED, set(replace))

    def plan_end(self) -> Plan:
        return self._plan({}, set())

    def _plan(self, wanted: Mapping[str, str], bad: set[str]) -> Plan:
        self._step("plan")
        known = {name for name, key in self._world.state.items() if key in self._world.there}
        steps = [("delete", name) for name in reversed(list(self._world.state)) if name in known - wanted.keys() | bad]
        steps += [("create", name) for name in wanted if name not in known or name in bad]
        plan = Plan(Path(self._world.number()), tuple(Change(f"m.{WANTED[name]}.node", "create") for _, name in steps))
        self._planned[plan.path] = self._world.serial, steps
        return plan

    def apply(self, plan: Plan) -> None:
        world, (serial, steps) = self._world, self._planned[plan.path]
        self._step("lock")
        if f"{STATE}.tflock" in world.objects:
            raise LockedError("locked")
        lock = json.dumps({"ID": world.number(), "Who": "me", "Created": _time(world.now)}).encode()
        world.objects[f"{STATE}.tflock"] = lock, ""
        if serial != world.serial:
            raise ProvisionError("Saved plan is stale")
        state = {name: key for name, key in world.state.items() if key in world.there}
        for action, name in steps:
            kind = WANTED[name]
            self._step(f"{action} {kind}, by terraform")
            if action == "delete":
                world.there.discard(state.pop(name))
                continue
            epoch = self.variables["epoch"] if world.epochs else ""
            state[name] = kind, f"areal-{RUN}-{epoch}" if kind == ROLE else world.number()
            if state[name] in world.there:
                raise ProvisionError("EntityAlreadyExists")
            world.there.add(state[name])
        self._step("store the state")
        world.state, world.serial = state, world.serial + 1
        if world.objects.get(f"{STATE}.tflock") == (lock, ""):
            del world.objects[f"{STATE}.tflock"]

    def unlock(self, id_: str) -> None:
        self._step("force-unlock")
        lock = self._world.objects.get(f"{STATE}.tflock")
        if lock is None or json.loads(lock[0])["ID"] != id_:
            raise ProvisionError("no such lock")
        del self._world.objects[f"{STATE}.tflock"]

    def _step(self, what: str) -> None:
        self._world.call(self._me, what)
        if self._stopped or self._remaining_s() <= 0.0:
            raise KilledError(what)


WORLDS: list[World] = []  # of `Nodes`, the last


def _time(now: float) -> str:
    return datetime.fromtimestamp(now, UTC).isoformat()


# ---- who works on the nodes ----


def make(nodes: LeasedNodes) -> None:
    nodes.make()


def replace(nodes: LeasedNodes) -> None:
    nodes.make()
    nodes.replace(["trainer-0"])


def end(nodes: LeasedNodes) -> None:
    nodes.end()


def make_and_end(nodes: LeasedNodes) -> None:
    nodes.make()
    nodes.end()


def hand_over(nodes: LeasedNodes) -> None:
    nodes.make()
    nodes.hand_over()


Work = Callable[[LeasedNodes], None]
FLOWS: list[Work] = [make, replace, end, make_and_end, hand_over]


def lease_alone(world: World) -> None:
    pass


def no_lease(world: World) -> None:
    del world.objects[name_of(RUN)]
    world.objects[STATE] = b"{}", ""


def a_stray(world: World) -> None:
    world.there.add((INSTANCE, "stray"))


def a_lock(world: World) -> None:
    lock = {"ID": "old", "Who": "one who is dead", "Created": _time(world.now - 1.0)}
    world.objects[f"{STATE}.tflock"] = json.dumps(lock).encode(), ""


FIRST: dict[str, tuple[Callable[[World], None], Work | None]] = {
    **{f"flow: {work.__name__}": (lease_alone, work) for work in FLOWS},
    **{f"flow, with a stray: {work.__name__}": (a_stray, work) for work in (make, end)},
    **{f"flow, with a lock: {work.__name__}": (a_lock, work) for work in (make, end)},
    "reaper": (lease_alone, None),
    "reaper, with a stray": (a_stray, None),
    "reaper, the sweep": (no_lease, None),
}
SECOND: dict[str, list[Work | None]] = {
    **{f"flow: {work.__name__}": [work] for work in FLOWS},
    "reaper": [None],
    "reaper, then flow: make": [None, make],
}


def play(world: World, first: str, second: str) -> tuple[bool, set[Key]]:
    """Whether the first one stood still; and what the second one relied on and is gone."""
    WORLDS.append(world)
    before, work = FIRST[first]
    with world.nodes("earlier") as nodes:  # and dies
        nodes.make()
    world.pass_a_lease()
    before(world)

    def run() -> None:
        with suppress(ArealError):
            if work is None:
                world.reap("first")
                return
            with world.nodes("first") as nodes:
                work(nodes)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while not world.stands.wait(0.001) and thread.is_alive():
        pass
    stood = world.stands.is_set()
    with ExitStack() as stack:
        if stood:
            world.pass_a_lease()
            for number, other in enumerate(SECOND[second]):
                if other is None:
                    world.reap(f"second-{number}")
                    continue
                nodes = stack.enter_context(world.nodes(f"second-{number}"))
                other(nodes)
        relied_on = set(world.state.values()) & world.there
        alive = stood and SECOND[second][-1] in (make, replace)
        world.go_on.set()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
        gone = relied_on - world.there if alive else set[Key]()
    world.pass_a_lease()
    world.reap("last")
    WORLDS.pop()
    return stood, gone


def schedules(folder: Path, first: str, second: str, **options: Any) -> Iterable[tuple[World, set[Key]]]:
    for at in itertools.count():
        world = World(folder, stands_at=at, **options)
        stood, gone = play(world, first, second)
        if not stood:
            return
        yield world, gone


@pytest.fixture(autouse=True)
def in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leased, "Nodes", Nodes)
    monkeypatch.setattr(leased, "_PAUSE_S", 0.0)


@pytest.mark.parametrize("first", FIRST)
def test_whoever_goes_on_late_deletes_nothing_of_the_present_holder(tmp_path: Path, first: str) -> None:
    for second in SECOND:
        for world, gone in schedules(tmp_path, first, second):
            at = f"{first}, before call {world.stands_at} ({world.calls[world.stands_at or 0]}), beside {second}"
            assert gone == set(), at
            assert world.there == set(), at
            assert not world.objects[name_of(RUN)][0], at


@pytest.mark.parametrize("lacking", ["epochs", "marks"])
def test_a_safeguard_that_is_not_there_is_missed(tmp_path: Path, lacking: str) -> None:
    found = [
        gone
        for first in ("flow, with a stray: end", "reaper")
        for second in SECOND
        for _, gone in schedules(tmp_path, first, second, **{lacking: False})
    ]
    assert any(found)
