"""Tracking against a real MLflow server on SQLite, which is killed and started again while a run is forwarded; and
registered models: one version a run, and the alias of the best one."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from areal_core.config.schema import load
from areal_core.errors import TrackingError
from areal_core.storage.rundir import RunDir, RunInfo
from areal_core.tracking.forwarder import Forwarder
from areal_core.tracking.mlflow_client import register, start_run
from areal_core.tracking.outbox import Outbox
from areal_core.types import MetricRow
from flows.stack import responds
from tests.support.processes import Daemon, free_port, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.end_to_end]


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

    def __init__(self, folder: Path, uri: str, run_id: str, *, flush_timeout_s: float = 60.0) -> None:
        config = load({"state_dir": str(folder), "tracking": {"flush_timeout_s": flush_timeout_s}})
        info = RunInfo(run_id="r1", model_path="", checkpoint_url="", tracking_uri=uri, tracking_run_id=run_id)
        self.folder = RunDir.create(config, info)
        self.outbox = Outbox(self.folder.outbox, "r1")
        self.command = ["-m", "areal_core.tracking", "--run-dir", str(self.folder.root)]

    def forward(self, **environment: str) -> subprocess.Popen[str]:
        command = [sys.executable, *self.command]
        return subprocess.Popen(command, env={**os.environ, **environment}, stderr=subprocess.PIPE, text=True)

    def forward_here(self) -> bool:
        """What a forwarding process does, in this one, which has imported MLflow; whether it came to the end."""
        info, outbox = self.folder.info(), Outbox(self.folder.outbox, "r1")
        assert info.tracking_uri is not None
        assert info.tracking_run_id is not None
        with closing(outbox):
            return Forwarder(outbox, info.tracking_uri, info.tracking_run_id).run(threading.Event().wait)

    def log(self, steps: range) -> None:
        for step in steps:
            self.outbox.log(
                MetricRow(key=key, step=step, value=step / 7, time_s=1.7e9 + step) for key in ("reward", "loss/policy")
            )


@pytest.fixture
def run(server: Server, tmp_path: Path) -> Run:
    return Run(tmp_path, server.uri, start_run(server.uri, "areal", "test", {}, {}))


def tracking_id(run: Run) -> str:
    run_id = run.folder.info().tracking_run_id
    assert run_id is not None
    return run_id


def expected(steps: range) -> list[tuple[str, int, float, int]]:
    return [(key, step, step / 7, int((1.7e9 + step) * 1000)) for key in ("loss/policy", "reward") for step in steps]


@pytest.mark.recovery
def test_no_gap_and_no_double_over_a_killed_server(server: Server, run: Run) -> None:
    forwarder = run.forward()
    run.log(range(3000))
    wait_for(lambda: len(server.held(tracking_id(run))) > 0, "the first points")
    server.kill()  # most likely while a batch is stored
    run.log(range(3000, 3500))
    time.sleep(1.0)  # some attempts fail
    assert forwarder.poll() is None
    server.start()
    run.log(range(3500, 4000))
    run.outbox.end("FINISHED")

    _, log = forwarder.communicate(timeout=240)

    assert forwarder.returncode == 0, log
    assert server.held(tracking_id(run)) == expected(range(4000))
    assert "points wait" in log
    assert "responds again" in log


def test_no_gap_and_no_double_over_a_killed_forwarder(server: Server, run: Run) -> None:
    run.log(range(3000))
    forwarder = run.forward()
    wait_for(lambda: len(server.held(tracking_id(run))) > 0, "the first points")
    forwarder.kill()
    forwarder.communicate()
    run.outbox.end("FINISHED")

    assert run.forward_here()
    assert server.held(tracking_id(run)) == expected(range(3000))


def test_forwarder_that_is_told_to_end_marks_the_run_killed(run: Run, client: MlflowClient) -> None:
    run.log(range(5))
    forwarder = run.forward(MLFLOW_RUN_ID="0" * 32, MLFLOW_TRACKING_URI="http://127.0.0.1:1")  # must not interfere
    wait_for(lambda: run.outbox.unsent() == 0, "the points")
    run.log(range(5, 10))
    forwarder.terminate()

    _, log = forwarder.communicate(timeout=240)

    assert forwarder.returncode == 143, log
    assert client.get_run(tracking_id(run)).info.status == "KILLED"
    assert len(client.get_metric_history(tracking_id(run), "reward")) == 10

    run.outbox.end("FAILED")  # another forwarder takes over
    assert run.forward_here()
    assert client.get_run(tracking_id(run)).info.status == "FAILED"


def test_documents_are_shown(
    server: Server, run: Run, client: MlflowClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.outbox.document(
        "trajectories", 10, {"rows": [{"reward": 1.0, "completion": "1-1=0;#0"}, {"reward": 0.0, "completion": ""}]}
    )
    run.outbox.document("staleness_histogram", 10, {"counts": {"0": 6000, "1": 2500, "2": 300}})
    run.outbox.document("summary", 35, {"accuracy_before": 0.2, "accuracy_after": 0.8, "reason": "steps"})
    run.outbox.end("FINISHED")
    assert run.forward_here()

    run_id = tracking_id(run)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)  # load_table asks the global client
    table = client.load_table(client.get_run(run_id).info.experiment_id, "trajectories/step-000010.json", [run_id])
    assert table.to_dict("list") == {"reward": [1.0, 0.0], "completion": ["1-1=0;#0", ""]}
    picture = Path(client.download_artifacts(run_id, "staleness/step-000010.png", str(tmp_path)))
    assert picture.read_bytes().startswith(b"\x89PNG")
    summary = Path(client.download_artifacts(run_id, "summary.json", str(tmp_path)))
    assert json.loads(summary.read_text())["reason"] == "steps"
    data = client.get_run(run_id).data
    assert data.metrics == {"final/accuracy_before": 0.2, "final/accuracy_after": 0.8}


def test_database_behind_a_server_is_refused(server: Server) -> None:
    start_run(server.uri, "areal", "x", {}, {})

    with pytest.raises(TrackingError, match=r"^tracking\.uri: the artifacts of 'areal' belong to an MLflow server"):
        start_run(f"sqlite:///{server.folder}/mlflow.db", "areal", "x", {}, {})


def test_what_is_longer_than_mlflow_takes_is_cut_with_a_mark(server: Server, client: MlflowClient) -> None:
    names = ["n" * 300 + end for end in "ab"]
    params = dict.fromkeys(names, "p" * 7000)
    run_id = start_run(server.uri, "areal", "r" * 300, dict.fromkeys(names, "t" * 9000), params)

    run = client.get_run(run_id)
    for found, value in ((run.data.params, "p"), ({k: v for k, v in run.data.tags.items() if k[0] == "n"}, "t")):
        assert [(len(name), name[239:242]) for name in found] == [(250, "...")] * 2
        assert all(text.startswith(value * 4000) and text.endswith("...") for text in found.values())
    assert run.info.run_name == "r" * 247 + "..."


# -- registered models -------------------------------------------------------------------------------------------------


def registered_model(run: str, accuracy: float, held_out: str = "a", name: str = "areal-m") -> dict[str, Any]:
    url = f"s3://bucket/runs/{run}/best"
    return {"name": name, "url": url, "run": run, "version": 5, "accuracy": accuracy, "held_out": held_out}


def test_the_best_version_of_comparable_runs_has_the_alias(server: Server, client: MlflowClient) -> None:
    runs = {name: start_run(server.uri, "e", name, {}, {}) for name in ("first", "worse", "better", "other")}

    def registered(name: str, accuracy: float, held_out: str = "a") -> str:
        register(client, runs[name], registered_model(name, accuracy, held_out))
        register(client, runs[name], registered_model(name, accuracy, held_out))  # again, as after a failure
        return client.get_model_version_by_alias("areal-m", "best").run_id

    assert registered("first", 0.5) == runs["first"]
    assert registered("worse", 0.4) == runs["first"]
    assert registered("better", 0.6) == runs["better"]
    assert registered("other", 0.1, held_out="b") == runs["other"]  # other prompts: nothing to compare with
    versions = client.search_model_versions("name='areal-m'")
    assert sorted(version.run_id for version in versions) == sorted(runs.values())
    (first,) = [version for version in versions if version.run_id == runs["first"]]
    assert first.source == "s3://bucket/runs/first/best"
    assert first.tags["areal.version"] == "5"
    assert "held-out accuracy 0.500" in first.description


def test_a_model_in_a_folder_is_named_by_a_tag(server: Server, client: MlflowClient, tmp_path: Path) -> None:
    run_id = start_run(server.uri, "e", "local", {}, {})
    register(client, run_id, {**registered_model("local", 0.5, name="areal-local"), "url": str(tmp_path)})
    (version,) = client.search_model_versions("name='areal-local'")
    assert (version.source, version.tags["areal.url"]) == (f"runs:/{run_id}/summary.json", str(tmp_path))
