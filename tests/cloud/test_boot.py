"""Machines boot: what terraform has given them to run is run on this one. A node's worker comes to a real server."""

from __future__ import annotations

import base64
import os
import signal
import subprocess
import time
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import Worker

from flows.control import Control
from flows.provision.nodes import Nodes
from flows.stack import ROOT
from tests.support.cloud import MLFLOW_SECRET, PARAMETER, POOL, RUN, SECRET, Cloud
from tests.support.terraform import CREDENTIALS, Root

pytestmark = [pytest.mark.cloud, pytest.mark.slow]

_TIMEOUT_S = 240.0


class Node:
    """A context: the processes of one machine that boots."""

    def __init__(self, user_data: str, cloud: Cloud, folder: Path) -> None:
        (folder / "bin").mkdir()
        shutdown = folder / "bin" / "shutdown"
        shutdown.write_text(f'#!/bin/sh\necho "$@" > {folder}/shutdown\n')
        shutdown.chmod(0o755)
        # This machine is not a node: it has a folder of its own, and no unit is asked of its systemd.
        text = user_data
        for place in ("/etc/areal", "/var/lib/cloud", "/run/systemd/system"):
            text = text.replace(place, f"{folder}{place}")
        (folder / "user-data").write_text(text)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "AWS_"))}
        settings = CREDENTIALS | {"AWS_ENDPOINT_URL": cloud.endpoint, "PREFECT_HOME": str(folder / "prefect")}
        settings["PATH"] = f"{folder / 'bin'}:{os.environ['PATH']}"
        self.folder = folder
        self._log = (folder / "log").open("w+")
        self._process = subprocess.Popen(
            ["bash", str(folder / "user-data")],
            env=kept | settings,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)
            self._process.wait(_TIMEOUT_S)
        self._log.close()

    def ended(self) -> int:
        return self._process.wait(_TIMEOUT_S)

    def output(self) -> str:
        return (self.folder / "log").read_text()

    def environment(self) -> dict[str, str]:
        pairs = Path(f"/proc/{self._process.pid}/environ").read_bytes().decode().split("\0")
        return dict(pair.split("=", 1) for pair in pairs if pair)

    def worker(self, prefect: SyncPrefectClient) -> Worker:
        deadline = time.monotonic() + _TIMEOUT_S
        while not (workers := prefect.request("POST", f"/work_pools/{POOL}/workers/filter", json={}).json()):
            assert self._process.poll() is None, self.output()
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.2)
        (worker,) = workers
        return Worker.model_validate(worker)


def test_its_worker_comes_and_its_end_is_set(
    nodes: Nodes, cloud: Cloud, prefect: SyncPrefectClient, tmp_path: Path
) -> None:
    with Node(cloud.user_data("generation"), cloud, tmp_path) as node:
        worker = node.worker(prefect)
        assert worker.name.startswith(f"{RUN}-generation-")
        assert worker.status == "ONLINE"
        assert node.environment()["PREFECT_API_AUTH_STRING"] == SECRET
    power_off, after, *_ = (tmp_path / "shutdown").read_text().split()
    assert power_off == "-P"
    expires = datetime.fromisoformat(nodes.variables["lease"]["expires_at"])
    assert int(after) == pytest.approx((expires - datetime.now(UTC)).total_seconds() / 60, abs=5)
    assert SECRET not in node.output()
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and SECRET in path.read_text(errors="replace")]


def test_a_secret_that_there_is_not(nodes: Nodes, cloud: Cloud, tmp_path: Path) -> None:
    told = cloud.user_data("generation").replace(PARAMETER, "/areal/another")
    with Node(told, cloud, tmp_path) as node:
        assert node.ended() == 2
        assert "areal: error: secrets: there is no parameter /areal/another in us-east-1" in node.output()
    assert (tmp_path / "shutdown").exists()  # it ends all the same


def test_an_image_without_the_environment(nodes: Nodes, cloud: Cloud, tmp_path: Path) -> None:
    told = cloud.user_data("generation").replace(f"{os.getcwd()}/.venv", f"{tmp_path}/none/.venv")
    with Node(told, cloud, tmp_path) as node:
        assert node.ended() == 1
        assert "The image has no environment, and software.install is empty." in node.output()


def test_what_the_control_plane_s_machine_runs(control: Root, cloud: Cloud, tmp_path: Path) -> None:
    """Its commands are recorded where they would change this machine."""
    (instance,) = (
        instance
        for reservation in cloud.client("ec2").describe_instances()["Reservations"]
        for instance in reservation["Instances"]
        if {"Key": "Name", "Value": "areal-control"} in instance["Tags"]
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
    assert f"ExecStart={ROOT}/.venv/bin/python -m flows.control " in unit
    assert (tmp_path / "ran").read_text().splitlines()[-1] == "systemctl enable --now areal-control"
