"""Files of the head node's to which remote workers append: logs, which are rotated, and timelines, which are not."""

from __future__ import annotations

import os
from pathlib import Path

from areal_core.errors import ArealError


class MisfitError(ArealError):
    """The file does not end where somebody wants to go on with it. The message is its size, in bytes."""


class FullError(ArealError):
    """A file would get larger than it may."""


def append(file: Path, offset: int, data: bytes, *, limit: int) -> int:
    """Put `data` at the end of a file that has `offset` bytes; returns its size then. It may have `limit` bytes.

    Raises MisfitError, FullError, OSError."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    with open(descriptor, "ab") as out:
        if (size := os.fstat(descriptor).st_size) != offset:
            raise MisfitError(str(size))
        if size + len(data) > limit:
            raise FullError(f"{file.name}: must not have more than {limit} bytes")
        out.write(data)
    return size + len(data)


def begin_anew(file: Path, files: int) -> None:
    """Move what a log holds, if anything, to the older ones, of which `files` stay; as areal_core.launch.logs does, but
    for a log that no process of this machine has open."""
    if not file.exists() or not file.stat().st_size:
        return
    for number in range(files, 0, -1):
        newer = file if number == 1 else file.with_name(f"{file.name}.{number - 1}")
        if newer.exists():
            newer.replace(file.with_name(f"{file.name}.{number}"))
