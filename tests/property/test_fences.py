"""Deletes are fenced: an actor is stopped before any call of the store, another one takes the run over, and the first
goes on, later than it should. Whatever the order: nothing is lost that a checkpoint in force needs.

All of it is areal_core's own code, on a store in memory whose calls are counted.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from areal_core.errors import ProcessError, StorageError
from areal_core.storage import checkpoint
from areal_core.storage.checkpoint import CheckpointInfo
from areal_core.storage.lease import Lease, LeaseLostError
from areal_core.storage.objects import Storage
from areal_core.storage.patience import RetryPolicy
from tests.support.memory_store import MemoryStore

TTL_S = 1.0  # a few looks at a lease that is waited for: each is a call before which an actor is stopped
EVERY = 2  # steps between two checkpoints


@dataclass(eq=False)
class Actor:
    """A launcher on a machine of its own, as its controller and its trainer use the store."""

    files: MemoryStore
    folder: Path
    where: str
    keep: int
    damaged: bool = False  # what it finds newest is damaged
    saves: int = 2
    late_saves: int = 0  # that it makes after it was stopped, before it looks at its lease
    again: bool = False  # it saves a step a second time, as a trainer does that was restarted
    frees: bool = False  # it is `make prune`: it frees what is left over, and trains nothing
    in_force: dict[str, CheckpointInfo] = field(default_factory=dict[str, CheckpointInfo])
    number: int = 0
    step: int = -1  # that it has gone on from, or committed
    stopped: bool = False

    def live(self) -> None:
        (self.folder / self.where).mkdir(exist_ok=True)
        store = Storage(self.files, "run", "memory://run", RetryPolicy(0.0))
        lease = Lease(store, self.where, ttl_s=TTL_S, clock=self.files.clock, sleep=self.files.sleep)
        number = self.number = lease.acquire(above=lambda: checkpoint.highest_number(store))
        if self.frees:
            for name in checkpoint.leftovers(store, number):
                store.delete(name)
            lease.release()
            return
        if self.damaged and (newest := checkpoint.newest(store)):
            self.files.objects[f"run/{newest.folder}/weights"] = b"flipped"
        payloads = self._restore(store)
        late = self.late_saves
        for save in range(self.saves):
            if not self.stopped or late == 0:
                lease.renew()
            elif self.stopped:
                late -= 1
            payloads[f"{number:06d}-{save:06d}.bin"] = f"payload {number} {save}".encode()
            payloads = dict(sorted(payloads.items())[-2:])
            for _ in range(1 + (self.again and save == 0)):
                self._save(store, self.step + EVERY, number, payloads)
            self.step += EVERY
            checkpoint.prune(store, self.keep, number=number)
            complete = list(checkpoint._complete(store, checkpoint._sizes(store)))
            if complete[0].number == number:
                self.in_force = {info.folder: info for info in complete[: self.keep]}
        lease.renew()

    def _restore(self, store: Storage) -> dict[str, bytes]:
        found = checkpoint.newest_of(store, lambda info: self._fetched(store, info))
        if found is None:
            self.step = 0
            return {}
        info, payloads = found
        self.step = info.step
        return payloads

    def _fetched(self, store: Storage, info: CheckpointInfo) -> dict[str, bytes]:
        checkpoint.fetch(store, info, self.folder / self.where)
        return {name.rpartition("/")[2]: store.get_bytes(name) for name in info.shared}

    def _save(self, store: Storage, step: int, number: int, payloads: dict[str, bytes]) -> None:
        there = store.sizes(checkpoint.PAYLOADS)
        shared: dict[str, checkpoint.FileEntry] = {}
        for segment, data in payloads.items():
            name = checkpoint.payload_name(segment, number)
            (self.folder / self.where / segment).write_bytes(data)
            shared[name] = checkpoint.describe(self.folder / self.where / segment)
            if name not in there:
                store.put_file(self.folder / self.where / segment, name)
        weights = self.folder / self.where / "weights"
        weights.write_text(f"weights of step {step} by {number}")
        checkpoint.save(store, step, {"weights": weights}, {}, number=number, shared=shared)


def lost(files: MemoryStore, info: CheckpointInfo) -> list[str]:
    """Objects of a checkpoint that are gone, or others than its manifest says."""
    entries = {f"{info.folder}/{name}": entry for name, entry in info.files.items()} | info.shared
    return [
        name
        for name, entry in entries.items()
        if hashlib.sha256(files.objects.get(f"run/{name}", b"")).hexdigest() != entry.sha256
    ]


OTHERS: dict[str, dict[str, int | bool]] = {
    "commits once": {"saves": 1},
    "commits twice": {"saves": 2},
    "dies before it commits": {"saves": 0},
    "finds the newest damaged": {"saves": 1, "damaged": True},
    "frees what is left over": {"frees": True},
}


@pytest.mark.parametrize(
    "other", [pytest.param(name, marks=[] if name == "commits twice" else pytest.mark.slow) for name in OTHERS]
)
@pytest.mark.parametrize("first", ["trains", "frees"])
@pytest.mark.parametrize("keep", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_launcher_stopped_before_any_call_deletes_nothing_in_force(
    tmp_path: Path, keep: int, first: str, other: str
) -> None:
    if keep == 1 and other == "finds the newest damaged":
        pytest.skip("of one checkpoint that is kept, none is left when it is damaged")
    begun = MemoryStore()
    Actor(begun, tmp_path, "origin", keep, saves=3, again=True).live()
    for late in (0, 1):
        for stop in itertools.count():
            files = begun.copy()
            a = Actor(files, tmp_path, "a", keep, saves=3, late_saves=late, again=True, frees=first == "frees")
            b = Actor(files, tmp_path, "b", keep, **OTHERS[other])  # type: ignore[arg-type]
            if not interrupted(files, a, stop, b.live):
                break
            check(files, (a, b), f"stop {stop}, {late} late")


@pytest.mark.nightly
def test_two_launchers_stopped_in_turn_delete_nothing_in_force(tmp_path: Path) -> None:
    """The first is stopped at any deletion, the second at any call, a third commits; then the second goes on, then the
    first."""
    begun, keep = MemoryStore(), 1
    Actor(begun, tmp_path, "origin", keep, saves=3).live()
    for stop in deletions(begun, tmp_path, keep):
        again = 0
        while twice_interrupted(begun.copy(), tmp_path, keep, stop, again):
            again += 1


def twice_interrupted(files: MemoryStore, folder: Path, keep: int, stop: int, again: int) -> bool:
    a = Actor(files, folder, "a", keep, saves=3, late_saves=1)
    b = Actor(files, folder, "b", keep, saves=3, late_saves=1)
    c = Actor(files, folder, "c", keep, saves=1)
    reached: list[bool] = []
    assert interrupted(files, a, stop, lambda: reached.append(interrupted(files, b, again, c.live)))
    if reached[0]:
        check(files, (a, b, c), f"stops {stop} and {again}")
    return reached[0]


def deletions(begun: MemoryStore, folder: Path, keep: int) -> Iterator[int]:
    """The calls by which an actor that nobody stops deletes."""
    files = begun.copy()
    first = len(files.calls)
    Actor(files, folder, "a", keep, saves=3).live()
    yield from (index for index, call in enumerate(files.calls[first:]) if call.startswith("delete"))


def interrupted(files: MemoryStore, actor: Actor, stop: int, meanwhile: Callable[[], None]) -> bool:
    """Let the actor live but for a stop before this call, in which `meanwhile` happens; whether it came so far."""
    reached = False

    def intrude() -> None:
        nonlocal reached
        reached = actor.stopped = True
        meanwhile()

    with files.stop_at(stop, intrude):
        try:
            actor.live()
        except LeaseLostError:
            assert actor.stopped
        except (ProcessError, StorageError):  # it had not got the lease, or another one has freed what it reads
            assert actor.stopped
    return reached


def check(files: MemoryStore, actors: tuple[Actor, ...], schedule: str) -> None:
    """All that is in force of the last one who had the run is whole, and another machine goes on from the newest."""
    last = max(actors, key=lambda actor: actor.number)
    for info in last.in_force.values():
        assert lost(files, info) == [], f"{schedule}: {info.folder}"
    another = Actor(files, last.folder, "another", last.keep, saves=0)
    another.live()
    newest = [info.step for info in last.in_force.values()][:1]
    assert another.step >= (newest or [1])[0], schedule  # a run is never begun anew
