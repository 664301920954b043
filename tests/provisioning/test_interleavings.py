"""One who works on the nodes of a run stands still before any of its calls, another one takes over, and it goes on.

Whoever stands still has looked before, and acts after: nothing that the present holder relies on may be gone then, and
one more look of the reaper leaves nothing. Then the short form of `make bench NAME=provisioning`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from areal_core.errors import ArealError
from flows.provision.leased import LeasedNodes
from flows.provision.leases import HeldLease, Leases
from tests.provisioning import campaign
from tests.provisioning.model import INSTANCE, LEASE, LOCK, STATE, Key, World, in_memory, locked_by


@pytest.fixture(autouse=True)
def _in_memory() -> Iterator[None]:
    with in_memory():
        yield


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
    del world.objects[LEASE]
    world.objects[STATE] = b"{}", ""


def a_stray(world: World) -> None:
    world.there[INSTANCE, "stray"] = world.now


def a_lock(world: World) -> None:
    world.objects[LOCK] = locked_by("one who is dead", world.now - 1.0, "old")


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


def play(world: World, first: str, second: str, at: int) -> tuple[str | None, set[Key]]:
    """Before which call the first one stood still, if it came to it; and what the second one relied on and is gone."""
    before, work = FIRST[first]
    with world.nodes("earlier") as nodes:  # and dies
        nodes.make()
    world.pass_a_lease()
    before(world)
    left, stood, relied_on, stack = itertools.count(-at), list[str](), set[Key](), ExitStack()

    def strike(me: str, place: str) -> None:
        if me != "first" or next(left) != 0:
            return
        stood.append(place)
        world.pass_a_lease()
        for number, other in enumerate(SECOND[second]):
            if other is None:
                world.reaper(f"second-{number}").reap()
                continue
            nodes = stack.enter_context(world.nodes(f"second-{number}", patience_s=0.0))
            other(nodes)
        if SECOND[second][-1] in (make, replace):
            relied_on.update(set(world.state.values()) & world.there.keys())

    world.strike = strike
    with stack:
        with suppress(ArealError):
            if work is None:
                world.reaper("first").reap()
            else:
                with world.nodes("first", patience_s=0.0) as nodes:
                    work(nodes)
        gone = relied_on - world.there.keys()
    world.pass_a_lease()
    world.reaper("last").reap()
    return (stood[0] if stood else None), gone


def schedules(folder: Path, first: str, second: str) -> Iterable[tuple[World, str, set[Key]]]:
    for at in itertools.count():
        world = World(folder)
        stood, gone = play(world, first, second, at)
        if stood is None:
            return
        yield world, f"{first}, before {stood} (call {at}), beside {second}", gone


@pytest.mark.parametrize("first", FIRST)
def test_whoever_goes_on_late_deletes_nothing_of_the_present_holder(tmp_path: Path, first: str) -> None:
    for second in SECOND:
        for world, at, gone in schedules(tmp_path, first, second):
            assert gone == set(), at
            assert world.there == {}, at
            assert world.lease() is None, at


def found(folder: Path, faults: int) -> list[str]:
    outcomes = campaign.run(folder, faults, 1, lambda line: None)
    return [line for outcome in outcomes for line in outcome.findings.problems()]


def test_nothing_leaks_and_nothing_of_others_is_changed(tmp_path: Path) -> None:
    assert found(tmp_path, 300) == []


@pytest.mark.parametrize(
    ("owner", "name", "instead"),
    [
        (Leases, "is_over", lambda *_: True),  # it steals
        (HeldLease, "remaining_s", lambda *_: 1.0),  # and runs on
        (HeldLease, "renew", lambda *_, **__: None),
        (LeasedNodes, "_unlock", lambda *_: None),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_safeguard_that_is_not_there_is_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, instead: Callable[..., object]
) -> None:
    monkeypatch.setattr(owner, name, instead)
    assert found(tmp_path, 100)
