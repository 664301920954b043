"""The object store: a local folder or an S3 bucket.

Objects appear complete or not at all; in a folder they survive a power loss. Files are finished locally before they are
uploaded. Nothing is cached, so changes by other processes are visible. Transient failures are retried for up to
`storage.patience_s`.
"""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import unquote, urlsplit

from areal_core.config.groups import StorageConfig
from areal_core.errors import StorageError
from areal_core.storage.folder import Folder
from areal_core.storage.patience import Attempt, RetryPolicy

if TYPE_CHECKING:
    from areal_core.storage.bucket import Bucket

T = TypeVar("T")
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")  # environment variables of boto3
_OPEN_S = 8.0  # retry time: two requests that time out


class DamagedError(StorageError, ValueError):
    """The data read differ from the data written."""


class MissingError(StorageError):
    """The object does not exist."""


class ChangedError(StorageError):
    """Another process has replaced or deleted the object meanwhile."""


class Storage:
    """A store of objects by name. Names are relative, with `/` between their parts.

    Every failure is a StorageError of one line with the location, the object and the reason. Transient failures are
    raised only after the store's patience. Thread-safe.
    """

    def __init__(self, kind: Folder | Bucket, root: str, url: str, policy: RetryPolicy) -> None:
        self._kind = kind
        self._root = root  # a path of `kind`, without a trailing slash
        self._policy = policy
        self.url = url

    @classmethod
    def open(cls, url: str, endpoint_url: str | None = None, patience_s: float = StorageConfig.patience_s) -> Storage:
        """Open a folder (`/a/b`, `a/b`, `file:///a/b`) or `s3://bucket/prefix`, and check write access.

        Creates a missing folder or bucket. Removes scratch files in a folder that are more than a day old. S3
        credentials come from boto's usual places. Raises StorageError within about ten seconds, whatever `patience_s`.
        That bounds the retries of later calls.
        """
        scheme, _, rest = url.partition("://") if "://" in url else ("file", "", url)
        if scheme == "s3":
            return cls._open_s3(url, rest.strip("/"), endpoint_url, patience_s)
        if scheme == "file" and rest:
            root = os.path.abspath(unquote(urlsplit(url).path) if url.startswith("file://") else rest)
            return cls._open_folder(root, patience_s)
        raise StorageError(
            f"storage.url: {url!r} is not a location; use a folder, file:///folder or s3://bucket/prefix"
        )

    @classmethod
    def _open_folder(cls, root: str, patience_s: float) -> Storage:
        folder = Folder()
        storage = cls(folder, root, root, RetryPolicy(_OPEN_S, quiet=True))
        with storage._probe() as probe, storage._retrying("access", "") as attempt:
            attempt(lambda: folder.sweep(root, Path(root, probe).stat().st_mtime))
        return cls(folder, root, root, RetryPolicy(patience_s))

    @classmethod
    def _open_s3(cls, url: str, root: str, endpoint_url: str | None, patience_s: float) -> Storage:
        from areal_core.storage.bucket import Bucket  # slow to import, and only needed here

        name = root.partition("/")[0]
        if not name:
            raise StorageError(f"storage.url: {url!r} names no bucket; use s3://bucket/prefix")
        bucket, policy = Bucket(endpoint_url), RetryPolicy(_OPEN_S, quiet=True)
        try:
            policy.run(lambda: bucket.make(name), f"use {url}", bucket)
        except bucket.errors as error:
            where = endpoint_url or next(filter(None, map(os.environ.get, _ENDPOINTS)), "Amazon's endpoint")
            remedy = (
                "; start the server there, or set storage.endpoint_url to another" if bucket.transient(error) else ""
            )
            raise StorageError(f"storage.url: can't use {url} at {where}: {bucket.reason(error)}{remedy}") from error
        with cls(bucket, root, f"s3://{root}", policy)._probe():
            pass
        bucket.opened()
        return cls(bucket, root, f"s3://{root}", RetryPolicy(patience_s))

    def child(self, name: str) -> Storage:
        """The part of this store below `name`."""
        return Storage(self._kind, self._path(name), f"{self.url.rstrip('/')}/{name.strip('/')}", self._policy)

    def put_file(self, local: Path, name: str) -> None:
        """Store a finished local file, replacing an object of that name atomically."""
        path = self._path(name)
        with self._retrying("write", name) as attempt:
            self._kind.put_file(local, path, attempt)

    def put_bytes(self, name: str, data: bytes) -> None:
        self._call("write", name, self._kind.put_bytes, data)

    def put_if_unchanged(self, name: str, data: bytes, etag: str | None) -> str:
        """Compare-and-swap: atomically replace the object with this `etag`, or with None create it.

        Returns the new ETag, which differs if `data` does. Raises ChangedError if the object has another ETag or is
        missing. If a response was lost and the call was retried, that other object may be this call's own. So `data`
        should name its writer.
        """
        if (put := self._call("write", name, self._kind.put_if_unchanged, data, etag)) is None:
            raise ChangedError(f"storage.url: can't write {self.url}/{name}: another process has changed it meanwhile")
        return put

    def get_with_etag(self, name: str) -> tuple[bytes, str]:
        """An object, and its ETag for `put_if_unchanged`."""
        return self._call("read", name, self._kind.get_with_etag)

    def get_file(self, name: str, local: Path) -> None:
        """Copy an object to a local file; creates its folder."""
        path = self._path(name)
        with self._retrying("read", name) as attempt:
            local.parent.mkdir(parents=True, exist_ok=True)
            self._kind.get_file(path, local, attempt)

    def get_bytes(self, name: str) -> bytes:
        return self._call("read", name, self._kind.get_bytes)

    def get_range(self, name: str, start: int, stop: int) -> bytes:
        """Bytes `start` to `stop` (exclusive) of an object; fewer if the object ends before."""
        assert 0 <= start <= stop, (start, stop)
        return self._call("read", name, self._kind.get_range, start, stop)

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Bytes of every object below the folder `prefix`, by full name, sorted by name."""
        found = self._call("list", prefix, self._kind.sizes)
        return {name.removeprefix(self._root).lstrip("/"): size for name, size in sorted(found.items())}

    def write_times(self, prefix: str = "") -> dict[str, float]:
        """Last write of every object below the folder `prefix`, in seconds since 1970 by the store's clock."""
        found = self._call("list", prefix, self._kind.write_times)
        return {name.removeprefix(self._root).lstrip("/"): at for name, at in found.items()}

    def list(self, prefix: str = "") -> Sequence[str]:
        """Full names of all objects below the folder `prefix`, sorted."""
        return tuple(self.sizes(prefix))

    def delete(self, prefix: str) -> None:
        """Delete the object `prefix`, or all objects below it; ignores missing objects."""
        if self._path(prefix) == self._root:
            raise StorageError(f"{self.url}: refuses to delete the entire store; name a prefix")
        self._call("delete", prefix, self._kind.delete)

    @contextmanager
    def _probe(self) -> Iterator[str]:
        """Store a small object during the `with`; yields its name."""
        name = f".probe-{uuid.uuid4().hex}"
        self.put_bytes(name, b"probe")
        yield name
        self.delete(name)

    def _path(self, name: str) -> str:
        name = name.strip("/")
        if ".." in name.split("/"):
            raise StorageError(f"{self.url}: {name!r} is outside the store")
        return f"{self._root.rstrip('/')}/{name}" if name else self._root

    def _call(self, action: str, name: str, call: Callable[..., T], *arguments: object) -> T:
        """The result of one call on the path of an object, with retries."""
        path = self._path(name)
        with self._retrying(action, name) as attempt:
            return attempt(lambda: call(path, *arguments))

    @contextmanager
    def _retrying(self, action: str, name: str) -> Iterator[Attempt]:
        """Yield a function that retries parts of `action`; turn the final error into a StorageError."""
        what = f"{action} {self.url}/{name}"
        try:
            yield lambda work: self._policy.run(work, what, self._kind)
        except self._kind.errors as error:
            tried = f"; retried for {self._policy.limit_s:g} s" if self._kind.transient(error) else ""
            raise _error_class(error)(f"storage.url: can't {what}: {self._kind.reason(error)}{tried}") from error


def _error_class(error: Exception) -> type[StorageError]:
    """The class of StorageError for an error of the backend."""
    if isinstance(error, FileNotFoundError):
        return MissingError
    return DamagedError if isinstance(error, OSError) and error.errno == errno.EBADMSG else StorageError
