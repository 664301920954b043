"""All that the nodes of a run live on, in memory: a store, a cloud, a Terraform and a clock.

The code between them is the project's. A call is what goes over the network; `World.strike` decides what befalls it.
Time passes a second a call, and where a test lets it.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

from areal_core.errors import ArealError, ProcessError, ProvisionError, StorageError
from areal_core.storage.objects import ChangedError, MissingError
from flows.provision import leased
from flows.provision.leased import LeasedNodes
from flows.provision.leases import Claimant, Clock, HeldLease, Leases, name_of
from flows.provision.nodes import CloudResource, Host
from flows.provision.reaper import Reaper
from flows.provision.terraform import Change, KilledError, LockedError, Plan

T = TypeVar("T")
Key = tuple[str, str]  # kind and id

RUN, LENGTH_S, MARGIN_S = "r", 300.0, 60.0
STATE, LEASE = f"terraform/runs/{RUN}.tfstate", name_of(RUN)
LOCK = f"{STATE}.tflock"
INSTANCE, ROLE, GROUP = "aws_instance", "aws_iam_role", "aws_security_group"
WANTED = {"group": GROUP, "role": ROLE, "generation-0": INSTANCE, "trainer-0": INSTANCE}
REQUEST = {
    "run": RUN,
    "foundation": {"bucket": "areal", "region": "us-east-1", "vpc_id": "vpc-1"},
    "lease": {"owner": "somebody@example.org", "expires_at": "2037-01-31T12:00:00Z"},
}
ERRORS = {
    "throttled": "api error RequestLimitExceeded: later",
    "unavailable": "StatusCode: 503, api error ServiceUnavailable: later",
    "quota": "api error VcpuLimitExceeded: more than allowed",
    "capacity": "StatusCode: 500, api error InsufficientInstanceCapacity: none",
}


class DeadError(ProcessError):
    """Whoever makes this call is dead; `both`: with his Terraform."""


@dataclass
class World:
    """All that there is. Those who work in it have names, which are also their folders: machines of their own."""

    folder: Path
    now: float = 1.9e9
    there: dict[Key, float] = field(default_factory=dict)  # and when it was made
    state: dict[str, Key] = field(default_factory=dict)
    serial: int = 0
    objects: dict[str, tuple[bytes, str]] = field(default_factory=dict)
    calls: list[tuple[str, str]] = field(default_factory=list)
    strike: Callable[[str, str], str | None] = lambda me, place: None
    dead: set[str] = field(default_factory=set)
    busy: set[str] = field(default_factory=set)  # machines on which somebody works on the nodes
    skews: dict[str, float] = field(default_factory=dict)  # of clocks
    holders: dict[str, str] = field(default_factory=dict)
    intruders: list[str] = field(default_factory=list)  # who changed something without the lease
    wrongly_destroyed: list[str] = field(default_factory=list)  # while somebody else had it
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        _worlds[self.folder] = self

    def call(self, me: str, place: str, effect: Callable[[], T]) -> T:
        """Somebody makes a call, unless it fails, or he dies, before it or after it."""
        if me in self.dead:
            raise DeadError(me)
        self.now += 1.0
        self.calls.append((me, place))
        kind = self.strike(me, place)
        if kind in ("die", "both"):
            self.dead.add(me)
            raise DeadError(kind)
        if kind == "killed":
            raise KilledError(place)
        if kind in ERRORS:
            raise _error(place, kind)
        answer = effect()
        if kind == "unanswered":
            raise _error(place, "unavailable")
        if kind == "die after":
            self.dead.add(me)
            raise DeadError(kind)
        return answer

    def number(self) -> str:
        return str(next(self.numbers))

    def pass_(self, seconds: float) -> None:
        self.now += seconds

    def pass_a_lease(self) -> None:
        self.pass_(LENGTH_S + MARGIN_S + 1.0)

    def leases(self, me: str) -> Leases:
        return _Leases(self, me)

    def nodes(self, me: str, **options: Any) -> LeasedNodes:
        given = {"length_s": LENGTH_S, "log": lambda line: None, **options}
        return LeasedNodes(REQUEST, self.folder / me, leases=self.leases(me), cloud=Cloud(self, me), **given)

    def reaper(self, me: str, *, young_s: float = 0.0) -> Reaper:
        options = {"length_s": LENGTH_S, "young_s": young_s, "log": lambda line: None}
        cloud_of = lambda _: Cloud(self, me)  # noqa: E731
        return Reaper(self.leases(me), self.folder / me, cloud_of=cloud_of, foundation=REQUEST["foundation"], **options)

    def lease(self) -> dict[str, Any] | None:
        """None where there is none, or it was given back."""
        return json.loads(self.objects.get(LEASE, (b"",))[0] or b"null")

    def add(self, me: str, key: Key) -> None:
        self._check(me, f"makes {key}")
        self.there[key] = self.now

    def remove(self, me: str, key: Key) -> None:
        if self.there.pop(key, None) is not None:
            self._check(me, f"ends {key}", ends=True)

    def _check(self, me: str, what: str, *, ends: bool = False) -> None:
        """Whoever changes something has the lease, by the clocks of all."""
        lease = self.lease() or {"holder": None, "held_until": None}
        until = lease["held_until"] or 0.0
        if lease["holder"] != self.holders[me] or self.now > until + MARGIN_S:
            self.intruders.append(f"{me} {what}")
            if ends and self.now <= until:
                self.wrongly_destroyed.append(f"{me} {what}")

    def check_taken(self, before: dict[str, Any] | None, me: str) -> None:
        """Nobody takes a lease from somebody whose it still is, but from a dead one in the same place."""
        after = self.lease()
        if before is None or after is None or before["holder"] == after["holder"]:
            return
        until = max(before["held_until"] or 0.0, before["kept_until"] or 0.0 if after["by"] == "reaper" else 0.0)
        if self.now < until - MARGIN_S and before["where"] != after["where"]:
            self.intruders.append(f"{me} takes a lease {until - self.now:g} s before its end")


_worlds: dict[Path, World] = {}  # by their folders


class _Leases(Leases):
    def __init__(self, world: World, me: str) -> None:
        store: Any = Store(world, me)
        wall = lambda: world.now + world.skews.get(me, 0.0)  # noqa: E731
        super().__init__(store, margin_s=MARGIN_S, clock=Clock(wall, lambda: world.now, world.pass_))
        self._world, self._me = world, me

    def acquire(self, run: str, claimant: Claimant, *arguments: Any, **options: Any) -> HeldLease:
        self._world.holders[self._me] = claimant.holder
        return super().acquire(run, claimant, *arguments, **options)


class Store:
    """As far as leases need one."""

    url = "store"

    def __init__(self, world: World, me: str) -> None:
        self._world, self._me = world, me

    def get_with_etag(self, name: str) -> tuple[bytes, str]:
        def get() -> tuple[bytes, str]:
            if name not in self._world.objects:
                raise MissingError(name)
            return self._world.objects[name]

        return self._world.call(self._me, "store read", get)

    def get_bytes(self, name: str) -> bytes:
        return self.get_with_etag(name)[0]

    def put_if_unchanged(self, name: str, data: bytes, etag: str | None) -> str:
        world = self._world

        def put() -> str:
            before = world.lease()
            if world.objects.get(name, (b"", None))[1] != etag:
                raise ChangedError(name)
            world.objects[name] = data, world.number()
            world.check_taken(before, self._me)
            return world.objects[name][1]

        return world.call(self._me, "store write" if data else "store release", put)

    def sizes(self, prefix: str) -> dict[str, int]:
        objects = self._world.objects
        sizes = {name: len(data) for name, (data, _) in objects.items() if name.startswith(f"{prefix}/")}
        return self._world.call(self._me, "store list", lambda: sizes)

    def list(self, prefix: str) -> list[str]:
        return sorted(self.sizes(prefix))


class Cloud:
    """Roles are deleted by name, whosever they are; the rest has ids of its own."""

    def __init__(self, world: World, me: str) -> None:
        self._world, self._me = world, me

    def found(self, run: str | None = None) -> list[CloudResource]:
        def describe() -> list[CloudResource]:
            each, fixed = sorted(self._world.there.items()), {"run": RUN, "role": "trainer", "own_vpc": True}
            return [CloudResource(kind=kind, id=id_, since=at, **fixed) for (kind, id_), at in each]

        return self._world.call(self._me, "cloud describe", describe)

    def end(self, found: Iterable[CloudResource], confirm: Callable[[], None]) -> None:
        for each in found:
            self._world.call(self._me, "cloud confirm", lambda: None)
            confirm()
            self._world.call(self._me, "cloud delete", lambda each=each: self._world.remove(self._me, each.key))


class Nodes:
    """Those of Terraform, of which no call is carried out once its guard is to have killed it."""

    state_name = STATE

    def __init__(self, request: Mapping[str, Any], state: Path, *, remaining_s: Any = lambda: 1.0, **_: Any) -> None:
        self.variables: dict[str, Any] = dict(request)
        self._world, self._me, self.run = _worlds[state.parent], state.name, RUN
        self.folder, self._remaining_s, self.terraform = state / "provision", remaining_s, self
        self.folder.mkdir(parents=True, exist_ok=True)
        self._planned: dict[Path, tuple[int, list[tuple[str, str]]]] = {}
        self._stopped = False
        if self._me in self._world.busy:
            raise ProcessError("another command on this machine is changing its nodes")
        self._world.busy.add(self._me)

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, *_: object) -> None:
        self._world.busy.remove(self._me)

    init = extend = clean = lambda self: None

    def stop(self, within_s: float) -> bool:
        self._stopped = True
        return True

    def resources(self) -> set[Key]:
        return self._world.call(self._me, "terraform pull", lambda: set(self._world.state.values()))

    def hosts(self) -> list[Host]:
        its = [(name, id_) for name, (kind, id_) in self._world.state.items() if kind == INSTANCE]
        hosts = [Host(name=name, role=name[:-2], address="", id=id_, type="", spot=False) for name, id_ in its]
        return self._world.call(self._me, "terraform output", lambda: hosts)

    def plan(self, *, replace: Iterable[str] = ()) -> Plan:
        return self._plan(WANTED, set(replace))

    def plan_end(self) -> Plan:
        return self._plan({}, set())

    def _plan(self, wanted: Mapping[str, str], bad: set[str]) -> Plan:
        world = self._world
        with self._locked():
            self._step("terraform plan", lambda: None)
            known = [name for name, key in world.state.items() if key in world.there]
            ended = [name for name in reversed(known) if name not in wanted or name in bad]
            made = [name for name in wanted if name not in known or name in bad]
        actions = [(name, "replace" if name in made else "delete") for name in ended]
        actions += [(name, "create") for name in made if name not in ended]
        plan = Plan(Path(world.number()), tuple(Change(name, action) for name, action in actions))  # type: ignore[arg-type]
        self._planned[plan.path] = world.serial, [("delete", name) for name in ended] + [("create", n) for n in made]
        return plan

    def apply(self, plan: Plan) -> None:
        """What an error, or the owner's death, cuts short stores its state; a killed Terraform doesn't."""
        world, (serial, steps) = self._world, self._planned[plan.path]
        with self._locked():
            if serial != world.serial:
                raise ProvisionError("Saved plan is stale")
            state = {name: key for name, key in world.state.items() if key in world.there}
            try:
                for action, name in steps:
                    self._change(state, action, name)
                self._step("terraform store", lambda: None)
            except ArealError as error:
                if not (_leaves_all(error) or world.calls[-1][1] == "terraform store"):
                    world.state, world.serial = state, world.serial + 1
                raise
            world.state, world.serial = state, world.serial + 1

    def _change(self, state: dict[str, Key], action: str, name: str) -> None:
        world, kind = self._world, WANTED[name]
        if action == "delete":
            self._step("terraform delete", lambda: world.remove(self._me, state[name]))
            del state[name]
            return
        key = kind, f"areal-{RUN}-{self.variables['epoch']}" if kind == ROLE else world.number()

        def create() -> None:
            if key in world.there:
                raise ProvisionError("EntityAlreadyExists")
            world.add(self._me, key)

        self._step("terraform create", create)
        state[name] = key

    def unlock(self, id_: str) -> None:
        def unlock() -> None:
            lock = self._world.objects.get(LOCK)
            if lock is None or json.loads(lock[0])["ID"] != id_:
                raise ProvisionError("no such lock")
            del self._world.objects[LOCK]

        self._step("terraform force-unlock", unlock)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        world, id_ = self._world, self._world.number()
        lock = locked_by("me", world.now + world.skews.get(self._me, 0.0), id_)

        def take() -> None:
            if LOCK in world.objects:
                raise LockedError("locked")
            world.objects[LOCK] = lock

        self._step("terraform lock", take)
        try:
            yield
        except ArealError as error:
            if not _leaves_all(error):
                self._release(lock)
            raise
        if world.strike(self._me, "terraform unlock") == "unavailable":
            raise _error("terraform unlock", "unavailable")
        self._release(lock)

    def _release(self, lock: tuple[bytes, str]) -> None:
        if self._world.objects.get(LOCK) == lock:
            del self._world.objects[LOCK]

    def _step(self, place: str, effect: Callable[[], T]) -> T:
        def guarded() -> T:
            if self._stopped or self._remaining_s() <= 0.0:
                raise KilledError(place)
            return effect()

        return self._world.call(self._me, place, guarded)


def locked_by(who: str, now: float, id_: str) -> tuple[bytes, str]:
    """The lock of Terraform's state, as an object."""
    lock = {"ID": id_, "Who": who, "Created": datetime.fromtimestamp(now, UTC).isoformat()}
    return json.dumps(lock).encode(), ""


def _leaves_all(error: ArealError) -> bool:
    """Whether Terraform was killed: its lock stays, and its state is as it was."""
    return isinstance(error, KilledError) or (isinstance(error, DeadError) and str(error) == "both")


def _error(place: str, kind: str) -> ArealError:
    return (StorageError if place.startswith("store") else ProvisionError)(f"{place}: {ERRORS[kind]}")


@contextmanager
def in_memory() -> Iterator[None]:
    """Terraform is the one of a `World`, and nothing waits before it tries again."""
    with mock.patch.object(leased, "Nodes", Nodes), mock.patch.object(leased, "_PAUSE_S", 0.0):
        yield
