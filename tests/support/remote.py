"""The head node of a run, as remote workers see it that share no folder with it: its files, served in this process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import numpy as np
from aiohttp import web

from areal_core.api.head import Head
from areal_core.config.schema import load
from areal_core.run.remote.files import Files
from areal_core.storage import weights
from areal_core.storage.rundir import RunDir, RunInfo
from areal_core.types import PolicyVersion

PATIENCE_S = 120.0


class Served:
    """An aiohttp application, in a thread of its own."""

    def __init__(self, make: Callable[[], web.Application]) -> None:
        self._make = make
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
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self._up.set_result("http://{}:{}".format(*runner.addresses[0][:2]))
        await self._stop.wait()
        await runner.cleanup()


class HeadNode:
    """A run whose generation and training are left to others, and its files, which `serve` serves."""

    def __init__(self, root: Path) -> None:
        self.model = root / "base"
        self.model.mkdir(parents=True)
        (self.model / "config.json").write_text('{"a": 1}')
        (self.model / "model.safetensors").write_bytes(b"base weights" * 1000)
        launch = {"remote_roles": "both", "copies": True, "devices": 4, "log_bytes": 64 * 1024, "log_files": 2}
        training = {"ranks": 2, "hosts": 2}
        values = {"generation": {"servers": 2}, "launch": launch, "training": training}
        self.config = load(values | {"state_dir": str(root / "head"), "storage": {"url": str(root / "store")}})
        info = RunInfo(run_id="r", model_path=str(self.model), checkpoint_url=str(root / "store/runs/r"))
        self.run = RunDir.create(self.config, info)
        self.files: Files
        self.served: Served | None = None

    def serve(self) -> str:
        """Serve its files, in the place of what served them before; returns their URL."""
        self.close()

        def app() -> web.Application:
            self.files = Files(self.run)
            return self.files.app()

        self.served = Served(app)
        return self.served.url

    def head(self) -> Head:
        return Head(self.serve(), self.run.token(), timeout_s=5.0)

    def publish(self, version: int, value: float | None = None) -> PolicyVersion:
        tensor = np.full(1000, version if value is None else value, dtype=np.float32)
        return weights.publish(self.run.weights, version, {"w": tensor})

    def close(self) -> None:
        if self.served is not None:
            self.served.close()
            self.served = None
