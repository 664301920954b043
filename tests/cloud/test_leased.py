"""Nodes under a lease, made and ended by the real terraform on an emulated cloud: what a death leaves is put right."""

from __future__ import annotations

import json
import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from flows.places import FILES
from flows.provision import leased
from flows.provision.leased import LeasedNodes, cloud_of
from flows.provision.leases import name_of
from tests.emulated_cloud import EmulatedCloud
from tests.support.cloud import BUCKET
from tests.support.terraform import Root, control_state, terraform_on

pytestmark = [pytest.mark.cloud, pytest.mark.nightly]

RUN = "leased-0123456789ab"
STATE = f"terraform/runs/{RUN}.tfstate"


def kill_terraform() -> None:
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # some end meanwhile
            if process.name() == "terraform":
                process.send_signal(signal.SIGKILL)


def test_a_terraform_that_is_killed_half_way_is_put_right_and_nodes_that_are_gone_are_ended(
    cloud: EmulatedCloud, infra: Path, control: Root, tmp_path: Path
) -> None:
    request = {
        "run": RUN,
        "nodes": {"trainer": {"count": 1, "gpu": "none", "gpus": 0}},
        "lease": {"owner": "somebody@example.org", "expires_at": "2037-01-31T12:00:00Z"},
        "prefect": {"api_url": "http://10.64.0.9:4200/api", "work_pool": "areal-nodes"},
        "software": {"path": str(FILES)},
        "image": cloud.image(),
    }
    said: list[str] = []
    creating = 'aws_instance.node["trainer-0"]: Creating...'

    def log(line: str) -> None:
        said.append(line)
        if line.endswith(creating) and sum(each.endswith(creating) for each in said) == 1:
            while not cloud.instances(RUN):  # terraform waits until it runs, before it notes it
                time.sleep(0.05)
            kill_terraform()

    state = control_state(infra, tmp_path)
    with terraform_on(cloud, infra) as patched:
        patched.setattr(leased, "_PAUSE_S", 0.5)
        with LeasedNodes(request, state, log=log) as nodes:
            (host,) = nodes.make()
            assert any(line.startswith(f"run {RUN}: removing the state lock of a dead terraform") for line in said)
            found = cloud_of(nodes.request["foundation"])
            found.end(found.found(RUN), lambda: None)  # somebody else does so, of what came too late for an answer, too
            nodes.end()
    store = cloud.client("s3")
    assert json.loads(store.get_object(Bucket=BUCKET, Key=STATE)["Body"].read())["resources"] == []
    assert store.get_object(Bucket=BUCKET, Key=name_of(RUN))["Body"].read() == b""
    assert cloud.left(RUN) == {}
    started = {start.instance for start in cloud.starts if start.run == RUN}
    assert len(started - {host.id}) == 1
