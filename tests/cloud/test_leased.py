"""Nodes under a lease, made and ended by the real terraform on an emulated cloud: what a death leaves is put right."""

from __future__ import annotations

import json
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from areal_core.errors import ProvisionError
from areal_core.storage.lease import LeaseLostError
from areal_core.storage.objects import MissingError, Storage
from flows.provision import leased, terraform
from flows.provision.leased import LeasedNodes, cloud_of
from flows.provision.leases import Leases, name_of
from flows.provision.reaper import Reaper, reaper_of
from flows.stack import ROOT
from tests.emulated_cloud import EmulatedCloud
from tests.support.cloud import BUCKET
from tests.support.terraform import CREDENTIALS, Root, mirror

pytestmark = [pytest.mark.cloud, pytest.mark.slow, pytest.mark.nightly, pytest.mark.cpu_seconds(60)]

RUN = "leased-0123456789ab"
STATE = f"terraform/runs/{RUN}.tfstate"


@pytest.fixture(scope="module")
def state(cloud: EmulatedCloud, infra: Path, control: Root, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The state folder of a machine that `control` was applied from, in the environment of this cloud."""
    folder = tmp_path_factory.mktemp("leased")
    (folder / "control").mkdir()
    shutil.copy(infra / "control" / "terraform.tfstate", folder / "control")
    environment = {"AWS_ENDPOINT_URL": cloud.endpoint, "TF_CLI_CONFIG_FILE": "/dev/null", **CREDENTIALS}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(terraform, "INFRA", infra)
        patched.setattr(leased, "_PAUSE_S", 0.5)
        for name, value in (environment | {terraform.PLUGINS: str(mirror())}).items():
            patched.setenv(name, value)
        yield folder


@pytest.fixture
def request_(cloud: EmulatedCloud) -> Iterator[dict[str, Any]]:
    """One node that trains; in the end nothing is left of it."""
    yield {
        "run": RUN,
        "nodes": {"trainer": {"count": 1, "gpu": "none", "gpus": 0}},
        "lease": {"owner": "somebody@example.org", "expires_at": "2037-01-31T12:00:00Z"},
        "prefect": {"api_url": "http://10.64.0.9:4200/api", "work_pool": "areal-nodes"},
        "software": {"path": str(ROOT)},
        "image": cloud.image(),
    }
    assert cloud.left(RUN) == {}
    assert cloud.client("s3").get_object(Bucket=BUCKET, Key=name_of(RUN))["Body"].read() == b""


def kill_terraform() -> None:
    for process in psutil.Process().children(recursive=True):
        if process.name() == "terraform":
            process.send_signal(signal.SIGKILL)


def test_a_terraform_that_is_killed_half_way_is_put_right_and_nodes_that_are_gone_are_ended(
    state: Path, request_: dict[str, Any], cloud: EmulatedCloud
) -> None:
    said: list[str] = []
    creating = 'aws_instance.node["trainer-0"]: Creating...'

    def log(line: str) -> None:
        said.append(line)
        if line.endswith(creating) and sum(each.endswith(creating) for each in said) == 1:
            while cloud.faults():  # until its request has come, which is carried out before what it needs is ended
                time.sleep(0.05)
            kill_terraform()

    cloud.fault("RunInstances", "delay", delay_s=0.5)
    with LeasedNodes(request_, state, log=log) as nodes:
        (host,) = nodes.make()
        assert any(line.startswith(f"run {RUN}: removing the lock of a terraform that has ended") for line in said)
        found = cloud_of(nodes.request["foundation"])
        found.end(found.found(RUN), lambda: None)  # somebody else does so, of what came too late for an answer, too
        nodes.end()
    assert json.loads(cloud.client("s3").get_object(Bucket=BUCKET, Key=STATE)["Body"].read())["resources"] == []
    started = {start.instance for start in cloud.starts if start.run == RUN}
    assert len(started - {host.id}) == 1


def test_a_state_that_could_not_be_stored_is_stored_by_the_next_process_and_handed_over_to_the_reaper(
    state: Path, request_: dict[str, Any], cloud: EmulatedCloud
) -> None:
    cloud.fault(f"PUT /{BUCKET}/{STATE}", "refuse", code="AccessDenied", count=None)
    with LeasedNodes(request_, state) as nodes, pytest.raises(ProvisionError, match="AccessDenied"):
        nodes.make()
    (before,) = cloud.instances(RUN).values()
    cloud.clear()
    cloud.boot_never(None)
    with LeasedNodes(request_, state, prices={"trainer": 1.0}) as nodes:
        (host,) = nodes.make()
        assert host.id == before["InstanceId"]
        nodes.hand_over()
    reaper = reaper_of(state, None, print)
    assert reaper is not None
    (reaped,) = reaper.reap()
    assert (reaped.run, reaped.owner, reaped.failed) == (RUN, "somebody@example.org", None)
    assert "1 aws_instance" in reaped.ended
    assert reaper.reap() == []


class AskedToEndError(BaseException):
    """As Prefect raises it in the main thread where the process is sent SIGTERM."""


@pytest.mark.parametrize("beside", [False, True])
def test_a_flow_that_is_asked_to_end_hands_its_nodes_over(
    state: Path, request_: dict[str, Any], cloud: EmulatedCloud, monkeypatch: pytest.MonkeyPatch, beside: bool
) -> None:
    """While terraform ends a node, in the main thread, or `beside` it, before it is tried again."""
    monkeypatch.setattr(leased, "_PAUSE_S", 600.0)
    there, line = threading.Event(), "trying again in" if beside else '["trainer-0"]: Destroying...'

    def log(said: str) -> None:
        if line in said and not there.is_set():
            there.set()
            if not beside:
                raise AskedToEndError

    def replace() -> None:
        with pytest.raises(LeaseLostError):
            nodes.replace(["trainer-0"])

    with suppress(AskedToEndError), LeasedNodes(request_, state, log=log) as nodes:
        nodes.make()
        if not beside:
            nodes.end()
        cloud.fault("RunInstances", "refuse", code="InvalidGroup.Duplicate", count=None)
        threading.Thread(target=replace, daemon=True).start()
        assert there.wait(120.0)
        raise AskedToEndError
    lease = json.loads(cloud.client("s3").get_object(Bucket=BUCKET, Key=name_of(RUN))["Body"].read())
    assert lease["held_until"] is None
    cloud.clear()
    cloud.boot_never(None)
    reaper = reaper_of(state, None, print)
    assert reaper is not None
    (reaped,) = reaper.reap()
    assert (reaped.run, reaped.failed) == (RUN, None)


def test_what_is_in_no_state_and_has_no_lease_is_swept(
    state: Path, request_: dict[str, Any], cloud: EmulatedCloud
) -> None:
    with LeasedNodes(request_, state) as nodes:
        nodes.make()
        foundation = nodes.request["foundation"]
    store = Storage.open(f"s3://{BUCKET}")
    for name in (name_of(RUN), STATE):
        store.delete(name)
    reaper = Reaper(Leases(store), state, cloud_of=cloud_of, foundation=foundation, young_s=0.0)
    (reaped,) = reaper.reap()
    assert (reaped.over_since, reaped.failed) == ("no lease", None)
    assert reaped.ended.startswith("1 aws_iam_instance_profile, 1 aws_iam_role, 1 aws_instance, 1 aws_launch_template")
    with pytest.raises(MissingError):
        store.get_bytes(STATE)
