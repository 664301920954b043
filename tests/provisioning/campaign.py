"""Owners and reapers of one run under faults, by chance; then what is left, and who did what.

A scene has an owner, who makes the nodes, perhaps replaces one, and ends them; who may die, and come back on the same
machine or on another one. While one stands still others act: a rival, a reaper, the next owner. After the faults the
run is made once more or left alone, and the reaper looks twice at most. A seed decides all of it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path

from areal_core.errors import ArealError
from tests.provisioning.model import INSTANCE, LENGTH_S, MARGIN_S, WANTED, World, in_memory

_SKEW_S = 25.0  # at most, each way: two clocks differ by less than the margin
_MOST = 5  # faults of one scene

_PASSING = ("throttled", "unavailable")
_DEATHS = ("die", "both", "killed")
_CARRIED_OUT = ("unanswered", "die after")
_STORE = ("unavailable", "die", *_CARRIED_OUT, "stop")
_REAPERS = {
    "store read": ("unavailable", "die", "stop"),
    "store write": _STORE,
    "store release": _STORE,
    "store list": ("unavailable", "die"),
    "cloud describe": (*_PASSING, "die", "stop"),
    "cloud confirm": ("stop",),
    "cloud delete": (*_PASSING, "die", *_CARRIED_OUT),
}
_FLOWS = {place: kinds for place, kinds in _REAPERS.items() if place != "store list"} | {
    "terraform plan": (*_PASSING, *_DEATHS, "stop"),
    "terraform lock": ("unavailable", *_DEATHS, "stop"),
    "terraform create": (*_PASSING, "quota", "capacity", *_DEATHS, *_CARRIED_OUT, "stop"),
    "terraform delete": (*_PASSING, *_DEATHS, *_CARRIED_OUT, "stop"),
    "terraform store": ("unavailable", "quota", *_DEATHS, "stop"),
    "terraform unlock": ("unavailable",),
    "terraform force-unlock": ("unavailable", "die", *_CARRIED_OUT),
    "terraform pull": ("unavailable", "die", "stop"),
    "terraform output": ("unavailable", "die", "stop"),
}


@dataclass(frozen=True, slots=True)
class Fault:
    """What strikes an owner (flow) or a reaper the n-th time that it comes to a place."""

    actor: str
    place: str
    kind: str
    nth: int = 0

    @property
    def what(self) -> tuple[str, str]:
        """Kind and place."""
        return self.kind, f"{self.actor} {self.place}"


def faults() -> list[Fault]:
    """All that there are."""
    both = (("flow", _FLOWS), ("reaper", _REAPERS))
    return [Fault(actor, place, kind) for actor, its in both for place, kinds in its.items() for kind in kinds]


@dataclass(slots=True)
class Findings:
    """What does not hold, in lines."""

    leaked: list[str] = field(default_factory=list[str])  # what costs, or is in the way, and is nobody's
    wrongly_destroyed: list[str] = field(default_factory=list[str])  # ended by others than the one with the lease
    intruders: list[str] = field(default_factory=list[str])  # changed something without the lease, or after its end
    unfinished: list[str] = field(default_factory=list[str])  # runs that can't go on, leases that stay

    def problems(self) -> list[str]:
        return [f"{found.name}: {line}" for found in fields(self) for line in getattr(self, found.name)]


@dataclass(slots=True)
class Outcome:
    struck: list[tuple[str, str]]
    findings: Findings


class Scene:
    """One run's world, in which the faults that are planned strike."""

    def __init__(self, folder: Path, seed: int, planned: list[Fault]) -> None:
        self.world, self._rng = World(folder), random.Random(seed)
        self._again = seed % 2 == 0  # in the end the run is made once more
        self._left = list(planned)
        self._came: dict[Fault, int] = dict.fromkeys(planned, 0)
        self.struck: list[Fault] = []
        self._number = 0
        self.world.strike = self._strike

    def play(self) -> Outcome:
        for _ in range(self._rng.randint(1, 3)):
            self._own()
            for _ in range(self._rng.randint(0, 2)):
                self._time_passes()
                self._reap()
        return Outcome([fault.what for fault in self.struck], self._check())

    def _strike(self, me: str, place: str) -> str | None:
        due: Fault | None = None
        for fault in self._left:
            if me.startswith(fault.actor) and place == fault.place:
                self._came[fault] += 1
                due = fault if self._came[fault] > fault.nth else due
        if due is None:
            return None
        self._left.remove(due)
        self.struck.append(due)
        if due.kind != "stop":
            return due.kind
        self._time_passes()
        self._rng.choice((self._own, self._reap, lambda: None))()
        return None

    def _new(self, kind: str) -> str:
        """Somebody, whose clock may be off."""
        self._number += 1
        machine = self._rng.choice("ab") if kind == "flow" else str(self._number)
        me = f"{kind}-{machine}"
        if me not in self.world.busy:
            self.world.dead.discard(me)
            self.world.skews[me] = self._rng.choice((0.0, self._rng.uniform(-_SKEW_S, _SKEW_S)))
        return me

    def _time_passes(self) -> None:
        self.world.pass_(self._rng.choice((0.0, self._rng.uniform(0.0, 2 * LENGTH_S))))

    def _own(self) -> None:
        """What fails for good the owner gives up, what is lost he leaves alone."""
        patience_s = self._rng.choice((0.0, LENGTH_S + 2 * MARGIN_S))
        with suppress(ArealError), self.world.nodes(self._new("flow"), patience_s=patience_s) as nodes:
            hosts = nodes.make()
            nodes.check()
            if self._rng.random() < 0.5:
                nodes.replace([self._rng.choice(hosts).name])
            if self._rng.random() < 0.6:
                nodes.end()
            elif self._rng.random() < 0.5:
                nodes.hand_over()

    def _reap(self) -> None:
        with suppress(ArealError):  # the store is away for a moment
            self.world.reaper(self._new("reaper")).reap()

    def _check(self) -> Findings:
        """Time passes, the run is made again or left alone, the reaper looks; then all is counted."""
        world, self._left = self.world, []
        found = Findings(intruders=world.intruders, wrongly_destroyed=world.wrongly_destroyed)
        if self._again:
            world.pass_a_lease()
            self._make_again(found.unfinished)
        for _ in range(2):
            world.pass_a_lease()
            reaped = world.reaper("settling").reap()
            found.unfinished += [f"the reaper: {one}" for one in reaped if one.failed]
        found.leaked += [str(key) for key in world.there]
        if world.lease() is not None:
            found.unfinished.append(f"the lease was not given back: {world.lease()}")
        return found

    def _make_again(self, unfinished: list[str]) -> None:
        """The next owner of the same run finds everything as it should be."""
        world = self.world
        try:
            with world.nodes("settling") as nodes:
                hosts = nodes.make()
                instances = {id_ for kind, id_ in world.there if kind == INSTANCE}
                if {host.id for host in hosts} != instances or len(world.there) != len(WANTED):
                    unfinished.append(f"made again there are {sorted(world.there)}, hosts {hosts}")
                nodes.end()
        except ArealError as error:
            unfinished.append(f"could not be made again: {error}")


def play(folder: Path, seed: int, planned: list[Fault]) -> Outcome:
    with in_memory():
        return Scene(folder, seed, planned).play()


def run(folder: Path, wanted: int, seed: int, tell: Callable[[str], None]) -> list[Outcome]:
    """Scenes, until so many faults have struck; each fault's turn comes as often as every other's."""
    rng, outcomes, order, struck = random.Random(seed), list[Outcome](), list[Fault](), 0
    while struck < wanted:
        if len(order) < _MOST:
            order += rng.sample(faults(), len(faults()))
        number = 1 + len(outcomes) % _MOST
        planned = [Fault(each.actor, each.place, each.kind, int(rng.expovariate(0.5))) for each in order[:number]]
        order = order[number:]
        outcomes.append(play(folder / f"scene-{len(outcomes)}", seed * 1_000_000 + len(outcomes), planned))
        struck += len(outcomes[-1].struck)
        for line in outcomes[-1].findings.problems():
            tell(f"  scene {len(outcomes) - 1}: {line}")
    return outcomes
