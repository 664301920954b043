"""The head node of a run, as remote workers see it: a locked folder, and a controller that registers servers and
reports those that it has lost."""

from __future__ import annotations

import dataclasses
import http.server
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from areal_core.config.schema import load
from areal_core.launch.supervisor import FileLock
from areal_core.storage.rundir import RunDir, RunInfo, write_json
from areal_core.types import RunStatus

PATIENCE_S = 120.0


class HeadNode:
    def __init__(self, root: Path, **launch: Any) -> None:
        values = {"remote_roles": "both", "restarts": 2, "stop_timeout_s": 5.0, "devices": 3} | launch
        self.config = load({"state_dir": str(root), "launch": values, "training": {"ranks": 1}})
        info = RunInfo(run_id="r", model_path="/models/base", checkpoint_url="/store/r")
        self.run = RunDir.create(self.config, info)
        self._lock = FileLock(self.run.launcher_lock, timeout_s=0.0, busy="the run's lock is held")
        self.lost: list[str] = []  # URLs of lost servers, as the controller reports them
        self.slow: set[str] = set()  # names of servers that are slow to join
        self.on_leave: Callable[[str], bool] = lambda name: True  # looks, as a server leaves
        self.controllers: list[Controller] = []

    def start_controller(self) -> Controller:
        """A new one, in the place of the last."""
        self.close()
        controller = Controller(self)
        self.controllers.append(controller)
        write_json(self.run.ready_file("controller"), {"pid": len(self.controllers), "url": controller.url})
        return controller

    def trainer_is_ready(self) -> None:
        write_json(self.run.ready_file("trainer"), {"pid": os.getpid(), "url": None})

    def end(self, *, summary: bool) -> None:
        if summary:
            write_json(self.run.summary, {})
        self._lock.release()

    def close(self) -> None:
        for controller in self.controllers[-1:]:  # those before are closed
            controller.close()


class Controller:
    """The two routes of a controller that launchers use, on the loopback."""

    def __init__(self, head_node: HeadNode) -> None:
        self.joined: list[tuple[str, str]] = []  # name, URL
        self.left: list[tuple[str, bool]] = []  # name, and what `on_leave` has seen
        controller = self
        status = dataclasses.asdict(
            RunStatus(
                step=0, steps=2, version=0, reward=None, accuracy=None, staleness=None, effective_tokens_per_s=None,
                generated_tokens_per_s=None, elapsed_s=1.0, eta_s=None, finished=None, lost_servers=(),
            )
        )  # fmt: skip

        class Handler(http.server.BaseHTTPRequestHandler):
            def respond(self, body: Any, status: int = 200) -> None:
                self.send_response(status)
                self.end_headers()
                if status == 200:
                    self.wfile.write(json.dumps(body).encode())

            def do_GET(self) -> None:
                self.respond({**status, "lost_servers": head_node.lost})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                controller.joined.append((body["name"], body["url"]))
                self.respond({}, 204 if body["name"] in head_node.slow else 200)

            def do_DELETE(self) -> None:
                name = self.path.removeprefix("/servers/")
                controller.left.append((name, head_node.on_leave(name)))
                self.respond({})

            def log_message(self, *_: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
