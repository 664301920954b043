"""Files that outlive the machine, not only the process that wrote them."""

from __future__ import annotations

import os
from pathlib import Path


def replace(scratch: Path, path: Path) -> None:
    """Put a finished file in the place of another, or of none: after a loss of power there is the old one or the new
    one, whole. Raises OSError."""
    sync(scratch)
    os.replace(scratch, path)
    sync(path.parent)


def make(folder: Path) -> None:
    """Make a folder, and those above it, so that their names outlive the machine. Raises OSError."""
    if not folder.is_dir():
        make(folder.parent)
        folder.mkdir(exist_ok=True)
        sync(folder.parent)


def sync(path: Path) -> None:
    """Have what a file holds, or what a folder names, reach the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def free_inodes(folder: Path) -> int | None:
    """How many files the file system of `folder` still takes; None where it sets no limit, as btrfs. Raises OSError."""
    found = os.statvfs(folder)
    return found.f_favail if found.f_files else None
