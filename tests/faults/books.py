"""Faults of a run's books, in this process: ledger, versions and checkpoints are written by areal_core's own code, as
its controller and its trainer do it; messages come twice, late and out of order, and between two starts files are
torn, flipped, put back or gone, as a seed says. What there is at the end goes to the checker.

The weights of a version are a function of all batches before it: a run that went on from other batches than those that
were fixed makes other versions.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from areal_core.controller.core.ledger import Selection, TrajectoryLedger, snapshot
from areal_core.controller.payloads import DamagedPayloadError, PayloadStore
from areal_core.controller.restore import forget_damaged, restore
from areal_core.controller.snapshots import Snapshots
from areal_core.errors import ArealError, LedgerError
from areal_core.storage import checkpoint, weights
from areal_core.storage.objects import DamagedError, Storage
from areal_core.storage.parts import read_tensors
from areal_core.storage.rundir import RunDir, RunInfo
from areal_core.types import BatchManifest, GroupSummary, PolicyVersion
from tests.faults.checker import Findings, check
from tests.faults.history import History
from tests.support.runs import tiny

_GROUPS = 3  # of a batch
_ETA = 2
_EVERY, _KEPT = 2, 2  # steps between checkpoints, and checkpoints that are kept
_SEGMENT_BYTES = 700
_FILLING = 100  # transactions that fill a disk
_MOST_TOKENS = 20  # of a group
_SELECTION = Selection(groups=_GROUPS, rule="wait", max_staleness=_ETA, max_requeues=1)


@dataclass(slots=True)
class Books:
    """One run's books: the faults that befell them, and what came of it."""

    seed: int
    faults: Counter[str] = field(default_factory=Counter[str])
    findings: Findings = field(default_factory=Findings)


