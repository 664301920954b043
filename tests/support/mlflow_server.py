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
from pathlib import Path

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
