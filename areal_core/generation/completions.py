"""Requests for completions to one server: encoded, sent, and what comes read, on the loop that all of it is run on."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets

from areal_core.api.pending_completions import receive
from areal_core.api.wire import PARTS, encode_request, parse_part
from areal_core.errors import ServerLostError
from areal_core.generation.connection import Connection
from areal_core.generation.data_plane import Take
from areal_core.types import GenerationRequest

_PATH = "/inference/v1/generate"


class Completions:
    """Of one server. Raises what `Connection` does."""

    def __init__(self, url: str, token: str | None) -> None:
        self._url = url
        self._token = token
        self._connection: Connection | None = None  # of the loop that they are requested on
        self.share_no_prefix()

    async def in_parts(self, request: GenerationRequest, model: str, take: Take) -> None:
        """As the embedded server sends them."""
        body, missing, connection = encode_request(request, model), request.n, self._connected()
        with connection.failures(_PATH):
            async with await connection.answered("POST", _PATH, body, {"Accept": PARTS}) as response:
                while missing and (line := await response.content.readline()):
                    indices, size = parse_part(line)
                    take(indices, receive(await response.content.readexactly(size)))
                    missing -= len(indices)
        if missing:
            raise ServerLostError(f"{self._url}: the response to {request.request_id} ended early")

    async def one_by_one(self, request: GenerationRequest, model: str, take: Take) -> None:
        """A request for each completion: vLLM makes as many of one, with these seeds, and answers when all have ended.
        Its prefix cache computes their prompt once."""
        parts = [
            dataclasses.replace(request, request_id=request_id, n=1, seed=request.seed + index)
            for index, request_id in enumerate(part_ids(request))
        ]
        # What one of them meets does not concern the others, whose completions are worth having.
        outcomes = await asyncio.gather(
            *(self._one(part, model, index, take) for index, part in enumerate(parts)), return_exceptions=True
        )
        for error in outcomes:
            if error is not None:
                raise error

    async def _one(self, request: GenerationRequest, model: str, index: int, take: Take) -> None:
        body = encode_request(request, model, self._cache_salt)
        take((index,), receive(await self._connected().call("POST", _PATH, body)))

    def share_no_prefix(self) -> None:
        """From now on, have requests to vLLM reuse no keys and values that an earlier one has cached."""
        self._cache_salt = secrets.token_hex(8)

    @property
    def requested(self) -> bool:
        """Whether any were."""
        return self._connection is not None

    async def close(self) -> None:
        if self._connection is not None:
            await self._connection.close()

    def _connected(self) -> Connection:
        self._connection = self._connection or Connection(self._url, self._token)
        return self._connection


def part_ids(request: GenerationRequest) -> list[str]:
    """Ids of the requests that `one_by_one` makes of one."""
    return [request.request_id] if request.n == 1 else [f"{request.request_id}.{index}" for index in range(request.n)]
