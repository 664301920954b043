"""Generation servers join and leave while others work: a running completion goes on at another server."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest
from aiohttp import web

from areal_core.api.pending_completions import PendingCompletions
from areal_core.api.wire import join_completions
from areal_core.controller import pool as module
from areal_core.controller.pool import GenerationPool
from areal_core.generation import connection
from areal_core.generation.client import GenerationClient
from areal_core.generation.engines.embedded import Engine
from areal_core.generation.server.routes import GenerationServer
from areal_core.models.folders import read_weights
from areal_core.storage.weights import base_version
from areal_core.types import PolicyVersion
from tests.support.generation import QWEN2, request, write

SPEC = dataclasses.replace(QWEN2, context=32768)  # long completions
LONG = {"max_tokens": 30_000, "stop_token_ids": ()}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Served:
    """An embedded server in this process; `held[path]` keeps requests to a path from it until it is set."""

    def __init__(self, model: Path) -> None:
        self.held: dict[str, asyncio.Event] = {}
        self.seen: list[str] = []
        engine = Engine(SPEC, read_weights(model, SPEC), slots=1)
        self.server = GenerationServer(engine, asyncio.get_running_loop())
        app = self.server.app()

        @web.middleware
        async def hold(request: web.Request, handler: Handler) -> web.StreamResponse:
            self.seen.append(request.path)
            if event := self.held.get(request.path):
                await event.wait()
            response = await handler(request)
            self.seen.append(f"{request.path} done")
            return response

        app.middlewares.append(hold)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)

    async def start(self) -> None:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = "http://{}:{}".format(*self._runner.addresses[0][:2])

    async def stop(self) -> None:
        await self._runner.cleanup()


@pytest.fixture
def models(tmp_path: Path) -> list[PolicyVersion]:
    """Version 0, which the servers start with, and version 1."""
    folders = [write(tmp_path / f"v{version}", SPEC, seed=version) for version in range(2)]
    return [dataclasses.replace(base_version(str(folder)), version=v) for v, folder in enumerate(folders)]


@pytest.fixture
async def servers(models: list[PolicyVersion]) -> AsyncIterator[list[Served]]:
    served = [Served(Path(models[0].path)) for _ in range(2)]
    for server in served:
        await server.start()
    yield served
    for server in served:
        await server.stop()


@pytest.fixture
async def pool() -> AsyncIterator[GenerationPool]:
    pool = GenerationPool(completions_per_server=8, patience_s=60)
    async with asyncio.timeout(240):
        yield pool
    await pool.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def finished(pool: GenerationPool, pending: PendingCompletions, generating: asyncio.Task[None]) -> list[int]:
    """The versions of a completion's tokens, once it has been ended."""
    await pool.abort_all()
    await generating
    [completion] = join_completions(pending.completions())
    return completion.versions.tolist()


async def test_a_server_that_is_registered_twice_is_not_disturbed(
    servers: list[Served], pool: GenerationPool, models: list[PolicyVersion]
) -> None:
    await pool.join("a", servers[0].url, lambda: models[0])
    pending = PendingCompletions(request(**LONG))
    generating = asyncio.ensure_future(pool.generate(pending))
    await until(lambda: "/inference/v1/generate" in servers[0].seen)
    await pool.join("a", servers[0].url, lambda: models[0])
    before = (await pool.loads())[0].generated_tokens
    while (await pool.loads())[0].generated_tokens == before:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    assert servers[0].seen.count("/inference/v1/generate") == 1
    assert set(await finished(pool, pending, generating)) == {0}


async def test_a_request_that_arrives_at_a_server_which_leaves_goes_on_at_another(
    servers: list[Served], pool: GenerationPool, models: list[PolicyVersion], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_ABORT_AGAIN_S", 0.1)
    servers[0].held["/inference/v1/generate"] = asyncio.Event()
    await pool.join("a", servers[0].url, lambda: models[0])
    pending = PendingCompletions(request(**LONG))
    generating = asyncio.ensure_future(pool.generate(pending))
    await until(lambda: "/inference/v1/generate" in servers[0].seen)
    await pool.join("b", servers[1].url, lambda: models[0])
    leaving = asyncio.ensure_future(pool.leave("a"))
    await until(lambda: "/pause done" in servers[0].seen)
    servers[0].held["/inference/v1/generate"].set()
    await leaving
    await until(lambda: "/inference/v1/generate" in servers[1].seen)
    assert set(await finished(pool, pending, generating)) == {0}


async def test_what_a_server_has_sampled_under_new_weights_does_not_go_on_under_old_ones(
    servers: list[Served], pool: GenerationPool, models: list[PolicyVersion]
) -> None:
    for name, server in zip("ab", servers, strict=True):
        await pool.join(name, server.url, lambda: models[0])
    servers[1].held["/update_weights"] = asyncio.Event()
    pending = PendingCompletions(request(**LONG))
    generating = asyncio.ensure_future(pool.generate(pending))
    await until(lambda: "/inference/v1/generate" in servers[0].seen)
    updating = asyncio.ensure_future(pool.load_version(models[1]))
    await until(lambda: "/resume done" in servers[0].seen)
    await asyncio.sleep(0.05)  # some tokens under the new weights
    leaving = asyncio.ensure_future(pool.leave("a"))
    await asyncio.sleep(0.1)
    servers[1].held["/update_weights"].set()
    await updating
    await leaving
    await until(lambda: "/inference/v1/generate" in servers[1].seen)
    versions = await finished(pool, pending, generating)
    assert set(versions) == {0, 1}
    assert (np.diff(versions) >= 0).all()


async def test_a_connection_that_the_server_may_be_closing_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_KEEP_ALIVE_S", 0.05)
    ports: list[int] = []

    async def health(http: web.Request) -> web.Response:
        assert http.transport is not None
        ports.append(http.transport.get_extra_info("peername")[1])
        return web.Response()

    app = web.Application()
    app.router.add_get("/health", health)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    client = GenerationClient("http://{}:{}".format(*runner.addresses[0][:2]))
    for pause_s in (0.0, 0.2, 0.0):
        await client.health()
        await asyncio.sleep(pause_s)
    await client.close()
    await runner.cleanup()
    assert ports[0] == ports[1] != ports[2]
