"""A store in memory, of which any call can be stopped; in virtual time."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from areal_core.storage.folder import Folder
from areal_core.storage.patience import Attempt

T = TypeVar("T")


class MemoryStore(Folder):
    """A kind of store, as `Storage` uses it. What is called is noted; others may come before any of them."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.calls: list[str] = []
        self._now = 0.0
        self._stop: tuple[int, Callable[[], None]] | None = None

    def copy(self) -> MemoryStore:
        made = MemoryStore()
        made.objects = dict(self.objects)
        made._now = self._now
        return made

    def clock(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += seconds

    @contextmanager
    def stop_at(self, index: int, intrude: Callable[[], None]) -> Iterator[None]:
        """Call `intrude` before the call of this index from now on."""
        before = self._stop
        self._stop = len(self.calls) + index, intrude
        yield
        self._stop = before

    def _call(self, what: str, path: str, work: Callable[[], T]) -> T:
        self.calls.append(f"{what} {path.partition('/')[2]}")
        if self._stop is not None and len(self.calls) - 1 == self._stop[0]:
            (_, intrude), self._stop = self._stop, None
            intrude()
        return work()

    def put_file(self, local: Path, path: str, attempt: Attempt) -> None:
        attempt(lambda: self.put_bytes(path, local.read_bytes()))

    def put_bytes(self, path: str, data: bytes) -> None:
        self._call("put", path, lambda: self.objects.update({path: data}))

    def put_if_unchanged(self, path: str, data: bytes, etag: str | None) -> str | None:
        def put() -> str | None:
            if self._etag(path) != etag:
                return None
            self.objects[path] = data
            return self._etag(path)

        return self._call("put over", path, put)

    def get_with_etag(self, path: str) -> tuple[bytes, str]:
        return self._call("get", path, lambda: (self._get(path), self._etag(path) or ""))

    def get_file(self, path: str, local: Path, attempt: Attempt) -> None:
        local.write_bytes(attempt(lambda: self.get_bytes(path)))

    def get_bytes(self, path: str) -> bytes:
        return self._call("get", path, lambda: self._get(path))

    def sizes(self, path: str) -> dict[str, int]:
        return self._call("list", path, lambda: {name: len(self.objects[name]) for name in self._below(path)})

    def delete(self, path: str) -> None:
        def delete() -> None:
            for name in self._below(path):
                del self.objects[name]

        self._call("delete", path, delete)

    def _get(self, path: str) -> bytes:
        try:
            return self.objects[path]
        except KeyError:
            raise FileNotFoundError(path) from None

    def _etag(self, path: str) -> str | None:
        return hashlib.sha256(self.objects[path]).hexdigest() if path in self.objects else None

    def _below(self, path: str) -> list[str]:
        return [name for name in self.objects if name == path or name.startswith(f"{path}/")]
