"""Faults of the store, in this process: checkpoints are saved, pruned and fetched by areal_core's own code on a file
system that fails, tears, flips, loses, repeats and delays what it is given, as a seed says.

What must hold: whatever is fetched is what was saved; the newest checkpoint that was committed and that nothing has
damaged since is found, or a newer one; no payload is freed that a resume from there would replay.
"""

from __future__ import annotations

import errno
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from areal_core.errors import StorageError
from areal_core.storage import checkpoint
from areal_core.storage.objects import Storage
from areal_core.storage.patience import Clock, RetryPolicy
from tests.faults.checker import Outcome
from tests.support.memory_store import MemoryStore

T = TypeVar("T")
KINDS = ("failed", "lost response", "torn", "cut short", "flipped", "missing", "late", "flapping")
_SILENT = ("cut short", "flipped", "missing")  # the caller is told that all went well
_LEDGER = checkpoint.ledger_name("1")
_EVERY = 2  # steps between two checkpoints
_KEPT = 3
_TRIES = 100  # of a resume under faults, at most
_BURST = 6  # calls in a row that a flapping store fails, at most


class FaultyStore(MemoryStore):
    """A store that strikes with probability `chance` at every request."""

    def __init__(self, chance: random.Random, faults: Counter[str], *, probability: float) -> None:
        super().__init__()
        self._chance = chance
        self._faults = faults
        self.probability = probability
        self._burst = 0  # calls that are still to fail
        self.late: dict[str, int] = {}  # path -> listings that do not show it yet
        self.damaged: set[str] = set()  # paths whose content is not what was put, until they are put again

    def put_bytes(self, path: str, data: bytes) -> None:
        kind = self._kind(KINDS)
        if kind == "failed":
            raise TimeoutError(errno.ETIMEDOUT, "Connection timed out")
        if kind != "missing":
            self.objects[path] = self._spoilt(data, kind)
        if kind == "late":
            self.late[path] = self._chance.randrange(1, 4)
        (self.damaged.add if kind in (*_SILENT, "torn") else self.damaged.discard)(path)
        if kind in ("lost response", "torn"):
            raise ConnectionResetError(104, "Connection reset by peer")

    def sizes(self, path: str) -> dict[str, int]:
        found = super().sizes(path)
        for late in self.late:
            found.pop(late, None)
        self.late = {late: left - 1 for late, left in self.late.items() if left > 1}
        return found

    def settle(self) -> None:
        """No fault strikes any more, and what was late has arrived."""
        self.probability, self._burst, self.late = 0.0, 0, {}

    def _kind(self, kinds: tuple[str, ...]) -> str | None:
        if self._burst:
            self._burst -= 1
            self._faults["flapping"] += 1
            return "failed"
        if self._chance.random() >= self.probability:
            return None
        kind = self._chance.choice(kinds)
        self._faults[kind] += 1
        if kind == "flapping":
            self._burst = self._chance.randrange(_BURST)
            return "failed"
        return kind

    def _call(self, what: str, path: str, work: Callable[[], T]) -> T:
        kind = self._kind(("failed", "lost response", "flapping"))
        if kind == "failed":
            raise TimeoutError(errno.ETIMEDOUT, "Connection timed out")
        result = work()
        if kind == "lost response":
            raise ConnectionResetError(104, "Connection reset by peer")
        return result

    def _spoilt(self, data: bytes, kind: str | None) -> bytes:
        place = self._chance.randrange(len(data))
        if kind in ("torn", "cut short"):
            return data[:place]
        if kind == "flipped":
            return data[:place] + bytes([data[place] ^ (1 << self._chance.randrange(8))]) + data[place + 1 :]
        return data


