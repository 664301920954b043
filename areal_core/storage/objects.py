"""The object store: a local folder or an S3 bucket. The only user of fsspec and s3fs.

An object appears whole or not at all, and in a folder outlives the machine. A file is finished locally first and then
put, since an error inside `fs.open(..., "wb")` would publish what had been written by then. Nothing is cached: what
other processes did is seen.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import fsspec

from areal_core.errors import StorageError
from areal_core.storage import durable

_PROBE_TIMEOUT_S = 8  # a wrong endpoint is found before a run starts; a live one responds sooner
_SCRATCH = ".part"  # a local object that is still being written
_S3_OPTIONS: dict[str, Any] = {
    "use_listings_cache": False,
    "skip_instance_cache": True,
    "config_kwargs": {"connect_timeout": 3, "read_timeout": 30, "retries": {"max_attempts": 2}},
}


class Storage:
    """A place to put objects by name. Names are relative, with `/` between their parts.

    Every failure is a StorageError of one line with the location, the object and the reason.
    """

    def __init__(self, fs: Any, root: str, url: str, errors: tuple[type[Exception], ...]) -> None:
        self._fs = fs
        self._root = root  # as fsspec names it, without a trailing slash
        self._errors = errors
        self.url = url

    @classmethod
    def open(cls, url: str, endpoint_url: str | None = None) -> Storage:
        """Open a folder (`/a/b`, `a/b`, `file:///a/b`) or `s3://bucket/prefix`, and prove that it can be written.

        A folder or a bucket that is absent is made. Credentials of S3 come from where boto looks for them.
        Raises StorageError, within about ten seconds.
        """
        scheme, _, rest = url.partition("://") if "://" in url else ("file", "", url)
        if scheme == "s3":
            storage = cls._open_s3(url, rest.strip("/"), endpoint_url)
        elif scheme == "file" and rest:
            root = os.path.abspath(unquote(urlsplit(url).path) if url.startswith("file://") else rest)
            storage = cls(fsspec.filesystem("file"), root, root, (OSError,))
        else:
            raise StorageError(
                f"storage.url: {url!r} is not a location; use a folder, file:///folder or s3://bucket/prefix"
            )
        probe = f".probe-{uuid.uuid4().hex}"
        storage.put_bytes(probe, b"probe")
        storage.delete(probe)
        return storage

    @classmethod
    def _open_s3(cls, url: str, root: str, endpoint_url: str | None) -> Storage:
        from botocore.exceptions import BotoCoreError, ClientError  # dear to import, and only needed here

        bucket = root.partition("/")[0]
        if not bucket:
            raise StorageError(f"storage.url: {url!r} names no bucket; use s3://bucket/prefix")
        errors = (OSError, ValueError, BotoCoreError, ClientError)  # ValueError: an endpoint that is no URL
        try:
            fs = fsspec.filesystem("s3", endpoint_url=endpoint_url, **_S3_OPTIONS)
            fs.retries = 2
            try:
                fs.call_s3("head_bucket", Bucket=bucket, timeout=_PROBE_TIMEOUT_S)
            except FileNotFoundError:
                fs.call_s3("create_bucket", Bucket=bucket, timeout=_PROBE_TIMEOUT_S)
            except PermissionError:
                pass  # some may write to a bucket that they may not look at: the probe will tell
        except errors as error:
            where = endpoint_url or "Amazon's endpoint"
            raise StorageError(
                f"storage.url: can't use {url} at {where} (storage.endpoint_url): {_reason(error)}"
            ) from error
        return cls(fs, root, f"s3://{root}", errors)

    @property
    def _local(self) -> bool:
        return not self.url.startswith("s3://")

    def child(self, name: str) -> Storage:
        """The part of this store below `name`."""
        return Storage(self._fs, self._path(name), f"{self.url.rstrip('/')}/{name.strip('/')}", self._errors)

    def put_file(self, local: Path, name: str) -> None:
        """Store a finished local file; an object of that name is replaced in one step."""
        path = self._path(name)
        with self._reporting("write", name):
            if not self._local:
                self._fs.put_file(str(local), path)
                return
            os.makedirs(os.path.dirname(path), exist_ok=True)
            scratch = f"{path}.{uuid.uuid4().hex}{_SCRATCH}"
            try:
                self._fs.put_file(str(local), scratch)
                durable.replace(Path(scratch), Path(path))
            except BaseException:
                Path(scratch).unlink(missing_ok=True)
                raise

    def put_bytes(self, name: str, data: bytes) -> None:
        if not self._local:  # one request, which is whole or fails
            with self._reporting("write", name):
                self._fs.pipe_file(self._path(name), data)
            return
        with tempfile.NamedTemporaryFile() as file:
            file.write(data)
            file.flush()
            self.put_file(Path(file.name), name)

    def get_file(self, name: str, local: Path) -> None:
        """Copy an object to a local file, whose folder is made."""
        with self._reporting("read", name):
            local.parent.mkdir(parents=True, exist_ok=True)
            self._fs.get_file(self._path(name), str(local))

    def get_bytes(self, name: str) -> bytes:
        with self._reporting("read", name):
            return self._fs.cat_file(self._path(name))

    def exists(self, name: str) -> bool:
        with self._reporting("look at", name):
            return bool(self._fs.exists(self._path(name)))

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Bytes of every object below the folder `prefix`, by full name, in the order of names."""
        path = self._path(prefix)
        with self._reporting("list", prefix):
            found: dict[str, Any] = self._fs.find(path, detail=True)
        return {
            name.removeprefix(self._root).lstrip("/"): int(entry["size"])
            for name, entry in sorted(found.items())
            if not name.endswith(_SCRATCH)
        }

    def list(self, prefix: str = "") -> Sequence[str]:
        """Full names of all objects below the folder `prefix`, sorted."""
        return tuple(self.sizes(prefix))

    def delete(self, prefix: str) -> None:
        """Delete the object `prefix`, or all objects below it. Nothing there is fine."""
        path = self._path(prefix)
        if path == self._root:
            raise StorageError(f"{self.url}: refuses to delete the whole store; name what is to go")
        with self._reporting("delete", prefix):
            if self._local:
                if os.path.isdir(path):
                    shutil.rmtree(path)
                else:
                    Path(path).unlink(missing_ok=True)
            elif self._fs.exists(path):
                self._fs.rm(path, recursive=True)

    def _path(self, name: str) -> str:
        name = name.strip("/")
        if ".." in name.split("/"):
            raise StorageError(f"{self.url}: {name!r} leaves the store")
        return f"{self._root.rstrip('/')}/{name}" if name else self._root

    @contextmanager
    def _reporting(self, action: str, name: str) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            raise StorageError(f"storage.url: can't {action} {self.url}/{name}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """The reason in one line; some errors of fsspec have no text of their own."""
    if isinstance(error, TimeoutError):
        return "no response in time"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, FileNotFoundError):
        return "it does not exist"
    return " ".join(str(error).split()) or type(error).__name__
