"""Machines boot: a node runs what terraform has given it, and its worker comes to a real server."""

from __future__ import annotations

import base64
import os
import re
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prefect.client.orchestration import SyncPrefectClient

from flows.control import Control
from flows.places import FILES
from flows.provision.nodes import Nodes
from tests.emulated_cloud import EmulatedCloud
from tests.support.cloud import MLFLOW_SECRET, PARAMETER, POOL, RUN, SECRET, Cloud, tags_of
from tests.support.processes import wait_for
from tests.support.terraform import Root

pytestmark = pytest.mark.cloud


@pytest.fixture(autouse=True)
def _machines_boot(cloud: EmulatedCloud) -> Iterator[None]:
    cloud.have_boot(True)
    yield
    cloud.have_boot(False)


def booted(cloud: EmulatedCloud, old: str = "", new: str = "") -> str:
    """An instance that boots with what a node that generates is given, with one word for another."""
    return cloud.boot(cloud.user_data("generation").replace(old, new))


def test_its_worker_comes_and_its_end_is_set(nodes: Nodes, cloud: EmulatedCloud, prefect: SyncPrefectClient) -> None:
    instance = booted(cloud)

    def workers() -> list[str]:
        path: Any = f"/work_pools/{POOL}/workers/filter"
        return [worker["name"] for worker in prefect.request("POST", path, json={}).json()]

    wait_for(lambda: workers() == [f"{RUN}-generation-{instance}"], "the worker of the node")
    said = cloud.machine_log(instance)
    minutes = re.search(r"powers off in (\d+) minutes", said)
    assert minutes is not None
    expires = datetime.fromisoformat(nodes.variables["lease"]["expires_at"])
    assert int(minutes[1]) == pytest.approx((expires - datetime.now(UTC)).total_seconds() / 60, abs=5)
    assert SECRET not in said


@pytest.mark.parametrize(
    ("replaced", "line"),
    [
        (
            (PARAMETER, "/areal/another"),
            "areal: error: secrets: must be SSM parameters in us-east-1, which has no /areal/another",
        ),
        ((f"{FILES}/.venv", "/none/.venv"), "The image has no environment, and software.install is empty."),
    ],
)
def test_what_a_node_lacks_is_in_its_log(
    nodes: Nodes, cloud: EmulatedCloud, replaced: tuple[str, str], line: str
) -> None:
    instance = booted(cloud, *replaced)
    wait_for(lambda: line in cloud.machine_log(instance), "what the node says")
    assert "powers off in" in cloud.machine_log(instance)  # it ends all the same


def test_what_the_control_plane_s_machine_runs(control: Root, cloud: Cloud, tmp_path: Path) -> None:
    """Its commands are recorded where they would change this machine."""
    (instance,) = (
        instance
        for reservation in cloud.client("ec2").describe_instances()["Reservations"]
        for instance in reservation["Instances"]
        if tags_of(instance).get("Name") == "areal-control"
    )
    attribute = cloud.client("ec2").describe_instance_attribute(InstanceId=instance["InstanceId"], Attribute="userData")
    text = base64.b64decode(attribute["UserData"]["Value"]).decode()
    assert SECRET not in text
    assert MLFLOW_SECRET not in text
    commands = tmp_path / "bin"
    commands.mkdir()
    for name in ("apt-get", "blkid", "mount", "id", "chown", "systemctl"):
        (commands / name).write_text(f'#!/bin/sh\necho "{name} $@" >> {tmp_path}/ran\n')
        (commands / name).chmod(0o755)
    for place in ("/etc/", "/srv/areal", "/dev/disk/"):
        text = (
            text.replace(f"'{place}", f"'{tmp_path}{place}")
            .replace(f" {place}", f" {tmp_path}{place}")
            .replace(f"={place}", f"={tmp_path}{place}")
        )
    disk = tmp_path / "dev/disk/by-id"
    disk.mkdir(parents=True)
    (tmp_path / "etc/systemd/system").mkdir(parents=True)
    volume = next(line for line in text.splitlines() if line.startswith("disk=")).rpartition("/")[2]
    (disk / volume).touch()
    (tmp_path / "user-data").write_text(text)
    settings = os.environ | {"PATH": f"{commands}:{os.environ['PATH']}"}
    ran = subprocess.run(
        ["bash", str(tmp_path / "user-data")], env=settings, capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stderr
    told = msgspec.json.decode((tmp_path / "etc/areal/control.json").read_bytes(), type=Control)
    assert (told.address, told.artifacts) == (instance["PrivateIpAddress"], "s3://areal-emulated/mlflow")
    unit = (tmp_path / "etc/systemd/system/areal-control.service").read_text()
    assert f"ExecStart={FILES}/.venv/bin/python -m flows.control " in unit
    assert (tmp_path / "ran").read_text().splitlines()[-1] == "systemctl enable --now areal-control"
