"""Objects as files below a folder. An object is written under another name, synced, and takes its place in one step.

With the operating system's own calls: those of fsspec leave out of a listing what can't be read, and take a folder that
fails for one that is empty.
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

_SCRATCH = ".part"  # an object that is still being written
_LOCK = ".lock"  # beside an object that is put over another
_STALE_S = 24 * 3600.0  # after which nobody is writing it any more
TRANSIENT = frozenset(  # of a full disk, and of a file server that is away; the rest is here to stay
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
    """Paths are absolute."""

    errors: tuple[type[Exception], ...] = (OSError,)

    def transient(self, error: Exception) -> bool:
        return isinstance(error, OSError) and error.errno in TRANSIENT

    def reason(self, error: Exception) -> str:
        return (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__

    def put_file(self, local: Path, path: str, attempt: Attempt) -> None:
        attempt(lambda: _replace(Path(path), lambda scratch: shutil.copyfile(local, scratch)))

    def put_bytes(self, path: str, data: bytes) -> None:
        _replace(Path(path), lambda scratch: scratch.write_bytes(data))

    def put_over(self, path: str, data: bytes, mark: str | None) -> str | None:
        """None where the object has another mark."""
        with _locked(Path(path)):
            try:
                found = self.get_marked(path)[1]
            except FileNotFoundError:
                found = None
            if found != mark:
                return None
            self.put_bytes(path, data)
        return _mark(data)

    def get_marked(self, path: str) -> tuple[bytes, str]:
        data = self.get_bytes(path)
        return data, _mark(data)

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

    def changed(self, path: str) -> dict[str, float]:
        return {file: found.st_mtime for file, found in _files(path) if not file.endswith((_SCRATCH, _LOCK))}

    def delete(self, path: str) -> None:
        if os.path.isdir(path):
            shutil.rmtree(path)
        else:
            Path(path).unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):  # a loss of power undoes no deletion and keeps a later one
            durable.sync(Path(path).parent)

    def sweep(self, path: str, now: float) -> None:
        """Remove what killed writers have left below `path` more than a day before `now`, by the clock of the disk."""
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
    """One process at a time replaces a file upon what it was. On NFS, of all machines: files have locks there."""
    durable.make(path.parent)
    descriptor = os.open(f"{path}{_LOCK}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _mark(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _files(path: str) -> Iterator[tuple[str, os.stat_result]]:
    """Every file below `path`; what is removed meanwhile is left out. Raises OSError."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(path) as entries:
        for entry in entries:
            if entry.is_dir():
                yield from _files(entry.path)
                continue
            with contextlib.suppress(FileNotFoundError):
                yield entry.path, entry.stat()
