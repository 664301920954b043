"""What a configuration asks of nodes, and becomes on them."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from areal_core.config.schema import RunConfig
from areal_core.errors import ConfigError
from flows.compose import configure
from flows.provision.request import overrides, queue, servers_per_node, variables

NOW = datetime(2030, 1, 31, 12, tzinfo=UTC)
CONTROL: dict[str, Any] = {
    "foundation": {"region": "us-east-1", "bucket": "b", "vpc_id": "vpc-1", "subnets": {}},
    "prefect_api_url": "http://10.64.0.10:4200/api",
    "mlflow_url": "http://10.64.0.10:5000",
}
CLOUD = ("provision=aws", "provision.image=ami-1", "provision.owner=you@example.org")
CPU = tuple(f"provision.{role}.{field}" for role in ("generation", "trainer") for field in ("gpu=none", "gpus=0"))


def config(*more: str, experiment: str = "cpu-async") -> RunConfig:
    return configure(experiment, overrides=[*CLOUD, *more])


def on_nodes(*more: str, experiment: str = "cpu-async") -> RunConfig:
    given = config(*more, experiment=experiment)
    return configure(experiment, overrides=[*CLOUD, *more, *overrides(given, CONTROL)])


def test_the_variables_of_the_root_module(tmp_path: Path) -> None:
    script = tmp_path / "install.sh"
    script.write_text("pip install it\n")
    asked = config(
        *("provision.generation.count=2", "provision.generation.spot=true", "provision.generation.max_price=40"),
        *("provision.hours=3", f"provision.install={script}", "provision.environment='A=1 B=\"two words\"'"),
        "provision.secrets='PREFECT_API_AUTH_STRING=/areal/prefect-auth'",
    )
    assert variables(asked, "run-1", CONTROL, NOW) == {
        "run": "run-1",
        "nodes": {
            "generation": {"count": 2, "gpu": "h100", "gpus": 8, "spot": True, "max_price": 40.0, "disk_gib": 200},
            "trainer": {"count": 1, "gpu": "h100", "gpus": 8, "spot": False, "max_price": None, "disk_gib": 200},
        },
        "lease": {"owner": "you@example.org", "expires_at": "2030-01-31T15:00:00Z"},
        "prefect": {"api_url": "http://10.64.0.10:4200/api", "work_pool": "areal-nodes"},
        "environment": {"A": "1", "B": "two words", "MLFLOW_TRACKING_URI": "http://10.64.0.10:5000"},
        "secrets": {"PREFECT_API_AUTH_STRING": "/areal/prefect-auth"},
        "software": {"path": "/opt/areal", "install": "pip install it\n"},
        "image": "ami-1",
    }


def test_run_without_gpus_on_nodes() -> None:
    became = on_nodes(*CPU, "provision.generation.count=3")
    assert became.launch.remote_roles == "generation"
    assert (became.generation_servers, servers_per_node(became)) == (3, 1)
    assert became.storage.url == "s3://b"
    assert on_nodes("storage=s3", "storage.url=s3://mine/here").storage.url == "s3://mine/here"
    alone = "provision.generation.count=0"
    assert [*variables(config(alone), "run-1", CONTROL, NOW)["nodes"]] == ["trainer"]
    assert on_nodes(alone).launch.remote_roles == "none"
    assert queue(config(), "run-1", "trainer") == "run-1-trainer"
    assert queue(configure(overrides=["provision=static"]), "run-1", "trainer") == "trainer"


def test_gpus_of_nodes_are_servers_and_ranks() -> None:
    became = on_nodes(
        *("devices=gpus", "launch.device_memory_gib=80", "generation=vllm"),
        *("generation.vllm.tensor_parallel=4", "provision.generation.count=3", "provision.trainer.count=2"),
        *("training.engine=deepspeed", "rollout.batch_size=256", "algorithm.group_size=4"),
    )
    assert became.launch.remote_roles == "both"
    assert (became.generation_servers, servers_per_node(became)) == (6, 2)
    assert (became.training.hosts, became.training_ranks) == (2, 16)
    assert (became.launch.devices, became.launch.devices_per_host) == (40, 8)


def test_what_only_control_or_a_file_can_tell_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^provision\.prefect_api_url: must be given, as http://HOST:4200/api"):
        variables(config(), "run-1", {"foundation": CONTROL["foundation"]}, NOW)
    with pytest.raises(ConfigError, match=r"^provision\.install: can't read /none: No such file"):
        variables(config("provision.install=/none"), "run-1", CONTROL, NOW)
    with pytest.raises(ConfigError, match=r"^storage\.url: must be a store that all nodes can reach"):
        overrides(config(), {})
    with pytest.raises(ConfigError, match=r"^provision\.image: must be given"):
        configure(overrides=["provision=aws"])


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (("provision.generation.gpu=none",), r"^provision\.generation\.gpus: must be 0 with gpu=none, got "),
        (("provision.trainer.max_price=3",), r"^provision\.trainer\.max_price: must be null without spot=true"),
        (("provision.trainer.count=0",), r"^provision\.trainer\.count: must be at least 1"),
        (("provision.budget=100",), r"^provision\.generation\.price: must be set with provision\.budget"),
        (
            ("provision.environment='A-B=1'",),
            r"^provision\.environment: names must be letters, digits and underscores, got 'A-B'",
        ),
    ],
)
def test_what_is_wrong_is_named(more: tuple[str, ...], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        config(*more)
