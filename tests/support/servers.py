"""A stand-in for a generation server, for the tests of its clients."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from aiohttp import web

from areal_core.api.wire import PARTS, ServerLoad, encode_part
from areal_core.generation.client import GenerationClient
from areal_core.types import GenerationRequest, PolicyVersion
from tests.support.rollout import body

T = TypeVar("T")


def version(number: int) -> PolicyVersion:
    return PolicyVersion(version=number, path=f"/weights/{number}", digest=f"hash-{number}")


def server_load(generated: int, idle_s: float = 0.0) -> ServerLoad:
    """The load of a server that has sampled so many tokens, all of them for rollouts."""
    return ServerLoad(
        completion_s=8 * idle_s,
        running=0,
        waiting=0,
        generated_tokens=generated,
        rollout_tokens=generated,
        idle_s=idle_s,
        paused_s=0.0,
        swap_ms=1.0,
        recompute_ms=2.0,
        recomputed_tokens=3,
    )


class FakeServer:
    """Completes requests, once `release` is set, up to their limit: with tokens that count on from the prompt's last.

    A pause that aborts ends running requests with `sampled` tokens; requests that come while it is paused wait. A path
    in `broken` fails with the status there. Without a `+` in `release_name` it is vLLM's own. Of the completions of a
    request, those in `early` end at once.
    """

    def __init__(self, release_name: str = "0.32.0+areal.13") -> None:
        self.release_name = release_name
        self.calls: list[Any] = []  # (path, body); of requests for completions their id
        self.requests: dict[str, dict[str, Any]] = {}  # by id
        self.broken: dict[str, int] = {}
        self.refused: set[str] = set()  # ids of requests
        self.early: dict[str, list[int]] = {}  # indices of completions, by request id
        self.release_after_abort = False
        self.late: asyncio.Event | None = None  # what requests need before they are at work
        self.hanging: set[str] = set()  # paths without a response, as long as they are in it
        self.release = asyncio.Event()
        self.release.set()
        self.sampled = 2
        self.label = "0"
        self.metrics = ""
        self.counted = 1
        self.orphans = 0  # completions that it decodes for a controller that is gone
        self.cancelled = 0
        self.sleeping = False
        self.models = ["policy"]
        self._aborting = asyncio.Event()
        self._ended: dict[str, asyncio.Event] = {}
        self._open = asyncio.Event()
        self._open.set()

    async def __aenter__(self) -> FakeServer:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = "http://{}:{}".format(*self._runner.addresses[0][:2])
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    def updates(self) -> list[Any]:
        """Its calls, except requests for completions and those by which a client identifies it."""
        known = ("/version", "/weight_info", "/is_sleeping", "/load")
        return [call for call in self.calls if isinstance(call, tuple) and call[0] not in known]

    async def started(self, *request_ids: str) -> None:
        """Return once these requests have come."""
        async with asyncio.timeout(60):
            while not set(request_ids) <= self.requests.keys():  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    @contextlib.asynccontextmanager
    async def runs(self, call: Coroutine[Any, Any, T]) -> AsyncIterator[asyncio.Task[T]]:
        """A request that has come, and is let go at the end."""
        known = len(self.requests)
        task = asyncio.ensure_future(call)
        async with asyncio.timeout(60):
            while len(self.requests) == known:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        yield task
        self.release.set()
        await asyncio.wait([task])

    async def _handle(self, http: web.Request) -> web.StreamResponse:
        if http.path == "/inference/v1/generate" and http.path not in self.broken:
            return await self._generate(http, await http.json())
        value = await http.json() if http.can_read_body else None
        self.calls.append((http.path_qs, value))
        if http.path in self.broken:
            return web.Response(status=self.broken[http.path], text="as it was told")
        while http.path in self.hanging:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        if http.path == "/version":
            return web.json_response({"version": self.release_name})
        if http.path == "/weight_info":
            return web.json_response({"weight_version": self.label})
        if http.path == "/is_sleeping":
            return web.json_response({"is_sleeping": self.sleeping})
        if http.path == "/v1/models":
            return web.json_response({"data": [{"id": name} for name in self.models]})
        if http.path == "/v1/load_lora_adapter" and value is not None:
            self.models.append(value["lora_name"])
        if http.path == "/v1/unload_lora_adapter" and value is not None:
            self.models.remove(value["lora_name"])
        if http.path == "/update_weight_version" and value is not None:
            self.label = value["new_version"]
        if http.path in ("/sleep", "/wake_up"):
            self.sleeping = http.path == "/sleep"
        if http.path == "/stage" and value is not None:
            return web.json_response({"path": f"/here/{value['version']}"})
        if http.path == "/metrics":
            return web.Response(text=self.metrics)
        if http.path == "/load":
            values = {field.name: 1 for field in dataclasses.fields(ServerLoad)} | {
                "running": self.orphans,
                "waiting": 0,
            }
            return web.json_response(values | {"generated_tokens": self.counted, "rollout_tokens": self.counted})
        if http.path == "/abort_requests" and value is not None:
            for request_id in value["request_ids"]:
                self._ended.setdefault(request_id, asyncio.Event()).set()
        if http.path == "/finish_weight_update" and value is not None:
            self.label = value["weight_version"]
        if http.path == "/pause":
            self._open.clear()
            if http.query["mode"] == "abort":
                self._aborting.set()
                self._aborting = asyncio.Event()
        if http.path == "/resume":
            self._open.set()
            if self.release_after_abort:
                self.release.set()
        return web.json_response({})

    async def _generate(self, http: web.Request, request: dict[str, Any]) -> web.StreamResponse:
        self.calls.append(request["request_id"])
        self.requests[request["request_id"]] = request
        if request["request_id"] in self.refused:
            return web.Response(status=400, text="refused")
        params, start = request["sampling_params"], request["token_ids"][-1] + 1
        whole, in_parts = (range(start, start + params["max_tokens"]), "length"), web.StreamResponse()
        early = self.early.get(request["request_id"], [])
        if early:
            await in_parts.prepare(http)
            await in_parts.write(encode_part(early, body([whole] * len(early), int(self.label))))
        try:
            if self.late is not None:
                await self.late.wait()
            await self._open.wait()
            ended = self._ended.setdefault(f"generate-tokens-{request['request_id']}", asyncio.Event())
            aborted = await self._released_or_aborted(ended)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        count = min(self.sampled, params["max_tokens"])
        completion = (range(start, start + count), "abort") if aborted else whole
        if http.headers.get("Accept") != PARTS:
            return web.Response(body=body([completion] * params["n"], int(self.label)))
        late = [index for index in range(params["n"]) if index not in early]
        if not in_parts.prepared:
            await in_parts.prepare(http)
        await in_parts.write(encode_part(late, body([completion] * len(late), int(self.label))))
        await in_parts.write_eof()
        return in_parts

    async def _released_or_aborted(self, ended: asyncio.Event) -> bool:
        waits = [asyncio.ensure_future(event.wait()) for event in (self.release, self._aborting, ended)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            return not self.release.is_set()
        finally:
            for wait in waits:
                wait.cancel()


async def generated(client: GenerationClient, request: GenerationRequest) -> bytes:
    """The body of a response that comes in one part."""
    parts: list[bytes] = []
    await client.generate(request, lambda _, received: parts.append(received.body))
    [part] = parts
    return part
