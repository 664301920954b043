"""Tracking against a real MLflow server on SQLite, which is killed and started again while a run is forwarded."""

import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from mlflow import MlflowClient

from areal_core.config.schema import load
from areal_core.storage.rundir import RunDir, RunInfo
from areal_core.tracking.mlflow_client import start_run
from areal_core.tracking.outbox import Outbox
from areal_core.types import MetricRow
from flows.stack import responds
from tests.support.processes import Daemon, free_port, wait_for

pytestmark = pytest.mark.slow


class Server(Daemon):
    """`mlflow server` on a port of its own; its database outlives it."""

    def __init__(self, folder: Path) -> None:
        port = str(free_port())
        self.uri = f"http://127.0.0.1:{port}"
        self.folder = folder
        command = ["mlflow", "server", "--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--workers", "1"]
        command += ["--artifacts-destination", str(folder / "artifacts"), "--host", "127.0.0.1", "--port", port]
        settings = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        super().__init__(folder / "server.log", command, os.environ | settings)

    def start(self) -> None:
        super().start()
        wait_for(lambda: responds(f"{self.uri}/health"), f"the MLflow server; its log: {self.log}")

    def held(self, run_id: str) -> list[tuple[str, int, float, int]]:
        """Every stored point, straight from the database: doubles would show. Key, step, value, time in ms."""
        with closing(sqlite3.connect(f"file:{self.folder}/mlflow.db?mode=ro", uri=True)) as database:
            query = "SELECT key, step, value, timestamp FROM metrics WHERE run_uuid = ? ORDER BY key, step"
            return database.execute(query, (run_id,)).fetchall()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("mlflow"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def client(server: Server) -> MlflowClient:
    return MlflowClient(server.uri)


class Run:
    """A run's folder, its outbox and its forwarding process."""

    def __init__(self, folder: Path, uri: str, run_id: str) -> None:
        self.tracking_id = run_id
        config = load({"state_dir": str(folder)})
        info = RunInfo(run_id="r1", model_path="", checkpoint_url="", tracking_uri=uri, tracking_run_id=run_id)
        self.folder = RunDir.create(config, info)
        self.outbox = Outbox(self.folder.outbox, "r1")
        self.command = ["-m", "areal_core.tracking", "--run-dir", str(self.folder.root)]

    def forward(self, **environment: str) -> subprocess.Popen[str]:
        command = [sys.executable, *self.command]
        return subprocess.Popen(command, env={**os.environ, **environment}, stderr=subprocess.PIPE, text=True)

    def log(self, steps: range) -> None:
        for step in steps:
            self.outbox.log(
                MetricRow(key=key, step=step, value=step / 7, time_s=1.7e9 + step) for key in ("reward", "loss/policy")
            )


@pytest.fixture
def run(server: Server, tmp_path: Path) -> Run:
    return Run(tmp_path, server.uri, start_run(server.uri, "areal", "test", {}, {}))


def expected(steps: range) -> list[tuple[str, int, float, int]]:
    return [(key, step, step / 7, int((1.7e9 + step) * 1000)) for key in ("loss/policy", "reward") for step in steps]


@pytest.mark.recovery
def test_no_gap_and_no_double_over_a_killed_server(server: Server, run: Run) -> None:
    forwarder = run.forward()
    run.log(range(3000))
    wait_for(lambda: len(server.held(run.tracking_id)) > 0, "the first points")
    server.kill()  # most likely while a batch is stored
    run.log(range(3000, 3500))
    time.sleep(1.0)  # some attempts fail
    assert forwarder.poll() is None
    server.start()
    run.log(range(3500, 4000))
    run.outbox.end("FINISHED")

    _, log = forwarder.communicate(timeout=240)

    assert forwarder.returncode == 0, log
    assert server.held(run.tracking_id) == expected(range(4000))
    assert "metrics are queued" in log
    assert "responds again" in log


def test_forwarder_that_is_told_to_end_marks_the_run_killed(run: Run, client: MlflowClient) -> None:
    run.log(range(5))
    forwarder = run.forward(MLFLOW_RUN_ID="0" * 32, MLFLOW_TRACKING_URI="http://127.0.0.1:1")  # must not interfere
    wait_for(lambda: run.outbox.unsent() == 0, "the points")
    run.log(range(5, 10))
    forwarder.terminate()

    _, log = forwarder.communicate(timeout=240)

    assert forwarder.returncode == 143, log
    assert client.get_run(run.tracking_id).info.status == "KILLED"
    assert len(client.get_metric_history(run.tracking_id, "reward")) == 10


def test_what_is_longer_than_mlflow_takes_is_cut_with_a_mark(server: Server, client: MlflowClient) -> None:
    names = ["n" * 300 + end for end in "ab"]
    params = dict.fromkeys(names, "p" * 7000)
    run_id = start_run(server.uri, "areal", "r" * 300, dict.fromkeys(names, "t" * 9000), params)

    run = client.get_run(run_id)
    for found, value in ((run.data.params, "p"), ({k: v for k, v in run.data.tags.items() if k[0] == "n"}, "t")):
        assert [(len(name), name[239:242]) for name in found] == [(250, "...")] * 2
        assert all(text.startswith(value * 4000) and text.endswith("...") for text in found.values())
    assert run.info.run_name == "r" * 247 + "..."
