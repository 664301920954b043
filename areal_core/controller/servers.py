"""A server as the pool and its transfers know it, and how several are asked at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from areal_core.errors import GenerationError
from areal_core.generation.client import GenerationClient
from areal_core.types import PolicyVersion

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Server:
    """One server of a pool."""

    name: str
    client: GenerationClient
    loaded: PolicyVersion | None = None
    answers: int = 0  # in flight
    calls: set[asyncio.Future[bytes]] = field(default_factory=set[asyncio.Future[bytes]])
    lost: bool = False

    async def load(self, version: PolicyVersion, interruption: str) -> None:
        """From the version's file. Raises ServerLostError."""
        await self.client.load_version(version, interruption)
        self.loaded = version


async def ask_each(
    servers: Iterable[Server],
    call: Callable[[Server], Awaitable[T]],
    remove: Callable[[Server, str], Awaitable[None]],
) -> dict[Server, T]:
    """Ask servers at the same time. The answers of those that gave one, in order; the others, those that refused
    included, are handed to `remove` with the reason: they are not what they were."""
    servers = list(servers)
    results = await asyncio.gather(*map(call, servers), return_exceptions=True)
    answers: dict[Server, T] = {}
    for server, result in zip(servers, results, strict=True):
        if isinstance(result, GenerationError):
            await remove(server, str(result))
        elif isinstance(result, BaseException):
            raise result
        else:
            answers[server] = result
    return answers
