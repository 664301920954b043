"""HTTP with one generation server: a session, its errors, and requests for completions."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

import aiohttp

from areal_core.api.access import authorization
from areal_core.api.patience import lag_tolerant_timeout
from areal_core.api.pending_completions import receive
from areal_core.api.wire import PARTS, encode_request, parse_part
from areal_core.errors import GenerationError, ServerLostError
from areal_core.generation.data_plane import Take
from areal_core.types import GenerationRequest

_KEEP_ALIVE_S = 2.0  # vLLM closes idle connections after 5 s; to a request sent just then the server looks lost
_READ_BYTES = 2**20  # read buffer; bodies are megabytes
_GENERATE = "/inference/v1/generate"
_JSON = {"Content-Type": "application/json"}


class Connection:
    """HTTP session with a server, on the event loop that creates it.

    Methods raise ServerLostError if the server can't be reached or answers with a 5xx status, and GenerationError for
    any other status than 200.
    """

    def __init__(self, url: str, token: str | None) -> None:
        self._url = url
        # No bound on connections: requests queue at the server, which schedules them.
        self._session = aiohttp.ClientSession(
            base_url=url,
            headers=authorization(token),
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
            read_bufsize=_READ_BYTES,
            # No time limits here: this process's own lag would exceed them.
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
        )

    async def call(self, method: str, path: str, body: bytes | None, *, timeout_s: float | None = None) -> bytes:
        """Return a response's body. `timeout_s` counts only time in which this process could listen."""
        if timeout_s is None:
            return await self._read(method, path, body)
        try:
            async with lag_tolerant_timeout(timeout_s):
                return await self._read(method, path, body)
        except TimeoutError:
            raise ServerLostError(f"{self._where(path)}: no response in {timeout_s} s") from None

    async def send(
        self, method: str, path: str, body: bytes | None, headers: dict[str, str] | None = None
    ) -> aiohttp.ClientResponse:
        """Send a request and return its response of status 200. A `body` is JSON.

        The caller must read the response within `failures` and release it.
        """
        where = self._where(path)
        if self._session.closed:
            raise ServerLostError(f"{where}: the client is closed")
        headers = headers or {} if body is None else {**_JSON, **(headers or {})}
        response = await self._session.request(method, path, data=body, headers=headers)
        if response.status != 200:
            kind = ServerLostError if response.status >= 500 else GenerationError
            content = (await response.read()).decode(errors="replace")
            raise kind(f"{where}: {response.status}: {content:.500}")
        return response

    @contextmanager
    def failures(self, path: str) -> Iterator[None]:
        """Context manager: turns connection errors into ServerLostError."""
        try:
            yield
        except (aiohttp.ClientError, asyncio.IncompleteReadError) as error:
            raise ServerLostError(f"{self._where(path)}: {type(error).__name__}: {error}") from None

    async def close(self) -> None:
        await self._session.close()

    async def _read(self, method: str, path: str, body: bytes | None) -> bytes:
        with self.failures(path):
            async with await self.send(method, path, body) as response:
                return await response.read()

    def _where(self, path: str) -> str:
        return path if "://" in path else f"{self._url}{path}"


class Completions:
    """Requests completions from one server and reads them, all on one event loop. Raises the errors of `Connection`."""

    def __init__(self, url: str, token: str | None) -> None:
        self._url = url
        self._token = token
        self._connection: Connection | None = None  # on the event loop of the requests
        self.share_no_prefix()

    async def stream(self, request: GenerationRequest, model: str, take: Take) -> None:
        """Request all completions at once; the embedded server sends them in parts as they end."""
        body, missing, connection = encode_request(request, model), request.n, self._connected()
        with connection.failures(_GENERATE):
            async with await connection.send("POST", _GENERATE, body, {"Accept": PARTS}) as response:
                while missing and (line := await response.content.readline()):
                    indices, size = parse_part(line)
                    take(indices, receive(await response.content.readexactly(size)))
                    missing -= len(indices)
        if missing:
            raise ServerLostError(f"{self._url}: the response to {request.request_id} ended early")

    async def request_each(self, request: GenerationRequest, model: str, take: Take) -> None:
        """Send one request per completion: vLLM answers a request only after its last completion.

        vLLM gives completion i of a request the seed `seed` + i, so the completions are the same. Its prefix cache
        computes their prompt once.
        """
        parts = [
            dataclasses.replace(request, request_id=request_id, n=1, seed=request.seed + index)
            for index, request_id in enumerate(part_ids(request))
        ]
        # An error of one request must not cost the completions of the others.
        outcomes = await asyncio.gather(
            *(self._one(part, model, index, take) for index, part in enumerate(parts)), return_exceptions=True
        )
        for error in outcomes:
            if error is not None:
                raise error

    async def _one(self, request: GenerationRequest, model: str, index: int, take: Take) -> None:
        body = encode_request(request, model, self._cache_salt)
        take((index,), receive(await self._connected().call("POST", _GENERATE, body)))

    def share_no_prefix(self) -> None:
        """Make later requests to vLLM ignore keys and values cached by earlier ones."""
        self._cache_salt = secrets.token_hex(8)

    async def close(self) -> None:
        if self._connection is not None:
            await self._connection.close()

    def _connected(self) -> Connection:
        self._connection = self._connection or Connection(self._url, self._token)
        return self._connection


def part_ids(request: GenerationRequest) -> list[str]:
    """Return the ids of the requests that `request_each` makes of a request."""
    return [request.request_id] if request.n == 1 else [f"{request.request_id}.{index}" for index in range(request.n)]
