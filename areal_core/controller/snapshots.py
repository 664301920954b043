"""Snapshots of the ledger for the trainer's checkpoints: jobs, which take as long as the store takes.

A job copies the ledger, seals the segments in which the copy's payloads lie, and uploads what the store does not have
of both. One runs at a time; a trainer that was restarted meanwhile has another one made. Each puts a file of its own
into the store, also where an old request for it comes once more: what a checkpoint holds by then stays what it is.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from pathlib import Path
from typing import Any

from areal_core.api.scored_groups import SUFFIX
from areal_core.controller.core.ledger import snapshot
from areal_core.controller.payloads import PayloadStore
from areal_core.storage import checkpoint
from areal_core.storage.checkpoint import FileEntry
from areal_core.storage.objects import Storage
from areal_core.storage.rundir import RunDir

_COPY = "ledger-snapshot-"


class Snapshots:
    """The jobs of one run's controller."""

    def __init__(self, run: RunDir, storage: Storage, payloads: PayloadStore, *, retain: bool) -> None:
        """`retain`: payloads that the checkpoint covers are kept, too."""
        self._run = run
        self._storage = storage
        self._payloads = payloads
        self._retain = retain
        self._number = run.info().number
        self._job: tuple[str, asyncio.Task[dict[str, Any]]] | None = None  # the last one
        self._uploaded: dict[str, FileEntry] = {}  # segments, by name in the store
        self.in_use: frozenset[str] = frozenset()  # of these, what a checkpoint is about to refer to
        # Held by a job, and by whoever deletes what is neither in use nor in a checkpoint: in an outage that takes long
        # enough for further checkpoints to come, which it would not know of.
        self.exclusive = asyncio.Lock()
        for copy in run.root.glob(f"{_COPY}*"):  # a killed controller's
            copy.unlink()

    async def take(self, step: int, job: str, timeout_s: float) -> dict[str, Any] | None:
        """What the manifest of `step` says of the snapshot: entries by name, `files` of the checkpoint and `shared`
        ones. None if it takes longer than `timeout_s`: then call again. The first call with the name `job` begins it.
        Raises StorageError and OSError."""
        before = self._job
        if before is None or before[0] != job:
            task = asyncio.ensure_future(self._take(step, None if before is None else before[1]))
            self._job = job, task
        else:
            task = before[1]
        done, _ = await asyncio.wait([task], timeout=timeout_s)
        return task.result() if done else None

    async def _take(self, step: int, before: asyncio.Task[Any] | None) -> dict[str, Any]:
        if before is not None:
            await asyncio.wait([before])
        copy = self._run.root / f"{_COPY}{step}.sqlite"  # no text of a request: a job may be called anything
        async with self.exclusive:
            try:
                consumed = None if self._retain else step
                segments = await asyncio.to_thread(snapshot, self._run.ledger, copy, consumed)
                await self._payloads.seal()
                self.in_use = frozenset(self._shared(segment) for segment in segments)
                return await asyncio.to_thread(self._upload, step, copy, sorted(segments))
            finally:
                copy.unlink(missing_ok=True)

    def _upload(self, step: int, copy: Path, segments: list[str]) -> dict[str, Any]:
        there = self._storage.sizes(checkpoint.PAYLOADS)
        for segment in segments:
            name, file = self._shared(segment), self._payloads.file(segment)
            entry = self._uploaded.get(name) or checkpoint.describe(file)
            if there.get(name) != entry.bytes:
                self._storage.put_file(file, name)
            self._uploaded[name] = entry
        ledger = checkpoint.ledger_name(secrets.token_hex(8))  # never that of another: a job may be asked for once more
        self._storage.child(checkpoint.folder_name(step, self._number)).put_file(copy, ledger)
        shared = {name: self._uploaded[name] for name in map(self._shared, segments)}
        self._uploaded = dict(shared)
        return {
            "files": {ledger: dataclasses.asdict(checkpoint.describe(copy))},
            "shared": {name: dataclasses.asdict(entry) for name, entry in shared.items()},
        }

    def _shared(self, segment: str) -> str:
        """Its name in the run's store: under this launcher's number, so that no other one deletes it."""
        return checkpoint.payload_name(segment + SUFFIX, self._number)
