"""What a node was told, and what it makes of it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto import mock_aws

from areal_core.errors import ConfigError, StorageError
from flows import machine, node
from flows.machine import secret_values

TOLD: dict[str, Any] = {
    "run": "run-1",
    "role": "generation",
    "region": "us-east-1",
    "expires_at": "2037-01-31T12:00:00Z",
    "prefect": {"api_url": "http://10.0.0.1:4200/api", "work_pool": "areal-nodes", "work_queue": "run-1-generation"},
    "environment": {"MLFLOW_TRACKING_USERNAME": "admin"},
    "secrets": {},
}


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., node.Node]:
    def tell(**changes: Any) -> node.Node:
        path = tmp_path / "node.json"
        path.write_text(json.dumps(TOLD | changes))
        monkeypatch.setattr(sys, "argv", ["node.py", str(path)])
        return machine.told(node.Node)

    return tell


@pytest.fixture
def parameters(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "emulated")
    with mock_aws():
        yield boto3.client("ssm", region_name="us-east-1")


def test_secrets_are_read_although_one_request_may_not_name_all(
    told: Callable[..., node.Node], parameters: Any
) -> None:
    secrets = {f"SECRET_{number}": f"/areal/{number}" for number in range(23)}
    for variable, name in secrets.items():
        parameters.put_parameter(Name=name, Value=f"value of {variable}", Type="SecureString")
    read = told(secrets=secrets)
    assert secret_values(read.region, read.secrets) == {variable: f"value of {variable}" for variable in secrets}
    with pytest.raises(ConfigError, match=r"^secrets: there is no parameter /areal/b in us-east-1$"):
        secret_values(read.region, secrets | {"B": "/areal/b"})


def test_a_parameter_store_that_does_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "emulated")
    with pytest.raises(StorageError, match="secrets: Could not connect"):
        secret_values("us-east-1", {"A": "/areal/a"})


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"prefect": {"api_url": "http://10.0.0.1:4200/api"}}, "missing required field `work_pool` - at `$.prefect`"),
        ({"rolle": "trainer"}, "unknown field `rolle`"),
    ],
)
def test_what_was_told_wrongly(told: Callable[..., node.Node], changes: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=r"node\.json: Object ") as refused:
        told(**changes)
    assert line in str(refused.value)


def test_it_becomes_the_worker_of_its_queue(told: Callable[..., node.Node], monkeypatch: pytest.MonkeyPatch) -> None:
    became: list[Any] = []
    monkeypatch.setattr(os, "execve", lambda *arguments: became.extend(arguments))
    node.worker(told(), {"PREFECT_API_AUTH_STRING": "planted"})
    program, argv, environment = became
    assert program == sys.executable
    assert "planted" not in " ".join(argv)  # which everybody on the machine can read
    options = dict(zip(argv[5::2], argv[6::2], strict=True))
    assert (options["--pool"], options["--work-queue"]) == ("areal-nodes", "run-1-generation")
    assert environment["PREFECT_API_URL"] == "http://10.0.0.1:4200/api"
    assert environment["PREFECT_API_AUTH_STRING"] == "planted"
    assert environment["MLFLOW_TRACKING_USERNAME"] == "admin"


def test_a_wrong_file_costs_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["node", str(tmp_path / "none.json")])
    assert node.main() == 2
    assert capsys.readouterr().err.startswith(f"areal: error: {tmp_path}/none.json: ")
