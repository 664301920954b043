"""A real MLflow server on SQLite, and a proxy before it that loses, repeats, delays and refuses."""

from __future__ import annotations

import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Literal

PAUSE = threading.Event()  # never set: `PAUSE.wait` is the pause between two looks
_TIMEOUT_S = 240.0


def until(condition: Callable[[], bool], what: str, timeout_s: float = _TIMEOUT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}"
        PAUSE.wait(0.1)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Server:
    """`mlflow server` on a port of its own; its database outlives it."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self.folder = folder
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = ["-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{self.folder}/mlflow.db"]
        command += ["--artifacts-destination", str(self.folder / "artifacts"), "--host", "127.0.0.1"]
        command += ["--port", str(self.port), "--workers", "1"]
        environment = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, *command], env=environment, stdout=log, stderr=log, start_new_session=True
            )
        until(self.healthy, f"the MLflow server; its log: {self.folder}/server.log", 120)

    def healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.uri}/health", timeout=1) as response:
                return response.status == 200
        except OSError:
            return False

    def signal(self, signum: signal.Signals) -> None:
        """To all its processes; SIGSTOP leaves a server that takes connections and never answers."""
        assert self.process is not None
        os.killpg(self.process.pid, signum)

    def kill(self) -> None:
        if self.process is not None:
            self.signal(signal.SIGKILL)
            self.process.wait()
            self.process = None

    def held(self, run_id: str) -> list[tuple[str, int, float, int]]:
        """Every stored point, straight from the database: doubles would show. Key, step, value, time in ms."""
        with closing(sqlite3.connect(f"file:{self.folder}/mlflow.db?mode=ro", uri=True)) as database:
            query = "SELECT key, step, value, timestamp FROM metrics WHERE run_uuid = ? ORDER BY key, step"
            return database.execute(query, (run_id,)).fetchall()


# What becomes of a request: the server does not get it and the client a status of 400 or 500; the server takes it and
# the client hears nothing; the server gets it twice; the server gets it after the client has given up.
Fault = Literal["refuse", "fail", "lose", "repeat", "late"]


class Proxy:
    """Passes requests on to a server. `fault` is asked about each, by path and body. A context."""

    def __init__(self, server: Server, fault: Callable[[str, bytes], Fault | None], *, late_s: float = 0.0) -> None:
        """`late_s`: for how long a late request is held back."""
        self._server = server
        self._fault = fault
        self._late_s = late_s
        self.seen: list[Fault | None] = []
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: object) -> None: ...

            def _handle(self) -> None:
                proxy._handle(self)

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _handle  # noqa: N815 - the names that it looks for

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.uri = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever)

    def __enter__(self) -> Proxy:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()  # once all requests, the late ones too, have been passed on

    def _handle(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers.get("Content-Length", 0)))
        fault = self._fault(request.path, body)
        self.seen.append(fault)
        if fault == "refuse":
            self._respond(request, 400, b'{"error_code": "INVALID_PARAMETER_VALUE", "message": "refused"}')
            return
        if fault == "fail":
            self._respond(request, 500, b"Internal Server Error")
            return
        if fault == "late":
            PAUSE.wait(self._late_s)
        status, answer = self._forward(request, body)
        if fault == "repeat":
            status, answer = self._forward(request, body)
        if fault not in ("lose", "late"):
            self._respond(request, status, answer)

    def _forward(self, request: BaseHTTPRequestHandler, body: bytes) -> tuple[int, bytes]:
        headers = {"Content-Type": request.headers.get("Content-Type", "application/json")}
        forwarded = urllib.request.Request(
            self._server.uri + request.path, body or None, headers, method=request.command
        )
        try:
            with urllib.request.urlopen(forwarded, timeout=_TIMEOUT_S) as response:
                return response.status, response.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def _respond(self, request: BaseHTTPRequestHandler, status: int, answer: bytes) -> None:
        request.send_response(status)
        request.send_header("Content-Length", str(len(answer)))
        request.end_headers()
        request.wfile.write(answer)