class _Run:
    """A run as its store sees it: what it saves, and what it goes on from."""

    def __init__(self, folder: Path, seed: int, *, probability: float) -> None:
        self.result, self._seed = Outcome(), seed
        self._chance = random.Random(seed)
        self._scratch = folder
        self._scratch.mkdir(parents=True)
        self._files = FaultyStore(self._chance, self.result.faults, probability=probability)
        # Pauses between two tries take no time; a burst of failures may outlast the patience.
        clock = Clock(self._files.clock, self._files.sleep)
        patience = RetryPolicy(self._chance.choice((0.0, 1.0, 60.0)), clock, quiet=True)
        self._store = Storage(self._files, "store", "s3://bucket/run", patience)
        self._committed: list[int] = []  # those that a caller was told of, and that were not pruned
        self._freed = 0  # payloads up to this step

    def run(self, checkpoints: int) -> Outcome:
        step = 0
        for _ in range(checkpoints):
            step += _EVERY
            try:
                self._save(step)
            except StorageError:
                step = self._resume()
        self._files.settle()
        self._resume()
        return self.result

    def _content(self, step: int) -> dict[str, bytes]:
        """The files of a step: the same whenever they are made."""
        chance = random.Random(f"{self._seed} {step}")
        return {name: chance.randbytes(chance.randrange(1, 4000)) for name in (checkpoint.WEIGHTS, _LEDGER)}

    def _save(self, step: int) -> None:
        """As the controller and the publisher do it."""
        paths: dict[str, Path] = {}
        for name, data in self._content(step).items():
            paths[name] = self._scratch / name
            paths[name].write_bytes(data)
        ledger = paths.pop(_LEDGER)
        self._store.child(checkpoint.folder_name(step, 0)).put_file(ledger, _LEDGER)
        extra = {"engine": {"updates": step}, checkpoint.VERSION: f"{step:064d}"}
        uploaded = {_LEDGER: checkpoint.describe(ledger)}
        checkpoint.save(self._store, step, paths, extra, uploaded=uploaded)
        self._committed = sorted({*self._committed, step})
        kept = checkpoint.prune(self._store, _KEPT)
        self._committed = self._committed[-_KEPT:]
        self._freed = max(self._freed, kept)

    def _resume(self) -> int:
        """Go on from the newest checkpoint, as soon as the store lets us look; returns its step."""
        found, late = None, False
        for attempt in range(_TRIES):
            late = bool(self._files.late)
            if attempt == _TRIES - 1:
                self._files.settle()
            try:
                found = checkpoint.newest_of(
                    self._store, lambda info: checkpoint.fetch(self._store, info, self._scratch / "fetched")
                )
                break
            except StorageError as error:
                if attempt == _TRIES - 1:
                    if all(map(self._damaged, self._committed)):
                        break  # rightly refused: there were some, and none is whole
                    self.result.findings["unresumable"].append(f"seed {self._seed}: {error}")
                    return self._committed[-1] if self._committed else 0
        sound = [step for step in self._committed if not self._damaged(step)]
        self._committed = sound  # the others are set aside, and made again
        newest = sound[-1] if sound else 0
        step = 0 if found is None else found[0].step
        if found is not None:
            self._compare(*found)
        if step < newest and not late:
            self.result.findings["lost"].append(f"seed {self._seed}: {newest} was committed, {step} is found")
        if step < self._freed and sound and not late:
            self.result.findings["unresumable"].append(
                f"seed {self._seed}: payloads are freed up to {self._freed}, {step} is found"
            )
        return max(step, newest)

    def _compare(self, info: checkpoint.CheckpointInfo, files: dict[str, Path]) -> None:
        wanted = self._content(info.step)
        told = (info.extra.get("engine"), info.extra.get(checkpoint.VERSION))
        found = {name: path.read_bytes() for name, path in files.items()}
        if (found, told) != (wanted, ({"updates": info.step}, f"{info.step:064d}")):
            self.result.findings["checkpoints"].append(
                f"seed {self._seed}: {info.folder} holds other files, or says {told}"
            )

    def _damaged(self, step: int) -> bool:
        folder = f"store/{checkpoint.folder_name(step, 0)}/"
        return any(path.startswith(folder) for path in self._files.damaged)


def strike(folder: Path, seed: int, *, checkpoints: int = 12, probability: float = 0.12) -> Outcome:
    """Save this many checkpoints in the new `folder`, under faults."""
    return _Run(folder, seed, probability=probability).run(checkpoints)
