"""Write files so that they survive a power loss, not only the end of the process."""

from __future__ import annotations

import os
from pathlib import Path


def replace(scratch: Path, path: Path) -> None:
    """Move a finished file to `path`, replacing any file there, and sync it to disk. Raises OSError.
    After a power loss, `path` holds either the old file or the new one, complete."""
    sync(scratch)
    os.replace(scratch, path)
    sync(path.parent)


def make(folder: Path) -> None:
    """Create a folder and its parents, and sync their names to disk. Raises OSError."""
    if not folder.is_dir():
        make(folder.parent)
        folder.mkdir(exist_ok=True)
        sync(folder.parent)


def sync(path: Path) -> None:
    """Sync a file's contents, or a folder's entries, to disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def free_inodes(folder: Path) -> int | None:
    """Number of files that still fit on the file system of `folder`; None if unlimited. Raises OSError."""
    found = os.statvfs(folder)
    return found.f_favail if found.f_files else None