class _Run:
    def __init__(self, folder: Path, seed: int) -> None:
        self.result = Books(seed)
        self._chance = random.Random(seed)
        config = tiny(folder, warm=False, rollout={"max_staleness": _ETA}, training={"steps": 1000})
        self._store = Storage.open(str(folder / "store" / "runs" / "r"))
        self.store = folder / "store" / "runs" / "r"
        base = folder / "base"
        base.mkdir()
        save_file({"w": np.zeros(4, np.float32)}, base / "model.safetensors")
        self._info = RunInfo(run_id="r", model_path=str(base), checkpoint_url=self._store.url)
        self._config = config
        self.run = RunDir.create(config, self._info)
        self.history = History(folder / "history.jsonl", self.run.ledger)
        self._starts = 0
        self.damage: list[str] = []  # what happened between two starts
        self._spoilt: set[str] = set()  # files that were damaged, which nobody may have had to read since
        self._older: Path | None = None  # a copy of the ledger, of some time ago
        self._trained_on: dict[int, list[tuple[int, tuple[int, ...]]]] = {}  # by step: groups and their lengths
        self._scratch = folder / "scratch"
        self._scratch.mkdir()
        self._loop = asyncio.new_event_loop()
        self._start()

    # -- a run ------------------------------------------------------------------------------------------------------

    def go(self, steps: int) -> Books:
        while self._step < steps:
            self._train()
            if self._step < steps and self._chance.random() < 0.3:
                self._restart()
        self._end()
        return self.result

    def _start(self) -> None:
        """As the controller and the trainer start."""
        self._starts += 1
        self._info = self.run.numbered(self._starts)  # each time another launcher
        had = self.run.ledger.exists()
        restored = restore(self.run, self._store)
        if restored is not None or not had:  # nothing is left where no checkpoint is whole any more either
            self.history.moved(restored or 0)
        self._ledger = TrajectoryLedger(self.run.ledger, group_size=1)
        forget_damaged(self._ledger)
        self._ledger.publish(weights.base_version(self._info.model_path))
        self._ledger.resume(_MOST_TOKENS)
        self._payloads = PayloadStore(self.run.payloads, self._info.number, segment_bytes=_SEGMENT_BYTES)
        self._snapshots = Snapshots(self.run, self._store, self._payloads, retain=False)
        if restored is not None:
            self._ledger.notes.forget(restored + 1)
        self._sampled = 0
        self._ledger.counters.join("generation-0", f"url-{self._starts}", 0)
        self._resume()
        for group in self._ledger.inflight():
            self._roll_out(group.group_id)

    def _resume(self) -> None:
        """As the trainer starts."""
        while (found := checkpoint.newest(self._store, last=self._ledger.versions.last())) is not None:
            try:
                read_tensors(self._store, found, (checkpoint.WEIGHTS,))
                break
            except DamagedError as error:
                checkpoint.set_aside(self._store, found, str(error))
        self._step = 0 if found is None else found.step
        if found is not None:
            self._publish(self._step)

    def _train(self) -> None:
        step = self._step + 1
        if step <= self._ledger.payloads.forgotten:  # the controller ends, and another one restores
            self._close()
            self._start()
            return
        while (batch := self._ledger.batch(step) or self._ledger.fix_batch(step, _SELECTION)) is None:
            self._roll_out(self._ledger.admit().group_id)
            while self._has_room() and self._chance.random() < 0.5:
                self._roll_out(self._ledger.admit().group_id)
            self._stray(step)
        self.history.look()
        if not self._read(batch):
            self._resume()
            return
        self._step = step
        self._publish(step)
        if step % _EVERY == 0:
            self._checkpoint(step)
        self.history.look()

    def _read(self, batch: BatchManifest) -> bool:
        """Read the payloads of a batch; where one is damaged, all that are start again, as in the controller."""
        try:
            for group in batch.groups:
                self._loop.run_until_complete(self._payloads.read(self._ledger.payload(group.group_id)))
            return True
        except DamagedPayloadError:
            while self._ledger.free(batch.step - 1):
                pass
            for group_id, place in self._ledger.payloads.all():
                try:
                    self._loop.run_until_complete(self._payloads.read(place))
                except DamagedPayloadError:
                    if self._ledger.payloads.get(group_id) == place:
                        self._ledger.lose(group_id)
            forget_damaged(self._ledger)
            self._ledger.notes.forget(self._ledger.versions.last() + 1)
            self.history.moved(self._ledger.last_step())
            return False

    def _has_room(self) -> bool:
        """Eq. 3, for one more group."""
        newest = self._ledger.versions.newest()
        return self._ledger.admitted + 1 <= ((newest.version if newest else 0) + _ETA + 1) * _GROUPS

    def _roll_out(self, group_id: int) -> None:
        newest = self._ledger.versions.newest()
        version = newest.version if newest else 0
        tokens = self._chance.randrange(1, _MOST_TOKENS)
        self._sampled += tokens
        summary = GroupSummary(
            lengths=(tokens,),
            rewards=(1.0,),
            tokens=tokens,
            min_version=version,
            max_version=version,
            outcomes={},
            truncated=(False,),
        )
        place = self._loop.run_until_complete(self._payloads.append(self._chance.randbytes(100)))
        self._ledger.ready(group_id, summary, place, version=version)
        self._ledger.counters.report("generation-0", self._sampled, self._ledger.tokens().accounted)
        if self._chance.random() < 0.1:
            self._refused("ready twice", lambda: self._ledger.ready(group_id, summary, place, version=version))

    def _publish(self, step: int) -> None:
        made = weights.publish(self.run.weights, step, self._weights(step))
        self._ledger.publish(made)
        if self._chance.random() < 0.1:
            self.result.faults["version twice"] += 1
            self._ledger.publish(made)
        if self._chance.random() < 0.1:
            later = PolicyVersion(version=self._ledger.versions.last() + 2, path="", digest="early")
            self._refused("version early", lambda: self._ledger.publish(later))
        earlier = self._ledger.versions.get(max(0, step - self._chance.randrange(3)))
        if earlier is not None and self._chance.random() < 0.1:
            self.result.faults["version late"] += 1
            self._ledger.publish(earlier)

    def _weights(self, step: int) -> dict[str, np.ndarray]:
        """Of a version: of what all steps up to it were trained on."""
        for number in range(1, step + 1):
            if (batch := self._ledger.batch(number)) is not None:  # else it is folded
                self._trained_on[number] = [(group.group_id, group.lengths) for group in batch.groups]
        seen = [self._trained_on[number] for number in range(1, step + 1)]
        digest = hashlib.sha256(json.dumps(seen).encode()).digest()
        return {"w": np.frombuffer(digest[:16], np.uint8).astype(np.float32)}

    def _checkpoint(self, step: int) -> None:
        state = self._scratch / "state.safetensors"
        tensors = self._weights(step)
        save_file({f"weight/{name}": array for name, array in tensors.items()}, state)
        entries = self._loop.run_until_complete(self._snapshots.take(step, f"{self._starts}-{step}", 60.0))
        assert entries is not None
        uploaded, shared = (
            {name: checkpoint.FileEntry(**entry) for name, entry in entries[kind].items()}
            for kind in ("files", "shared")
        )
        extra = {"engine": {}, "config": {}, checkpoint.VERSION: self._ledger.versions.digest(step)}
        files = {checkpoint.WEIGHTS: state}
        checkpoint.save(self._store, step, files, extra, number=self._starts, uploaded=uploaded, shared=shared)
        in_use = self._snapshots.in_use
        oldest = checkpoint.prune(self._store, _KEPT, number=self._starts, in_use=in_use)
        while self._ledger.free(oldest) or self._ledger.fold():
            pass
        self._loop.run_until_complete(self._payloads.keep(self._ledger.payloads.segments()))
        if self._chance.random() < 0.2:
            self.result.faults["committed late"] += 1
            self._ledger.free(self._chance.randrange(max(1, step - _EVERY * _KEPT)))

    def _stray(self, step: int) -> None:
        """Messages that come out of order."""
        if self._chance.random() < 0.05:
            self._refused("batch early", lambda: self._ledger.fix_batch(step + 1, _SELECTION))
        if step > 1 and self._chance.random() < 0.05:
            self._refused("batch fixed twice", lambda: self._ledger.fix_batch(step - 1, _SELECTION))
        if self._chance.random() < 0.05:
            self._full_disk()

    def _refused(self, name: str, call: Callable[[], object]) -> None:
        self.result.faults[name] += 1
        try:
            call()
        except LedgerError:
            return
        self.result.findings.lost.append(f"seed {self.result.seed}: {name} was taken")

    def _full_disk(self) -> None:
        """The file may not grow for a while: transactions fail whole."""
        if not self._has_room():
            return
        self.result.faults["full disk"] += 1
        database = self._ledger._db  # nothing else can fill its disk  # pyright: ignore[reportPrivateUsage]
        pages = database.execute("PRAGMA page_count").fetchone()[0]
        database.execute(f"PRAGMA max_page_count = {pages}")
        with suppress(sqlite3.OperationalError):
            for _ in range(_FILLING):
                admitted = self._ledger.admit()
                self._ledger.drop(admitted.group_id, "generation", requeue=True)
        if database.in_transaction:
            self.result.findings.lost.append(f"seed {self.result.seed}: half a transaction on a full disk")
        database.execute("PRAGMA max_page_count = 1073741823")
        for group in self._ledger.inflight():
            self._roll_out(group.group_id)

    # -- between two starts ------------------------------------------------------------------------------------------

    def _restart(self) -> None:
        """All processes are gone; something may have happened to the files meanwhile."""
        files = [self.run.ledger.with_name(self.run.ledger.name + suffix) for suffix in ("", "-wal")]
        kept = {file: file.read_bytes() for file in files if file.exists()}  # as a killed process leaves them
        self._close()
        for file, data in kept.items():
            file.write_bytes(data)
        damage = self._chance.choice(list(_DAMAGE))
        self.result.faults[damage] += 1
        newest = checkpoint.newest(self._store)
        _DAMAGE[damage](self)
        if damage in _LOSE_THE_LEDGER:
            self.history.moved(0 if newest is None else newest.step)
        if self._chance.random() < 0.5:
            self._older = self._scratch / "older.sqlite"
            try:
                snapshot(self.run.ledger, self._older)
                TrajectoryLedger(self._older, group_size=1).close()
            except (sqlite3.Error, LedgerError):  # it is gone, or torn
                self._older.unlink(missing_ok=True)
        self.damage.append(damage)
        self._start()

    def _close(self) -> None:
        self._payloads.close()
        self._ledger.close()

    def crash(self) -> None:
        """Nothing is damaged."""

    def lose_ledger(self) -> None:
        for file in self.run.root.glob("ledger.sqlite*"):
            file.unlink()

    def lose_folder(self) -> None:
        shutil.rmtree(self.run.root)
        self.run = RunDir.create(self._config, self._info)

    def tear_ledger(self) -> None:
        data = self.run.ledger.read_bytes()
        self.lose_ledger()
        self.run.ledger.write_bytes(data[: self._chance.randrange(len(data))])

    def put_ledger_back(self) -> None:
        if self._older is not None and self._older.exists():
            self.lose_ledger()
            shutil.copy(self._older, self.run.ledger)

    def tear_log(self) -> None:
        file = self.run.ledger.with_name("ledger.sqlite-wal")
        if file.exists():
            data = file.read_bytes()
            file.write_bytes(data[: self._chance.randrange(len(data) + 1)])

    def spoil_version(self) -> None:
        """The newest one: of an older one nobody but the evaluator would learn, which is told its hash."""
        if folders := sorted(self.run.weights.glob("v*")):
            self._spoil(self._chance.choice(sorted(folders[-1].iterdir())))

    def spoil_checkpoint(self) -> None:
        """Of the newest one, where the one before is whole: it too may be spoilt, and nobody have read it since."""
        folders = sorted(file.parent for file in self.store.glob("checkpoints/step-*/manifest.json"))
        if len(folders) < 2 or str(folders[-2]) in {str(Path(file).parent) for file in self._spoilt}:
            return
        files = sorted(file for file in folders[-1].iterdir() if file.name != "manifest.json")
        if files and all(file.exists() for file in files):
            self._spoil(self._chance.choice(files))

    def spoil_payloads(self) -> None:
        """A segment, of those that are here."""
        if segments := sorted(self.run.payloads.glob("*.bin")):
            self._spoil(self._chance.choice(segments))

    def _spoil(self, file: Path) -> None:
        self._spoilt.add(str(file))
        data = file.read_bytes()
        how = self._chance.choice(("torn", "flipped", "missing"))
        if how == "missing":
            file.unlink()
        elif how == "torn":
            file.write_bytes(data[: self._chance.randrange(len(data))])
        else:
            place = self._chance.randrange(len(data))
            file.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])

    # -- the end ----------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        if self._step % _EVERY:
            self._checkpoint(self._step)
        (self.store / "final").mkdir()
        (self.store / "final" / "model.safetensors").touch()
        tokens = self._ledger.tokens()
        summary = {"tokens": {"consumed": tokens.consumed, "generated": tokens.generated}}
        self.run.summary.write_text(json.dumps(summary))
        found = check(self.run.root, self.store, self.history.entries(), steps=self._step)
        self._close()
        self._loop.close()
        found.checkpoints = [line for line in found.checkpoints if line.split(" ")[0] not in self._spoilt]
        found.lost += self.result.findings.lost
        self.result.findings = found


_DAMAGE: dict[str, Callable[[_Run], None]] = {
    "crash": _Run.crash,
    "ledger missing": _Run.lose_ledger,
    "ledger torn": _Run.tear_ledger,
    "ledger put back": _Run.put_ledger_back,
    "ledger's log torn": _Run.tear_log,
    "folder missing": _Run.lose_folder,
    "version spoilt": _Run.spoil_version,
    "checkpoint spoilt": _Run.spoil_checkpoint,
    "payloads spoilt": _Run.spoil_payloads,
}
_LOSE_THE_LEDGER = ("ledger missing", "ledger torn", "ledger put back", "ledger's log torn", "folder missing")


def strike(folder: Path, seed: int, *, steps: int = 14) -> Books:
    """A run of this many steps in the new `folder`, under faults."""
    folder.mkdir(parents=True)
    run = _Run(folder, seed)
    try:
        return run.go(steps)
    except (ArealError, sqlite3.Error, OSError) as error:  # a controller or a trainer that meets it ends each time
        run.result.findings.unresumable.append(f"seed {seed}: after {run.damage}: {type(error).__name__}: {error}")
        return run.result
