"""Object store in a local folder. An object is written to a scratch file, synced and renamed.

Uses the operating system's own calls. fsspec omits unreadable entries from listings, and reports a failing folder as an
empty one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from areal_core.storage import durable
from areal_core.storage.patience import Attempt

_SCRATCH = ".part"  # suffix of an object that is being written
_LOCK = ".lock"  # suffix of the lock file of an object that `put_if_unchanged` replaces
_STALE_S = 24 * 3600.0  # age of a scratch file whose writer must be dead
TRANSIENT = frozenset(  # a full disk or an unreachable file server; other errors are permanent
    (
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EIO,
        errno.ESTALE,
        errno.ETIMEDOUT,
        errno.EAGAIN,
        errno.EBUSY,
        errno.ENOTCONN,
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.ECONNABORTED,
        errno.EPIPE,
        errno.ESHUTDOWN,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.ENETRESET,
    )
)


class Folder:
    """Local backend of `Storage`; paths are absolute."""

    errors: tuple[type[Exception], ...] = (OSError,)

    def transient(self, error: Exception) -> bool:
        return isinstance(error, OSError) and error.errno in TRANSIENT

    def reason(self, error: Exception) -> str:
        return (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__

    def put_file(self, local: Path, path: str, attempt: Attempt) -> None:
        attempt(lambda: _replace(Path(path), lambda scratch: shutil.copyfile(local, scratch)))

    def put_bytes(self, path: str, data: bytes) -> None:
        _replace(Path(path), lambda scratch: scratch.write_bytes(data))

    def put_if_unchanged(self, path: str, data: bytes, etag: str | None) -> str | None:
        """Replace the object with this `etag`; returns the new one, or None if the ETag differs."""
        with _locked(Path(path)):
            try:
                found = self.get_with_etag(path)[1]
            except FileNotFoundError:
                found = None
            if found != etag:
                return None
            self.put_bytes(path, data)
        return _etag(data)

    def get_with_etag(self, path: str) -> tuple[bytes, str]:
        data = self.get_bytes(path)
        return data, _etag(data)

    def get_file(self, path: str, local: Path, attempt: Attempt) -> None:
        attempt(lambda: shutil.copyfile(path, local))

    def get_bytes(self, path: str) -> bytes:
        return Path(path).read_bytes()

    def get_range(self, path: str, start: int, stop: int) -> bytes:
        with open(path, "rb") as file:
            file.seek(start)
            return file.read(stop - start)

    def sizes(self, path: str) -> dict[str, int]:
        return {file: found.st_size for file, found in _files(path) if not file.endswith((_SCRATCH, _LOCK))}

    def write_times(self, path: str) -> dict[str, float]:
        return {file: found.st_mtime for file, found in _files(path) if not file.endswith((_SCRATCH, _LOCK))}

    def delete(self, path: str) -> None:
        if os.path.isdir(path):
            shutil.rmtree(path)
        else:
            Path(path).unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):  # so that a power loss keeps the order of deletions
            durable.sync(Path(path).parent)

    def sweep(self, path: str, now: float) -> None:
        """Remove scratch files of killed writers below `path` that are a day older than `now` (disk clock)."""
        for file, found in _files(path):
            if file.endswith(_SCRATCH) and found.st_mtime < now - _STALE_S:
                Path(file).unlink(missing_ok=True)


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    durable.make(path.parent)
    scratch = path.with_name(f"{path.name}.{uuid.uuid4().hex}{_SCRATCH}")
    try:
        write(scratch)
        durable.replace(scratch, path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Let one process at a time compare and replace a file; on NFS this holds across machines."""
    durable.make(path.parent)
    descriptor = os.open(f"{path}{_LOCK}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _etag(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _files(path: str) -> Iterator[tuple[str, os.stat_result]]:
    """Every file below `path`, except files that are removed meanwhile. Raises OSError."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(path) as entries:
        for entry in entries:
            if entry.is_dir():
                yield from _files(entry.path)
                continue
            with contextlib.suppress(FileNotFoundError):
                yield entry.path, entry.stat()
