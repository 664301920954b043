"""Read parts of a checkpoint's tensors from the store, so that each rank downloads only its own part.

A manifest has a CRC-32 of every block of a file, so that each part can be verified without the rest.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from areal_core.models.tensorfile import DTYPES
from areal_core.storage.checkpoint import BLOCK_BYTES, CheckpointInfo, FileEntry
from areal_core.storage.objects import DamagedError, Storage

Part = tuple[int, int]  # elements [first, second) of the flattened tensor
_AT_ONCE = 8  # parallel requests


@dataclass(frozen=True, slots=True)
class Tensors:
    """Tensors, or flat parts of them, with the shapes of the whole tensors."""

    arrays: dict[str, NDArray[Any]]  # whole tensors in their shape, parts flat
    shapes: dict[str, tuple[int, ...]]  # shapes of the whole tensors


def read_tensors(
    storage: Storage, info: CheckpointInfo, names: Collection[str], parts: Mapping[str, Part] | None = None
) -> Tensors:
    """The tensors in some safetensors files of a checkpoint; only the given part of tensors in `parts`.
    Raises StorageError, and DamagedError if a checksum differs."""
    found = Tensors({}, {})
    source = storage.child(info.folder)
    for name in names:
        _File(source, name, info.files[name]).read(parts or {}, found)
    return found


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A byte range of a file, and the array to fill with it."""

    start: int
    stop: int
    target: NDArray[np.uint8]


class _File:
    def __init__(self, source: Storage, name: str, entry: FileEntry) -> None:
        self._source = source
        self._name = name
        self._entry = entry
        self._head: dict[int, bytes] = {}  # blocks with the header, and perhaps the first tensors

    def read(self, parts: Mapping[str, Part], found: Tensors) -> None:
        length = int.from_bytes(self._start(8), "little")
        header = json.loads(self._start(8 + length)[8:])
        wanted: list[_Wanted] = []
        for name, tensor in header.items():
            if name == "__metadata__":
                continue
            shape, dtype = tuple(tensor["shape"]), DTYPES[tensor["dtype"]]
            begin = 8 + length + tensor["data_offsets"][0]
            first, last = parts.get(name, (0, int(np.prod(shape))))
            array = np.empty(last - first, dtype)
            found.arrays[name] = array if name in parts else array.reshape(shape)
            found.shapes[name] = shape
            wanted.append(_Wanted(begin + first * dtype.itemsize, begin + last * dtype.itemsize, array.view(np.uint8)))
        self._fill([one for one in wanted if one.start < one.stop])

    def _start(self, length: int) -> bytes:
        """The first `length` bytes of the file."""
        for block in range(len(self._head), (length - 1) // BLOCK_BYTES + 1):
            self._head[block] = self._block(block)
        return b"".join(self._head.values())[:length]

    def _block(self, number: int) -> bytes:
        """Read a block and verify its checksum."""
        start = number * BLOCK_BYTES
        data = self._source.get_range(self._name, start, min(start + BLOCK_BYTES, self._entry.bytes))
        if zlib.crc32(data) != self._entry.crc32[number]:
            raise DamagedError(
                f"checkpoint {self._source.url}/{self._name} is damaged: the {len(data)} bytes from byte {start} do "
                "not match the CRC-32 in its manifest"
            )
        return data

    def _fill(self, wanted: list[_Wanted]) -> None:
        """Read each needed block once, and copy its bytes to the arrays."""
        by_block: dict[int, list[_Wanted]] = {}
        for one in wanted:
            for number in range(one.start // BLOCK_BYTES, (one.stop - 1) // BLOCK_BYTES + 1):
                by_block.setdefault(number, []).append(one)

        def fill(number: int) -> None:
            data = np.frombuffer(self._head.get(number) or self._block(number), np.uint8)
            start = number * BLOCK_BYTES
            for one in by_block[number]:
                low, high = max(start, one.start), min(start + len(data), one.stop)
                one.target[low - one.start : high - one.start] = data[low - start : high - start]

        with ThreadPoolExecutor(_AT_ONCE, "read") as threads:
            for _ in threads.map(fill, sorted(by_block)):
                pass  # raises the first error of a block
