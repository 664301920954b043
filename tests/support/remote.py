"""The head node of a run, as remote workers see it: its data server, in this process, and a controller that registers
servers and reports those that it has lost."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import numpy as np
from aiohttp import web

from areal_core.api.head import Head
from areal_core.config.schema import load
from areal_core.run.remote.files import DataServer
from areal_core.storage import weights
from areal_core.storage.rundir import RunDir, RunInfo, write_json
from areal_core.types import PolicyVersion, RunStatus

PATIENCE_S = 120.0


class Served:
    """An aiohttp application, in a thread of its own."""

    def __init__(self, make: Callable[[], web.Application], port: int = 0) -> None:
        self._make, self._port = make, port
        self._up: Future[str] = Future()
        self._stop = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),), daemon=True)
        self._thread.start()
        self.url = self._up.result(PATIENCE_S)

    def close(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(PATIENCE_S)
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()

    async def _serve(self) -> None:
        runner = web.AppRunner(self._make(), shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", self._port).start()
        self._up.set_result("http://{}:{}".format(*runner.addresses[0][:2]))
        await self._stop.wait()
        await runner.cleanup()


class HeadNode:
    """A run whose generation and training are left to others, and its data server, which `serve` starts."""

    def __init__(self, root: Path) -> None:
        self.model = root / "base"
        self.model.mkdir(parents=True)
        (self.model / "config.json").write_text('{"a": 1}')
        (self.model / "model.safetensors").write_bytes(b"base weights" * 1000)
        launch = {"remote_roles": "both", "devices": 4, "stop_timeout_s": 5.0}
        training = {"ranks": 2, "hosts": 2}
        values = {"generation": {"servers": 2}, "launch": launch, "training": training}
        self.config = load(values | {"state_dir": str(root / "head"), "storage": {"url": str(root / "store")}})
        info = RunInfo(run_id="r", model_path=str(self.model), checkpoint_url=str(root / "store/runs/r"))
        self.run = RunDir.create(self.config, info)
        self.files: DataServer
        self.served: Served | None = None
        self.lost: list[str] = []  # URLs of lost servers, as the controller reports them
        self.slow: set[str] = set()  # names of servers that are slow to join
        self.on_leave: Callable[[str], bool] = lambda name: True  # looks, as a server leaves
        self._controllers: list[Controller] = []

    def serve(self, port: int = 0) -> str:
        """Start its data server, in the place of the one before; returns its URL."""
        self.close()

        def app() -> web.Application:
            self.files = DataServer(self.run)
            return self.files.app()

        self.served = Served(app, port)
        return self.served.url

    def head(self) -> Head:
        return Head(self.serve(), self.run.token(), timeout_s=5.0)

    def publish(self, version: int, value: float | None = None) -> PolicyVersion:
        tensor = np.full(1000, version if value is None else value, dtype=np.float32)
        return weights.publish(self.run.weights, version, {"w": tensor})

    def start_controller(self) -> Controller:
        """A new one, in the place of the last."""
        controller = Controller(self)
        self._controllers.append(controller)
        write_json(self.run.ready_file("controller"), {"pid": len(self._controllers), "url": controller.url})
        return controller

    def ranks_are_ready(self) -> None:
        for rank in range(self.config.trainer_processes):
            write_json(self.run.ready_file("trainer", rank), {"pid": 1, "url": None})

    def close(self) -> None:
        """End its data server."""
        if self.served is not None:
            self.served.close()
            self.served = None

    def end(self) -> None:
        self.close()
        for controller in self._controllers:
            controller.close()


class Controller:
    """The routes of a controller that launchers use, on the loopback."""

    def __init__(self, head_node: HeadNode) -> None:
        self.joined: list[tuple[str, str]] = []  # name, URL
        self.left: list[tuple[str, bool]] = []  # name, and what `on_leave` has seen
        self._head_node = head_node
        self._served = Served(self._app)
        self.url = self._served.url

    def close(self) -> None:
        self._served.close()

    def _app(self) -> web.Application:
        app = web.Application()
        app.add_routes([web.get("/status", self._status), web.post("/servers", self._join)])
        app.add_routes([web.delete("/servers/{name}", self._leave)])
        return app

    async def _status(self, _: web.Request) -> web.Response:
        lost = tuple(self._head_node.lost)
        status = RunStatus(
            step=0, steps=2, version=0, reward=None, accuracy=None, staleness=None, effective_tokens_per_s=None,
            generated_tokens_per_s=None, elapsed_s=1.0, eta_s=None, finished=None, lost_servers=lost,
        )  # fmt: skip
        return web.json_response(dataclasses.asdict(status))

    async def _join(self, request: web.Request) -> web.Response:
        server = await request.json()
        self.joined.append((server["name"], server["url"]))
        return web.Response(status=204) if server["name"] in self._head_node.slow else web.json_response({})

    async def _leave(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        self.left.append((name, self._head_node.on_leave(name)))
        return web.json_response({})
