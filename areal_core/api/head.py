"""Client of the head node's data server (run.remote.files), for remote workers and their ranks.

Synchronous and stdlib only. The client tolerates absences of the head node. Every request is safe to repeat.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from blake3 import blake3

from areal_core.api.access import authorization
from areal_core.config.fields import refuse_credentials
from areal_core.errors import ArealError, ConfigError, StorageError

_TIMEOUT_S = 10.0  # longest silence of the head node within a response
_PIECE = 2**18  # bytes of a file between two checks of `stopped`; a piece fits the CPU cache, where it is hashed
_RETRY_S = 0.5  # between two attempts to continue a file
_LINE_CHARS = 300


class HeadNodeError(ArealError):
    """The head node is unreachable or sent a bad response; the request may be repeated."""


class Head:
    """Address of the head node's data server, and the run's token."""

    def __init__(
        self, address: str | Callable[[], str], token: str, *, timeout_s: float = _TIMEOUT_S, name: str = "--head"
    ) -> None:
        """`address` is the URL, or a callable that returns it, if the head node may be replaced.
        The callable raises HeadNodeError while there is no head node. `name` is the configuration field of the URL.
        Raises ConfigError for an invalid URL."""
        self._where = checked_url(address, name) if isinstance(address, str) else address
        self.token = token
        self.timeout_s = timeout_s

    @property
    def url(self) -> str:
        """The current URL. Raises HeadNodeError if there is no head node yet."""
        return self._where if isinstance(self._where, str) else self._where()

    def session(self) -> Session:
        return Session(self)


class Session:
    """One connection to the data server, for one thread at a time."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self.url = ""  # of the last connection
        self._connection: http.client.HTTPConnection | None = None

    def request(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        """Return the status (below 500) and body of a response.
        Raises HeadNodeError, or ConfigError for a refused token."""
        response = self._respond(method, path, body, {})
        with self._translate_errors():
            content = response.read()
        if response.status >= 500:
            raise HeadNodeError(f"{self.url}{path}: {response.status}: {_line(content)}")
        return response.status, content

    def file(self, path: str, start: int) -> http.client.HTTPResponse:
        """Request a file from byte `start` on; returns the unread response.
        Raises as `request`, and StorageError if the head node does not have the file."""
        response = self._respond("GET", path, None, {"Range": f"bytes={start}-"} if start else {})
        if response.status in (200, 206):
            return response
        with self._translate_errors():
            line = f"{self.url}{path}: {response.status}: {_line(response.read())}"
        raise HeadNodeError(line) if response.status >= 500 else StorageError(line)

    def read(self, response: http.client.HTTPResponse, buffer: memoryview) -> int:
        """Read more bytes of a file into `buffer`; returns how many, 0 at the end of the file.
        Raises HeadNodeError."""
        with self._translate_errors():
            return response.readinto(buffer)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _respond(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> http.client.HTTPResponse:
        known = authorization(self._head.token)
        while True:
            was_open = self._connection is not None
            try:
                with self._translate_errors():
                    connection = self._connect()
                    connection.request(method, path, body, headers | known)
                    response = connection.getresponse()
                break
            except HeadNodeError:
                if not was_open:  # else the head node may have closed the idle connection: try a new one
                    raise
        if response.status == 401:
            raise ConfigError(f"--token-file: {self.url} refuses this token; use the file `token` of its run's folder")
        return response

    def _connect(self) -> http.client.HTTPConnection:
        if self._connection is None:
            self.url = self._head.url
            parts = urllib.parse.urlsplit(self.url)
            self._connection = http.client.HTTPConnection(
                parts.hostname or "", parts.port, timeout=self._head.timeout_s
            )
        return self._connection

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Turn connection errors of the block into HeadNodeError, and close the connection."""
        try:
            yield
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise HeadNodeError(f"{self.url} does not respond: {error or type(error).__name__}") from None


def fetch(head: Head, path: str, target: Path, digest: str, *, stopped: Callable[[], bool], patience_s: float) -> int:
    """Copy a file from the head node to `target`, hashing it on arrival; returns its size in bytes.

    An interrupted transfer continues at the last byte. Raises HeadNodeError if no byte comes for `patience_s` seconds,
    or once `stopped()` is true. Raises StorageError if the head node lacks the file, or if the blake3 `digest` differs.
    Raises OSError if the file can't be written.
    """
    size, total, hashed, buffer = 0, None, blake3(), memoryview(bytearray(_PIECE))
    came_at, said = time.monotonic(), ""
    with closing(head.session()) as session, target.open("wb") as file:
        while size != total:
            before = size
            try:
                response = session.file(path, size)
                if response.status == 200:
                    file.seek(0)
                    file.truncate()
                    size, hashed = 0, blake3()
                if response.length is None:
                    raise StorageError(f"{path}: the response of {session.url} has no Content-Length")
                total = size + response.length
                while not stopped() and (count := session.read(response, buffer)):
                    file.write(buffer[:count])
                    hashed.update(buffer[:count])
                    size += count
                if size != total:
                    session.close()
                    raise HeadNodeError("the response ended early")
            except HeadNodeError as error:
                said = str(error)
            if stopped():
                raise HeadNodeError(f"{path}: the download was cancelled")
            if size > before:
                came_at = time.monotonic()
            elif time.monotonic() - came_at > patience_s:
                raise HeadNodeError(f"{path} is incomplete, {size} of {total} bytes: {said}")
            if size != total:
                time.sleep(_RETRY_S)
    if (found := hashed.hexdigest()) != digest:
        advice = "the head node's file is damaged or has changed: restore it there"
        raise StorageError(f"{session.url}{path}: must have digest {digest}, got {found}; {advice}")
    return size


def checked_url(url: str, name: str = "--head") -> str:
    """Return `url` without a final slash. Raises ConfigError, with the field `name`, for an invalid URL."""
    refuse_credentials(name, url, "pass the token as --token-file")
    try:
        parts = urllib.parse.urlsplit(url)
        usable = parts.scheme == "http" and parts.hostname and parts.port and parts.path in ("", "/")
    except ValueError:
        usable = False
    if not usable:
        raise ConfigError(f"{name}: must be the URL of a data server, such as http://10.0.0.1:8900, got {url!r}")
    return url.rstrip("/")


def parsed(content: bytes) -> Any:
    """Parse JSON from the head node. Raises HeadNodeError for anything else."""
    try:
        return json.loads(content)
    except ValueError:
        raise HeadNodeError(f"the head node sent invalid JSON: {_line(content)}") from None


def _line(content: bytes) -> str:
    return " ".join(content.decode(errors="replace").split())[:_LINE_CHARS]
