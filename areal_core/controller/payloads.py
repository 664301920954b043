"""Store the payloads of a run's groups in append-only files (segments) of the run's folder.

    payloads/000002-000007.bin     the 7th segment of the launcher with the fencing number 2

One process writes a segment, never changes it once it is sealed, and deletes it as a whole. One thread does all disk
work, so that gigabytes of payloads never block the event loop. Payloads that arrive while the thread is busy share
one sync.
"""

from __future__ import annotations

import asyncio
import os
import zlib
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from areal_core.api.scored_groups import SUFFIX, read_group_file, segment_file
from areal_core.api.wire import version_spans
from areal_core.controller.core.tables import Place
from areal_core.errors import StorageError
from areal_core.models.tokenizer import Tokenizer
from areal_core.storage import durable
from areal_core.types import BatchManifest, Int32Array

T = TypeVar("T")

_SEGMENT_BYTES = 64 * 2**20  # size at which the store begins a new segment


class DamagedPayloadError(StorageError):
    """A payload is missing, or differs from the stored one."""


@dataclass(eq=False)
class _Append:
    payload: bytes
    place: Place | None = None
    error: OSError | None = None


class PayloadStore:
    """The payloads of one run, for its controller's event loop. Raises StorageError for disk errors."""

    def __init__(self, folder: Path, number: int, *, segment_bytes: int = _SEGMENT_BYTES) -> None:
        """`number` is the launcher's fencing number. It makes segment names unique, on all machines."""
        self._folder = folder
        self._number = number
        self._segment_bytes = segment_bytes
        try:
            durable.make(folder)
            names = sorted(file.stem for file in folder.glob(f"*{SUFFIX}"))
        except OSError as error:
            raise StorageError(f"can't use {folder}: {error.strerror}") from error
        self._sealed = set(names)
        ours = [name for name in names if name.startswith(f"{number:06d}-")]
        self._count = int(ours[-1].partition("-")[2]) if ours else 0
        self._open: int | None = None  # descriptor of the current segment, named by `_count`
        self._size = 0  # bytes of the current segment
        self._waiting: deque[_Append] = deque()
        self._appends: set[_Append] = set()  # appends whose place may not be in the ledger yet
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="payloads")

    async def append(self, payload: bytes) -> Place:
        """Store a payload durably: it survives a power failure once this returns.
        The caller must record the returned place before its next await, or `keep` may delete the segment."""
        append = _Append(payload)
        self._appends.add(append)
        self._waiting.append(append)
        try:
            await self._do(self._flush)
            if append.error is not None:
                raise StorageError(
                    f"can't write {self._folder}: {append.error.strerror or append.error}"
                ) from append.error
            assert append.place is not None
            return append.place
        finally:
            self._appends.discard(append)

    async def read(self, place: Place) -> bytes:
        """Read a payload. Raises DamagedPayloadError."""
        return await asyncio.to_thread(read_payload, self._folder, place)

    async def seal(self) -> None:
        """Seal the current segment, so that all payloads so far lie in segments that no longer change."""
        await self._do(self._seal)

    async def keep(self, names: Collection[str]) -> None:
        """Delete all sealed segments except `names` and the last one, whose name must never be used again."""
        recent = {append.place.segment for append in self._appends if append.place is not None}
        doomed = self._sealed - set(names) - recent - {self._name}
        await self._do(lambda: self._delete(doomed))

    def file(self, segment: str) -> Path:
        return segment_file(self._folder, segment)

    def close(self) -> None:
        """Write the waiting payloads and end the thread."""
        self._thread.shutdown()
        self._seal()

    # -- in the thread ---------------------------------------------------------------------------------------------

    def _flush(self) -> None:
        """Write and sync all waiting payloads, including those of later calls."""
        batch: list[_Append] = []
        try:
            while self._waiting:
                batch.append(self._waiting.popleft())
                batch[-1].place = self._write(batch[-1].payload)
            if self._open is not None and batch:
                os.fdatasync(self._open)
        except OSError as error:
            for append in batch:
                append.error = error
            self._seal()  # continue in a new segment, whatever the failed write left in this one

    def _write(self, payload: bytes) -> Place:
        if self._open is not None and self._size >= self._segment_bytes:
            os.fdatasync(self._open)
            self._seal()
        if self._open is None:
            self._count += 1
            self._open = os.open(self.file(self._name), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            self._size = 0
            durable.sync(self._folder)
        place = Place(segment=self._name, start=self._size, bytes=len(payload), crc32=zlib.crc32(payload))
        left = memoryview(payload)
        while left:
            written = os.write(self._open, left)
            left, self._size = left[written:], self._size + written
        return place

    def _seal(self) -> None:
        if self._open is not None:
            os.close(self._open)
            self._open = None
            self._sealed.add(self._name)

    def _delete(self, names: Collection[str]) -> None:
        for name in names:
            self.file(name).unlink(missing_ok=True)
            self._sealed.discard(name)

    # -- inside ------------------------------------------------------------------------------------------------

    @property
    def _name(self) -> str:
        return f"{self._number:06d}-{self._count:06d}"

    async def _do(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def read_payload(folder: Path, place: Place) -> bytes:
    """Read a payload from the segments in `folder`. Raises DamagedPayloadError."""
    file = segment_file(folder, place.segment)
    try:
        with file.open("rb") as segment:
            payload = os.pread(segment.fileno(), place.bytes, place.start)
    except OSError as error:
        raise DamagedPayloadError(f"can't read {file}: {error.strerror}") from error
    if len(payload) != place.bytes or zlib.crc32(payload) != place.crc32:
        raise DamagedPayloadError(
            f"{file} is damaged: the payload at byte {place.start} does not match its length and CRC-32"
        )
    return payload


TABLE_GROUPS = 8
_OF_EACH = 2  # trajectories shown of each group


def trajectory_table(
    manifest: BatchManifest, prompts: Sequence[str], folder: Path, tokenizer: Tokenizer
) -> list[dict[str, Any]]:
    """Build table rows for trajectories of the oldest groups, whose prompts are `prompts`.
    `folder` holds the segments. Raises OSError, and StorageError for a damaged payload."""
    rows: list[dict[str, Any]] = []
    for group, prompt in zip(manifest.groups, prompts, strict=False):
        payload = read_group_file(folder, group, range(min(_OF_EACH, len(group.lengths))))
        end = 0
        for length, rollout in zip(payload.lengths.tolist(), group.rollout_of, strict=False):
            start, end = end, end + length
            rows.append(
                {
                    "step": manifest.step,
                    "prompt": prompt,
                    "completion": tokenizer.decode(payload.tokens[start:end].tolist()),
                    "reward": group.rewards[rollout],
                    "versions": _spans(payload.versions[start:end]),
                }
            )
    return rows


def _spans(versions: Int32Array) -> str:
    """Format per-token versions for people: "3:0-40 4:40-77". Tokens of the environment are left out."""
    return " ".join(f"{version}:{start}-{end}" for version, start, end in version_spans(versions) if version >= 0)
