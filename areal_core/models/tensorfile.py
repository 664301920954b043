"""Read and write safetensors files without torch.

Files are written and hashed piece by piece, where the library would hold all data in memory twice. bfloat16, which
numpy lacks, is kept in uint16 arrays.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from areal_core.errors import ModelError
from areal_core.types import Float32Array

_WORDS = {"F": "float", "I": "int", "U": "uint"}
_NUMBERS = ("F16", "F32", "F64", "I8", "I16", "I32", "I64", "U8", "U32", "U64")  # names in files
DTYPES: dict[str, np.dtype[Any]] = {"BOOL": np.dtype(bool)} | {
    kind: np.dtype(_WORDS[kind[0]] + kind[1:]) for kind in _NUMBERS
}
_STORED = DTYPES | {"BF16": np.dtype(np.uint16)}
_NAMES = {dtype.name: kind for kind, dtype in _STORED.items()}
_ALIGNMENT = 8  # of the header, in bytes
_PIECE = 1 << 22  # bytes hashed at once, by several threads
_WRITTEN = 1 << 18  # bytes written at once: for more, Linux may search long for large pages


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """Size and hash of a written file."""

    bytes: int
    digest: str  # blake3


def write_tensors(
    path: Path, tensors: Mapping[str, NDArray[Any]], *, header: Mapping[str, str] | None = None
) -> Written:
    """Write a safetensors file. Equal tensors give equal bytes.

    `header` has additional entries of the file's metadata. Raises OSError.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt", **(header or {})}}
    end = 0
    order = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))  # so that every tensor is aligned
    for name in order:
        array = tensors[name]
        entries[name] = {
            "dtype": _NAMES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [end, end + array.nbytes],
        }
        end += array.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    digest = blake3(max_threads=blake3.AUTO)
    with path.open("wb") as file:
        for data in (len(text).to_bytes(8, "little") + text, *(_bytes(tensors[name]) for name in order)):
            for at in range(0, len(data), _PIECE):
                digest.update(data[at : at + _PIECE])
                for part in range(at, min(at + _PIECE, len(data)), _WRITTEN):
                    file.write(data[part : min(part + _WRITTEN, at + _PIECE)])
        size = file.tell()
    return Written(bytes=size, digest=digest.hexdigest())


def _bytes(array: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def mapped_tensors(file: Path) -> dict[str, NDArray[Any]]:
    """Map the tensors of a valid safetensors file. Data is read on access; bfloat16 is uint16.

    Raises OSError, and ModelError for unknown dtypes.
    """
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        entries: dict[str, Any] = json.loads(stream.read(size))
    data, tensors = np.asarray(np.memmap(file, np.uint8, "c"))[8 + size :], {}
    for name, entry in entries.items():
        if name == "__metadata__":
            continue
        if (kind := entry["dtype"]) not in _STORED:
            raise ModelError(f"{file}: {name} must be of {', '.join(_STORED)}, got {kind}")
        tensors[name] = data[slice(*entry["data_offsets"])].view(_STORED[kind]).reshape(entry["shape"])
    return tensors


def as_float32(mapped: NDArray[Any]) -> Float32Array:
    """Convert a mapped tensor to float32. A float32 mapping is returned itself."""
    return from_bfloat16(mapped) if mapped.dtype == np.uint16 else np.require(mapped, np.float32, ["A", "W"])


def equal_bytes(one: NDArray[Any], other: NDArray[Any]) -> bool:
    """Tell whether two tensors have the same bytes. Compares piece by piece, up to the first difference."""
    left, right = (tensor.reshape(-1).view(np.uint8) for tensor in (one, other))
    pieces = (slice(at, at + _PIECE) for at in range(0, len(left), _PIECE))
    return len(left) == len(right) and all(np.array_equal(left[piece], right[piece]) for piece in pieces)


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round float32 numbers to bfloat16, as their upper halves. Rounds to nearest, ties to even; NaN stays NaN."""
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded.astype(np.uint16))


def from_bfloat16(halves: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Convert bfloat16 numbers, given as upper halves, to float32."""
    return (halves.astype(np.uint32) << np.uint32(16)).view(np.float32)
