"""What a node was told, and what it makes of it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto import mock_aws

from areal_core.errors import ConfigError
from areal_core.run.command import run_command
from flows import node
from flows.machine import secret_values

TOLD: dict[str, Any] = {
    "run": "run-1",
    "role": "generation",
    "region": "us-east-1",
    "prefect": {"api_url": "http://10.0.0.1:4200/api", "work_pool": "areal-nodes", "work_queue": "run-1-generation"},
    "environment": {"MLFLOW_TRACKING_USERNAME": "admin"},
    "secrets": {"PREFECT_API_AUTH_STRING": "/areal/0"},
}
SECRETS = {f"SECRET_{number}": f"/areal/{number}" for number in range(23)}  # one request may not name all


@pytest.fixture(autouse=True)
def parameters(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "emulated")
    with mock_aws():
        store = boto3.client("ssm", region_name="us-east-1")
        for variable, name in SECRETS.items():
            store.put_parameter(Name=name, Value=f"value of {variable}", Type="SecureString")
        yield


def test_every_secret_is_read_and_absent_ones_are_named() -> None:
    assert secret_values("us-east-1", SECRETS) == {variable: f"value of {variable}" for variable in SECRETS}
    with pytest.raises(ConfigError, match=r"^secrets: there is no parameter /areal/b in us-east-1$"):
        secret_values("us-east-1", SECRETS | {"B": "/areal/b"})


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"prefect": {"api_url": "u"}}, "Object missing required field `work_pool` - at `$.prefect`"),
        ({"rolle": "trainer"}, "Object contains unknown field `rolle`"),
    ],
)
def test_wrong_file_costs_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, changes: dict[str, Any], line: str
) -> None:
    (tmp_path / "node.json").write_text(json.dumps(TOLD | changes))
    monkeypatch.setattr(sys, "argv", ["node", str(tmp_path / "node.json")])
    assert run_command(node.worker) == 2
    assert capsys.readouterr().err == f"areal: error: {tmp_path}/node.json: {line}\n"


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
