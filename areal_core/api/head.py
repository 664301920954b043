"""Client of the head node's data server (areal_core.run.remote.files), for remote workers and their ranks.

Synchronous and stdlib only. The head node may be away for a while. Every request is safe to repeat.
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

_TIMEOUT_S = 10.0  # for the head node to go on with a response
_PIECE = 2**18  # bytes of a file, between two looks whether it is still wanted; they fit the cache that hashes them
_AGAIN_S = 0.5  # between two tries to go on with a file
_LINE_CHARS = 300


class AwayError(ArealError):
    """The head node does not answer, or not in order: it may be asked again."""


class Head:
    """Where the head node is, and what it takes to be served."""

    def __init__(
        self, where: str | Callable[[], str], token: str, *, timeout_s: float = _TIMEOUT_S, name: str = "--head"
    ) -> None:
        """`token` is the run's. `where` is the URL, or gives it for every connection, for a run whose head node may be
        replaced; then it raises AwayError where there is none yet. `name` is the field that holds the URL. Raises
        ConfigError for what is no URL."""
        self._where = checked_url(where, name) if isinstance(where, str) else where
        self.token = token
        self.timeout_s = timeout_s

    @property
    def url(self) -> str:
        """Where it is now. Raises AwayError."""
        return self._where if isinstance(self._where, str) else self._where()

    def session(self) -> Session:
        return Session(self)


class Session:
    """One connection, for one thread at a time."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self.url = ""  # of the last connection
        self._connection: http.client.HTTPConnection | None = None

    def ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        """Status, below 500, and body of a response. Raises AwayError, and ConfigError where the token is refused."""
        response = self._respond(method, path, body, {})
        with self._heard():
            content = response.read()
        if response.status >= 500:
            raise AwayError(f"{self.url}{path}: {response.status}: {_line(content)}")
        return response.status, content

    def file(self, path: str, start: int) -> http.client.HTTPResponse:
        """The response that holds a file from its byte `start` on, unread. Raises AwayError, ConfigError as `ask` does,
        and StorageError where the head node has no such file."""
        response = self._respond("GET", path, None, {"Range": f"bytes={start}-"} if start else {})
        if response.status in (200, 206):
            return response
        with self._heard():
            line = f"{self.url}{path}: {response.status}: {_line(response.read())}"
        raise AwayError(line) if response.status >= 500 else StorageError(line)

    def read(self, response: http.client.HTTPResponse, buffer: memoryview) -> int:
        """Read some more bytes of a file into `buffer`; returns how many, 0 at the file's end. Raises AwayError."""
        with self._heard():
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
                with self._heard():
                    connection = self._connect()
                    connection.request(method, path, body, headers | known)
                    response = connection.getresponse()
                break
            except AwayError:
                if not was_open:  # else the head node may have closed it meanwhile: a new one will tell
                    raise
        if response.status == 401:
            raise ConfigError(f"--token-file: {self.url} refuses this token: it is not that of its run")
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
    def _heard(self) -> Iterator[None]:
        """Raises AwayError where the head node can't be heard within, and ends the connection."""
        try:
            yield
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise AwayError(f"{self.url} does not answer: {error or type(error).__name__}") from None


def fetch(head: Head, path: str, target: Path, digest: str, *, stopped: Callable[[], bool], patience_s: float) -> int:
    """Copy a file of the head node's, which is hashed as it arrives; returns its size. What is cut short goes on where
    it ended, as long as something comes within `patience_s`.

    Raises StorageError for a file that the head node has not, or that is damaged; AwayError where nothing came for so
    long, or once it is `stopped`; OSError where it can't be written.
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
                    raise StorageError(f"{path}: {session.url} does not say how long it is")
                total = size + response.length
                while not stopped() and (count := session.read(response, buffer)):
                    file.write(buffer[:count])
                    hashed.update(buffer[:count])
                    size += count
                if size != total:
                    session.close()
                    raise AwayError("the response ended before the file")
            except AwayError as error:
                said = str(error)
            if stopped():
                raise AwayError(f"{path}: nobody waits for it any more")
            if size > before:
                came_at = time.monotonic()
            elif time.monotonic() - came_at > patience_s:
                raise AwayError(f"{path} is cut short, {size} of {total} bytes: {said}")
            if size != total:
                time.sleep(_AGAIN_S)
    if (found := hashed.hexdigest()) != digest:
        raise StorageError(f"{path} is damaged: its digest is {found}, must be {digest}")
    return size


def checked_url(url: str, name: str = "--head") -> str:
    """Raises ConfigError that names the field for what is no URL of a data server or a stager."""
    refuse_credentials(name, url, "the token has an option of its own (--token-file)")
    try:
        parts = urllib.parse.urlsplit(url)
        usable = parts.scheme == "http" and parts.hostname and parts.port and parts.path in ("", "/")
    except ValueError:
        usable = False
    if not usable:
        raise ConfigError(f"{name}: must be the URL of a data server, as http://10.0.0.1:8900, got {url!r}")
    return url.rstrip("/")


def parsed(content: bytes) -> Any:
    """JSON of the head node's. Raises AwayError for what is none."""
    try:
        return json.loads(content)
    except ValueError:
        raise AwayError(f"the head node has sent no JSON: {_line(content)}") from None


def _line(content: bytes) -> str:
    return " ".join(content.decode(errors="replace").split())[:_LINE_CHARS]
