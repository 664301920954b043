"""Snapshots of the ledger for the trainer's checkpoints, made by background jobs.

A job copies the ledger, seals the segments that hold the copy's payloads, and uploads the files that the store lacks.
One job runs at a time. A restarted trainer requests a new job. Each job, even a repeated one, stores the ledger under a
new name, so that it never changes a file of an existing checkpoint.
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
    """The snapshot jobs of one run's controller."""

    def __init__(self, run: RunDir, storage: Storage, payloads: PayloadStore, *, retain: bool) -> None:
        """`retain`: snapshots keep the payloads of steps that the checkpoint covers."""
        self.run = run
        self.storage = storage
        self.payloads = payloads
        self._retain = retain
        self.number = run.info().number
        self._job: tuple[str, asyncio.Task[dict[str, Any]]] | None = None  # name and task of the last job
        self._uploaded: dict[str, FileEntry] = {}  # uploaded segments, by name in the store
        self.in_use: frozenset[str] = frozenset()  # names of the segments that the next checkpoint will refer to
        # Jobs hold this lock, and so must any deletion of segments. In a store outage a deletion could otherwise
        # outlast further checkpoints, and delete segments that they refer to.
        self.exclusive = asyncio.Lock()
        for copy in run.root.glob(f"{_COPY}*"):  # left by a killed controller
            copy.unlink()

    async def take(self, step: int, job: str, timeout_s: float) -> dict[str, Any] | None:
        """Return the snapshot's manifest entries for `step`: `files` of the checkpoint and `shared` ones.

        The first call with the name `job` begins the job. Returns None if it takes longer than `timeout_s` seconds;
        then call again. Raises StorageError and OSError."""
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
        copy = self.run.root / f"{_COPY}{step}.sqlite"  # not named by the job, whose name comes from a request
        async with self.exclusive:
            try:
                consumed = None if self._retain else step
                segments = await asyncio.to_thread(snapshot, self.run.ledger, copy, consumed)
                await self.payloads.seal()
                self.in_use = frozenset(self._shared(segment) for segment in segments)
                return await asyncio.to_thread(self._upload, step, copy, sorted(segments))
            finally:
                copy.unlink(missing_ok=True)

    def _upload(self, step: int, copy: Path, segments: list[str]) -> dict[str, Any]:
        there = self.storage.sizes(checkpoint.PAYLOADS)
        for segment in segments:
            name, file = self._shared(segment), self.payloads.file(segment)
            entry = self._uploaded.get(name) or checkpoint.describe(file)
            if there.get(name) != entry.bytes:
                self.storage.put_file(file, name)
            self._uploaded[name] = entry
        ledger = checkpoint.ledger_name(secrets.token_hex(8))  # a new name, because a job may be repeated
        self.storage.child(checkpoint.folder_name(step, self.number)).put_file(copy, ledger)
        shared = {name: self._uploaded[name] for name in map(self._shared, segments)}
        self._uploaded = dict(shared)
        return {
            "files": {ledger: dataclasses.asdict(checkpoint.describe(copy))},
            "shared": {name: dataclasses.asdict(entry) for name, entry in shared.items()},
        }

    def _shared(self, segment: str) -> str:
        """Name of a segment in the run's store.
        It has this launcher's number, so that no other launcher deletes it."""
        return checkpoint.payload_name(segment + SUFFIX, self.number)
