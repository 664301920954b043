"""Serve an engine behind the routes of vLLM's native RL API, with the same fields and errors.

    controller --POST /inference/v1/generate--> event loop --> engine thread --> completions, with versions per token
    controller --start, update, pause, finish, resume--> the server stages model weights beside decoding, swaps them
                                                         between two decode steps; resume recomputes the KV cache

python -m areal_core.generation.server.routes --model DIR --host 127.0.0.1 --port 0 --ready-file F --slots N
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import logging
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web
from aiohttp.typedefs import Handler

from areal_core.api import serving, wire
from areal_core.api.refusals import token_middleware
from areal_core.config.schema import load_file
from areal_core.errors import ArealError, ConfigError, GenerationError, ModelError
from areal_core.generation.command_line import server_parser, server_token
from areal_core.generation.engines.emulated import EmulatedEngine
from areal_core.generation.engines.engine import Generation, Options, ServedEngine, make_engine, read_version
from areal_core.generation.server.engine_thread import EngineThread
from areal_core.generation.server.protocol import Abort, Finish, Relabel, RequestError, Update, parse, parse_request
from areal_core.launch import heartbeat, logs, process
from areal_core.models.spec import read_spec
from areal_core.tracking.timeline import TimelineWriter
from areal_core.types import Completion, GenerationRequest, PolicyVersion

logger = logging.getLogger(__name__)

_MAX_BODY_BYTES = 64 * 2**20
_BATCH_WAIT_S = 0.05  # completions of a request that end within this time are sent together
_PAUSE_MODES = ("abort", "wait", "keep")


class GenerationServer:
    """The routes of one engine. All methods run in the event loop."""

    def __init__(
        self,
        engine: ServedEngine,
        loop: asyncio.AbstractEventLoop,
        *,
        token: str | None = None,
        timeline: TimelineWriter | None = None,
    ) -> None:
        """`token` is the token that every request must carry; None: no token."""
        self.failure: asyncio.Future[BaseException] = loop.create_future()  # the error that ended the engine thread
        self._engine = engine
        self._middlewares = [] if token is None else [token_middleware(token)]
        self._pending: dict[str, _Pending] = {}  # by request id
        self._thread = EngineThread(engine, loop, deliver=self._deliver, failed=self._fail, timeline=timeline)
        self._staged: tuple[Any, str] | None = None  # prepared model weights and their hash
        self._label = engine.version
        self._name = wire.MODEL_NAME  # name of the loaded version, after the first load
        self._sleeping = False

    def app(self) -> web.Application:
        app = web.Application(middlewares=[_errors_as_json, *self._middlewares], client_max_size=_MAX_BODY_BYTES)
        post = {
            "/inference/v1/generate": self._generate,
            "/pause": self._pause,
            "/resume": self._resume,
            "/abort_requests": self._abort_requests,
            "/start_weight_update": self._start_update,
            "/update_weights": self._update_weights,
            "/finish_weight_update": self._finish_update,
            "/update_weight_version": self._update_version,
            "/reset_prefix_cache": self._reset_prefix_cache,
            "/sleep": self._sleep,
            "/wake_up": self._wake_up,
        }
        get = {
            "/health": self._health,
            "/is_paused": self._is_paused,
            "/is_sleeping": self._is_sleeping,
            "/weight_info": self._weight_info,
            "/version": self._version,
            "/load": self._load,
            "/metrics": self._metrics,
        }
        app.add_routes([web.post(path, handler) for path, handler in post.items()])
        app.add_routes([web.get(path, handler) for path, handler in get.items()])
        app.on_startup.append(self._start)
        app.on_shutdown.append(self._stop)
        return app

    async def _start(self, _: web.Application) -> None:
        self._thread.start()

    async def _stop(self, _: web.Application) -> None:
        self._fail_pending(RequestError("the server is stopping", status=503))
        await asyncio.to_thread(self._thread.stop)

    # Generation

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        spec = self._engine.spec
        request = parse_request(await http.read(), eos_token_ids=spec.eos_token_ids, version=self._name)
        self._engine.check(request)
        if request.request_id in self._pending:
            raise RequestError(f"{request.request_id} is already being served", param="request_id")
        pending = self._pending[request.request_id] = _Pending(request)
        self._thread.submit(lambda engine: engine.add(request))

        def encoded(completions: Mapping[int, Completion]) -> bytes:
            indices = sorted(completions)
            return wire.encode_generation(request, [completions[index] for index in indices], indices=indices)

        try:
            if http.headers.get("Accept") == wire.PARTS:
                return await _send_parts(http, pending, encoded)
            return _json_bytes(encoded(await pending.all()))
        except (asyncio.CancelledError, ConnectionError):  # the client disconnected
            self._thread.submit(lambda engine: engine.abort([request.request_id]))
            raise asyncio.CancelledError from None
        finally:
            del self._pending[request.request_id]

    async def _abort_requests(self, http: web.Request) -> web.Response:
        given = parse(await http.read(), Abort).request_ids
        ids = {request_id.removeprefix("generate-tokens-") for request_id in given}
        return web.json_response({"status": "aborted", "aborted": await self._thread.abort(ids)})

    def _deliver(self, finished: list[Generation]) -> None:
        for generation in finished:
            if (pending := self._pending.get(generation.request.request_id)) is not None:
                pending.put(generation.completions)

    # Pausing

    async def _pause(self, http: web.Request) -> web.Response:
        mode = http.query.get("mode", "abort")
        if mode not in _PAUSE_MODES:
            raise RequestError(f"must be one of {', '.join(_PAUSE_MODES)}, got {mode!r}", param="mode")
        await self._thread.pause(mode, clear_cache=http.query.get("clear_cache") != "false")
        return web.json_response({"status": "paused"})

    async def _resume(self, _: web.Request) -> web.Response:
        await self._thread.resume()
        return web.json_response({"status": "resumed"})

    async def _is_paused(self, _: web.Request) -> web.Response:
        return web.json_response({"is_paused": self._thread.is_paused})

    async def _sleep(self, http: web.Request) -> web.Response:
        """Pause and clear the KV cache; there is no accelerator memory to free."""
        self._sleeping = True
        return await self._pause(http)

    async def _wake_up(self, http: web.Request) -> web.Response:
        self._sleeping = False
        return await self._resume(http)

    async def _is_sleeping(self, _: web.Request) -> web.Response:
        return web.json_response({"is_sleeping": self._sleeping})

    # Updates of model weights

    async def _start_update(self, _: web.Request) -> web.Response:
        """Begin an update, and discard an unfinished one."""
        self._staged = None
        return web.json_response({"message": "weight update started"})

    async def _update_weights(self, http: web.Request) -> web.Response:
        info = parse(await http.read(), Update).update_info
        self._staged = None
        self._staged = await asyncio.to_thread(read_version, self._engine, Path(info.path), info.digest), info.digest
        return web.json_response({"message": "weights staged"})

    async def _finish_update(self, http: web.Request) -> web.Response:
        version = int(parse(await http.read(), Finish).weight_version)
        if self._staged is None:
            raise RequestError("no model weights were staged", param="weight_version")
        (staged, digest), self._staged = self._staged, None
        await self._thread.call(lambda engine: engine.swap(staged, version, recompute=False))
        self._label, self._name = version, wire.version_name(PolicyVersion(version=version, path="", digest=digest))
        return web.json_response({"message": "weight update finished"})

    async def _update_version(self, http: web.Request) -> web.Response:
        version = int(parse(await http.read(), Relabel).new_version)
        await self._thread.call(lambda engine: setattr(engine, "version", version))
        self._label = version
        return web.json_response({"success": True, "new_version": str(version)})

    async def _weight_info(self, _: web.Request) -> web.Response:
        return web.json_response({"weight_version": str(self._label)})

    async def _reset_prefix_cache(self, _: web.Request) -> web.Response:
        await self._thread.call(lambda engine: engine.clear_cache())
        return web.json_response({"success": True})

    # About the server

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=503 if self.failure.done() else 200)

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": f"{wire.ROUTES_VERSION}+{wire.EMBEDDED}"})

    async def _load(self, _: web.Request) -> web.Response:
        return _json_bytes(orjson.dumps(await self._thread.load()))

    async def _metrics(self, _: web.Request) -> web.Response:
        values = dataclasses.asdict(await self._thread.load()) | {"weight_version": self._label}
        return web.Response(text="".join(f"areal_generation_{name} {value}\n" for name, value in values.items()))

    def _fail(self, error: BaseException) -> None:
        self.failure.set_result(error)
        self._fail_pending(RequestError(f"the engine failed: {error}", status=500))

    def _fail_pending(self, error: Exception) -> None:
        for pending in self._pending.values():
            pending.put(error)


class _Pending:
    """A running request, with its finished completions that were not yet taken."""

    def __init__(self, request: GenerationRequest) -> None:
        self._left = request.n  # completions not yet taken
        self._ended: asyncio.Queue[Mapping[int, Completion] | Exception] = asyncio.Queue()

    def put(self, ended: Mapping[int, Completion] | Exception) -> None:
        """Add finished completions, or the error that ends the request."""
        self._ended.put_nowait(ended)

    async def all(self) -> dict[int, Completion]:
        """Return all completions. Raises the error that ended the request, if any."""
        ended: dict[int, Completion] = {}
        while more := await self.more():
            ended |= more
        return ended

    async def more(self) -> dict[int, Completion]:
        """Return completions that ended since the last call, at least one; empty once all were taken.

        Completions that end within a moment after the first come with it. Raises the error that ended the request, if
        any.
        """
        ended: dict[int, Completion] = {}
        if self._left:
            await self._take(ended)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_BATCH_WAIT_S):
                while self._left:
                    await self._take(ended)
        return ended

    async def _take(self, ended: dict[int, Completion]) -> None:
        found = await self._ended.get()
        if isinstance(found, Exception):
            raise found
        ended |= found
        self._left -= len(found)


async def _send_parts(
    http: web.Request, pending: _Pending, encoded: Callable[[Mapping[int, Completion]], bytes]
) -> web.StreamResponse:
    """Send completions as they end. An error before the first one becomes an error response."""
    response = web.StreamResponse(headers={"Content-Type": wire.PARTS})
    try:
        while ended := await pending.more():
            if not response.prepared:
                await response.prepare(http)
            await response.write(wire.encode_part(sorted(ended), encoded(ended)))
    except RequestError as error:
        if not response.prepared:
            raise
        await response.write(wire.encode_failure(str(error)))
    await response.write_eof()
    return response


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except RequestError as error:
        return _error(str(error), error.status, error.param)
    except (GenerationError, ModelError) as error:
        return _error(str(error), 400, str(error).partition(":")[0])
    except web.HTTPException as error:
        return _error(error.reason, error.status, None)


def _error(message: str, status: int, param: str | None) -> web.Response:
    kind = {400: "BadRequestError", 404: "NotFoundError"}.get(
        status, "InternalServerError" if status >= 500 else "Error"
    )
    body = {"error": {"message": message, "type": kind, "param": param, "code": status}}
    return web.json_response(body, status=status)


def _json_bytes(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")


def _arguments() -> argparse.Namespace:
    parser = server_parser("areal_core.generation.server.routes")
    parser.add_argument("--engine", default="embedded", help="embedded, or an import path: package.module:function")
    parser.add_argument("--timeline", type=Path, help="file to append the engine's timeline to")
    parser.add_argument(
        "--context", type=int, help="most tokens of prompt and completion together; default: the model's"
    )
    parser.add_argument("--device", default="cpu", help="device of the engine: cpu or cuda")
    parser.add_argument(
        "--emulate", type=Path, help="config.json of a run whose accelerators the server emulates, without computing"
    )
    return parser.parse_args()


def _engine(arguments: argparse.Namespace) -> ServedEngine:
    spec = read_spec(arguments.model)
    context = spec.context if arguments.context is None else arguments.context
    if not 2 <= context <= spec.context:
        raise ModelError(f"--context: must be from 2 to {spec.context}, the model's own, got {context}")
    if arguments.slots < 1:
        raise ModelError(f"--slots: must be at least 1, got {arguments.slots}")
    slots, version = arguments.slots, arguments.weight_version
    if arguments.emulate is not None:
        config = load_file(arguments.emulate)
        return EmulatedEngine(
            spec, config.emulation, switches=config.takes_turns, slots=slots, context=context, version=version
        )
    options: Options = {
        "slots": slots,
        "context": context,
        "version": version,
        "device": arguments.device,
    }
    return make_engine(arguments.engine, Path(arguments.model), spec, options)


async def _serve(arguments: argparse.Namespace, engine: ServedEngine, token: str | None) -> None:
    """Serve until SIGTERM or SIGINT. Raises the error that ended the engine thread, if any."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    timeline = TimelineWriter(arguments.timeline, cpu=time.process_time) if arguments.timeline else None
    server = GenerationServer(engine, loop, token=token, timeline=timeline)
    runner = serving.runner(server.app(), handler_cancellation=True, shutdown_timeout=2.0)
    await runner.setup()
    try:
        try:
            url = await serving.listen(runner, arguments.host, arguments.port)
        except OSError as error:
            raise ConfigError(f"--port: {error.strerror}; 0 takes any free one") from None
        process.announce_ready(arguments.ready_file, url)
        heartbeat.watch_loop(loop)
        stopping = asyncio.ensure_future(stop.wait())
        await asyncio.wait((stopping, server.failure), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
    finally:
        await runner.cleanup()
    if server.failure.done():
        raise server.failure.result()


def main() -> int:
    arguments = _arguments()
    logs.start("generation")
    process.tie_to_parent(arguments.ready_file)
    try:
        token = server_token(arguments)
        engine = _engine(arguments)
    except (ConfigError, ModelError) as error:
        logger.error("%s", error)
        return 2
    try:
        asyncio.run(_serve(arguments, engine, token))
    except ArealError as error:
        logger.error("%s", error)
        return 2 if isinstance(error, ConfigError) else 1
    return 0


if __name__ == "__main__":
    process.run_and_exit(main)
