"""Hash model weights, and verify each version once per machine, in the first process that loads it.

vLLM's processes import this module too, in their own environment. So it needs only blake3, numpy and safetensors, and
nothing else of this package.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
from blake3 import blake3
from safetensors import SafetensorError, safe_open

_EXPONENTS: dict[str, tuple[type[np.unsignedinteger[Any]], int]] = {  # exponent bits, all set if a number is not finite
    "F16": (np.uint16, 0x7C00),
    "BF16": (np.uint16, 0x7F80),
    "F32": (np.uint32, 0x7F800000),
    "F64": (np.uint64, 0x7FF0 << 48),
}
_MARKS = Path("/dev/shm")  # of this machine and boot: after a crash, files may hold something else
_MARKS_KEPT = 64
_PIECE = 2**18  # numbers checked at once, so that they stay in the processor's cache
_CHECK_S, _SLOWEST = 5.0, 1e8  # upper bound of a check's duration: seconds, plus size at this many bytes/s
_POLL_S = 0.02  # between two attempts at the lock


def weights_digest(source: Path) -> str:
    """Return the blake3 hash of a file or of a folder's safetensors file. Raises OSError.

    For several files it is the hash of their hashes.
    """
    digests = [blake3(max_threads=blake3.AUTO).update_mmap(file).hexdigest() for file in _files(source)]
    return digests[0] if len(digests) == 1 else blake3("".join(digests).encode()).hexdigest()


@contextmanager
def verified(source: Path, digest: str) -> Iterator[None]:
    """Context manager: inside it the files have the hash `digest` and hold finite numbers only.

    `source` is a file, or a folder of safetensors files. The first process of the machine checks them; others wait for
    its mark in shared memory. A mark holds for exactly these files. A process that takes too long may have been
    stopped, so others then check themselves. A process that dies or finds damage leaves no mark.

    Raises ValueError for damaged files and for files replaced inside the block, OSError for unreadable ones.
    """
    found = _identity(source)
    with _mark(repr((digest, found))).open("a+b") as mark:
        _lock(mark, _CHECK_S + sum(size for _, _, size, *_ in found) / _SLOWEST)
        if not os.fstat(mark.fileno()).st_size:
            _check(source, digest)
            mark.write(b"verified")
    yield
    if [known[:-1] for known in _identity(source)] != [known[:-1] for known in found]:  # a hard link changes the ctime
        raise ValueError(f"{source}: was replaced while it was read")


def _files(source: Path) -> list[Path]:
    return sorted(source.glob("*.safetensors")) or [source / "model.safetensors"] if source.is_dir() else [source]


def _identity(source: Path) -> list[tuple[int, ...]]:
    stats = [file.stat() for file in _files(source)]
    return [(s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for s in stats]


def _check(source: Path, digest: str) -> None:
    if (found := weights_digest(source)) != digest:
        raise ValueError(f"digest: {source} has {found}, expected {digest}")
    for file in _files(source):
        try:
            with safe_open(file, framework="numpy"):  # opening it checks the header
                pass
        except SafetensorError as error:
            raise ValueError(f"{file}: not a readable safetensors file ({error})") from None
        with file.open("rb") as stream:
            begin = 8 + int.from_bytes(stream.read(8), "little")
            tensors: dict[str, Any] = json.loads(stream.read(begin - 8))
        data = np.memmap(file, np.uint8, "r")[begin:]
        for name, tensor in tensors.items():
            if name != "__metadata__" and tensor["dtype"] in _EXPONENTS:
                bits, exponent = _EXPONENTS[tensor["dtype"]]
                numbers = data[slice(*tensor["data_offsets"])].view(bits)
                for at in range(0, len(numbers), _PIECE):
                    if (numbers[at : at + _PIECE] & bits(exponent)).max() == exponent:
                        raise ValueError(f"{name}: holds numbers that are not finite")


def _mark(key: str) -> Path:
    """Return the path of a mark, which may not exist, after deleting the oldest marks. Raises OSError."""
    folder = _MARKS / f"areal-verified-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    owner = folder.lstat()
    if owner.st_uid != os.getuid() or not stat.S_ISDIR(owner.st_mode) or owner.st_mode & 0o022:
        raise PermissionError(f"{folder}: must be a folder that only this user can write to")
    with suppress(FileNotFoundError):  # another process deletes old marks too
        for old in sorted(folder.iterdir(), key=lambda mark: mark.stat().st_mtime_ns)[: 1 - _MARKS_KEPT]:
            old.unlink()
    return folder / hashlib.sha256(key.encode()).hexdigest()


def _lock(mark: IO[bytes], patience_s: float) -> None:
    """Lock a file, or give up after `patience_s` seconds."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        with suppress(BlockingIOError):
            fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(_POLL_S)
