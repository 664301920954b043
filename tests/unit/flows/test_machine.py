"""What a machine of a cloud was told, what it makes of it, and what is found wrong with it."""

from __future__ import annotations

import json
import os
import queue
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import boto3
import pytest
from moto import mock_aws

from areal_core.config.groups import NodesConfig
from areal_core.errors import ConfigError
from areal_core.run.command import run_command
from flows import control, machine, node
from flows.machine import secret_values


class Server(ThreadingHTTPServer):
    """Of the cloud's metadata."""

    reclaimed = False


@pytest.fixture
def server() -> Iterator[Server]:
    class Handler(BaseHTTPRequestHandler):
        def answer(self, status: int, body: bytes = b"") -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_PUT(self) -> None:
            self.answer(200 if "X-aws-ec2-metadata-token-ttl-seconds" in self.headers else 400, b"token")

        def do_GET(self) -> None:
            if self.headers["X-aws-ec2-metadata-token"] != "token":
                self.answer(401)
            elif served.reclaimed and self.path == "/latest/meta-data/spot/instance-action":
                self.answer(200, b'{"action":\n "terminate"}')
            else:
                self.answer(404)

        def log_message(self, format: str, *args: object) -> None: ...

    served = Server(("127.0.0.1", 0), Handler)
    Thread(target=served.serve_forever, daemon=True).start()
    yield served
    served.shutdown()
    served.server_close()


@pytest.mark.parametrize(
    ("found", "line"),
    [
        (None, "no driver: nvidia-smi can't be asked"),
        ("H100, 570.1\n" * 7, "7 GPUs, should be 8: H100, 570.1; "),
        ("H100, 570.1\n" * 8, None),
    ],
)
def test_gpus_that_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: str | None, line: str | None
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/none")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    if found is not None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\nprintf '{found}'\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    assert machine.gpu_trouble(NodesConfig(gpus=0, gpu="none")) is None
    said = machine.gpu_trouble(NodesConfig())
    assert (said or "").startswith(line) if line else said is None


def test_a_notice_is_heeded(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_METADATA", f"http://127.0.0.1:{server.server_port}/latest")
    monkeypatch.setattr(machine, "_LOOK_S", 0.01)
    said: list[str] = []
    heeded: queue.SimpleQueue[str] = queue.SimpleQueue()
    with machine.Notice(said.append) as looked:
        looked.heed(heeded.put)
        assert looked.text is None
        server.reclaimed = True
        assert heeded.get(timeout=20.0) == '{"action": "terminate"}' == looked.text
    assert said == ['this node is to be reclaimed: {"action": "terminate"}']


TOLD: dict[str, Any] = {
    "run": "run-1",
    "role": "generation",
    "region": "us-east-1",
    "prefect": {"api_url": "http://10.0.0.1:4200/api", "work_pool": "areal-nodes", "work_queue": "run-1-generation"},
    "environment": {"MLFLOW_TRACKING_USERNAME": "admin"},
    "secrets": {"PREFECT_API_AUTH_STRING": "/areal/0"},
}
SECRETS = {f"SECRET_{number}": f"/areal/{number}" for number in range(23)}  # one request may not name all


@pytest.fixture
def parameters(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "emulated")
    with mock_aws():
        store = boto3.client("ssm", region_name="us-east-1")
        for variable, name in SECRETS.items():
            store.put_parameter(Name=name, Value=f"value of {variable}", Type="SecureString")
        yield


@pytest.mark.usefixtures("parameters")
def test_every_secret_is_read_and_absent_ones_are_named() -> None:
    assert secret_values("us-east-1", SECRETS) == {variable: f"value of {variable}" for variable in SECRETS}
    with pytest.raises(ConfigError, match=r"^secrets: there is no parameter /areal/b in us-east-1$"):
        secret_values("us-east-1", SECRETS | {"B": "/areal/b"})


def test_wrong_file_costs_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    (tmp_path / "node.json").write_text(json.dumps(TOLD | {"rolle": "trainer"}))
    monkeypatch.setattr(sys, "argv", ["node", str(tmp_path / "node.json")])
    assert run_command(node.worker) == 2
    assert capsys.readouterr().err == f"areal: error: {tmp_path}/node.json: Object contains unknown field `rolle`\n"


@pytest.mark.usefixtures("parameters")
def test_node_becomes_the_worker_of_its_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    became: list[Any] = []
    (tmp_path / "node.json").write_text(json.dumps(TOLD))
    monkeypatch.setattr(sys, "argv", ["node", str(tmp_path / "node.json")])
    monkeypatch.setattr(os, "execve", lambda *arguments: became.extend(arguments))
    monkeypatch.setattr(node, "identity", lambda: "i-0")
    node.worker()
    program, argv, environment = became
    assert program == sys.executable
    assert "value of" not in " ".join(argv)  # which everybody on the machine can read
    options = dict(zip(argv[5::2], argv[6::2], strict=True))
    assert (options["--pool"], options["--work-queue"]) == ("areal-nodes", "run-1-generation")
    assert options["--name"] == "run-1-generation-i-0"
    assert environment["PREFECT_API_URL"] == "http://10.0.0.1:4200/api"
    assert environment["PREFECT_API_AUTH_STRING"] == "value of SECRET_0"
    assert environment["MLFLOW_TRACKING_USERNAME"] == "admin"


def test_a_password_that_mlflow_would_refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "secret_values", lambda *_: {"prefect": "a:b", "mlflow": "planted"})
    told = control.Control(str(tmp_path), str(tmp_path), "s3://b", "us-east-1", "/areal/prefect", "/areal/mlflow")
    monkeypatch.setattr(control, "told", lambda kind: told)
    monkeypatch.setenv(control.MARK, "")
    with pytest.raises(ConfigError, match=r"^/areal/mlflow: must have 12 characters at least$"):
        control.serve()
    assert list(tmp_path.iterdir()) == []
