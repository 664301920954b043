"""Runs on nodes of their own, as people start them: from Prefect's API to a bill, on an emulated cloud.

One run for all tests: two spot nodes generate, one of which is reclaimed in the middle, and one node trains; and beside
it a smaller one, which has a budget.
"""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import pytest
from prefect.client.schemas.objects import FlowRun

from flows.places import FILES
from tests.emulated_cloud import EmulatedCloud
from tests.support.cloud import BUCKET, MLFLOW_SECRET, SECRET, tags_of
from tests.support.plane import SECRETS, Plane

pytestmark = [pytest.mark.cloud, pytest.mark.nightly]

_MANY = 100_000
_LEARNS = (
    *("warmup.worked_steps=500", "warmup.direct_steps=100", "task.max_operations=4", "task.held_out=64"),
    *("training.checkpoint_every=20", "tracking.flush_timeout_s=120", "storage.lease_s=5"),
    *("launch.disk_low_gib=0.2", "launch.disk_min_gib=0.1"),
)
# Time passes there, and nothing is computed.
_LIGHT = (
    *("generation.engine=emulated", "training.engine=emulated", "emulation.speed=200", "tracking.enabled=false"),
    *("warmup.worked_steps=1", "warmup.worked_batch=1", "warmup.direct_steps=0", "storage.lease_s=5"),
    *("launch.disk_low_gib=0.2", "launch.disk_min_gib=0.1"),
)
_FRUGAL = ("provision.generation.count=1", "provision.budget=0.025")


def asked(plane: Plane, image: str) -> list[str]:
    """What a run says of its nodes here."""
    environment = {
        "MLFLOW_TRACKING_URI": plane.mlflow,
        "MLFLOW_TRACKING_USERNAME": "admin",
        "AWS_DEFAULT_REGION": "us-east-1",
        "PREFECT_WORKER_QUERY_SECONDS": "1",
        "PREFECT_WORKER_HEARTBEAT_SECONDS": "5",
    }
    return [
        *(f"provision.{role}.{field}" for role in ("generation", "trainer") for field in ("gpu=none", "gpus=0")),
        *("provision.generation.count=2", "provision.generation.spot=true", "provision.generation.max_price=0.2"),
        *("provision.trainer.price=0.4", f"provision.image={image}", f"provision.software={FILES}"),
        *("provision.owner=somebody@example.org", "provision.lease_s=60", "provision.lost_s=300"),
        *("provision.boot_s=120", f"provision.prefect_api_url={plane.api}"),
        f"provision.environment='{' '.join(f'{name}={value}' for name, value in environment.items())}'",
        f"provision.secrets='{' '.join(f'{name}={value}' for name, value in SECRETS.items())}'",
    ]


@dataclass(frozen=True)
class Ended:
    """Two runs that went on at once, when they have ended: one of which a node was reclaimed, and one with a budget."""

    run_id: str
    reclaimed: str  # instance
    nodes: dict[str, dict[str, Any]]  # instances, when the run had begun
    shares: dict[str, list[FlowRun]]
    user_data: list[str]
    artifacts: dict[str, Any]
    token: str
    other: str  # run id
    other_nodes: dict[str, dict[str, Any]]


def node_of(share: FlowRun) -> str:
    return next(tag.removeprefix("node:") for tag in share.tags if tag.startswith("node:"))


def another_one(plane: Plane, run_id: str, name: str) -> bool:
    """Whether a node has the second share of this name."""
    return any(tag.startswith("node:") for share in plane.shares(run_id)[name][1:] for tag in share.tags)


@pytest.fixture(scope="module")
def ended(plane: Plane, cloud: EmulatedCloud) -> Ended:
    flow_run = plane.train("areal/train", *_LEARNS, *asked(plane, cloud.image()), steps=_MANY)
    another = plane.train("areal/train-cloud", *_LIGHT, *asked(plane, cloud.image()), *_FRUGAL, steps=_MANY)
    run_id, other = f"cpu-async-{str(flow_run)[-12:]}", f"emulated-cpu-async-{str(another)[-12:]}"
    begun = plane.at_work(flow_run, run_id, {"trainer-0", "generation-0", "generation-1"})
    plane.at_work(another, other, {"trainer-0", "generation-0"})
    nodes, other_nodes = cloud.instances(run_id), cloud.instances(other)
    plane.until("the run trains", lambda: plane.step(flow_run) >= 2, flow_run)
    token = cloud.run_in(node_of(begun["trainer-0"]), "cat", f"{FILES}/.areal/runs/{run_id}/token").strip()
    user_data = [cloud.user_data(role, run_id) for role in ("generation", "trainer")]
    reclaimed = node_of(begun["generation-1"])
    cloud.reclaim(reclaimed, 120.0)
    plane.until("another node is there", lambda: another_one(plane, run_id, "generation-1"), flow_run)
    plane.finish(run_id)
    for each in (another, flow_run):
        plane.wait(each, "Completed")
    return Ended(
        run_id, reclaimed, nodes, plane.shares(run_id), user_data, plane.artifacts(flow_run), token, other, other_nodes
    )


def summary_of(cloud: EmulatedCloud, run_id: str) -> dict[str, Any]:
    stored = cloud.client("s3").get_object(Bucket=BUCKET, Key=f"runs/{run_id}/summary.json")
    return json.loads(stored["Body"].read())


def kept(cloud: EmulatedCloud, run_id: str) -> list[str]:
    """What the store has of a run."""
    pages = cloud.client("s3").get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=f"runs/{run_id}/")
    return [found["Key"].removeprefix(f"runs/{run_id}/") for page in pages for found in page["Contents"]]


def test_it_learns_and_its_checkpoint_is_in_the_store(ended: Ended, cloud: EmulatedCloud) -> None:
    summary, names = summary_of(cloud, ended.run_id), kept(cloud, ended.run_id)
    assert summary["reason"] == "enough"
    assert summary["best_accuracy"] > summary["accuracy_before"] + 0.1
    assert any(
        name.startswith(f"checkpoints/step-{summary['steps']:06d}") and name.endswith("manifest.json") for name in names
    )
    assert {f"logs/{name}.log" for name in ("controller-0", "host-generation-0", "host-generation-1")} <= {*names}


def test_a_budget_ends_a_run_after_a_checkpoint(ended: Ended, cloud: EmulatedCloud) -> None:
    summary = summary_of(cloud, ended.other)
    assert summary["reason"] == "budget"
    assert any(f"/step-{summary['steps']:06d}" in name for name in kept(cloud, ended.other))


def test_nothing_is_left(ended: Ended, cloud: EmulatedCloud, plane: Plane) -> None:
    for run_id in (ended.run_id, ended.other):
        assert cloud.left(run_id) == {}
        state = cloud.client("s3").get_object(Bucket=BUCKET, Key=f"terraform/runs/{run_id}.tfstate")
        assert json.loads(state["Body"].read())["resources"] == []
        assert [start.instance for start in cloud.starts if start.run == run_id and start.ended_at is None] == []
        lease = cloud.client("s3").get_object(Bucket=BUCKET, Key=f"terraform/leases/{run_id}.json")
        assert lease["Body"].read() == b""
    assert plane.queues("areal-nodes") == ["default"]
    assert plane.client.request("POST", "/block_documents/filter", json={}).json() == []


def test_the_reclaimed_node_left_and_another_one_joined(ended: Ended, cloud: EmulatedCloud) -> None:
    assert [share.state and share.state.name for share in ended.shares["generation-1"]] == ["Reclaimed", "Completed"]
    first, second = ended.shares["generation-1"]
    assert node_of(first) == ended.reclaimed != node_of(second)
    assert [len(ended.shares[name]) for name in ("trainer-0", "generation-0")] == [1, 1]
    assert len([start for start in cloud.starts if start.run == ended.run_id]) == 4


def test_neither_run_touches_what_is_the_others(ended: Ended, cloud: EmulatedCloud) -> None:
    for own, run_id, other in (
        (ended.nodes, ended.run_id, ended.other),
        (ended.other_nodes, ended.other, ended.run_id),
    ):
        for name, instance in own.items():
            tags = {"areal:run": run_id, "areal:owner": "somebody@example.org", "areal:node": name}
            assert tags_of(instance).items() >= tags.items()
        assert [name for name in kept(cloud, run_id) if other in name] == []
    assert {start.why for start in cloud.starts if start.run == ended.other} == {"terminated"}
    assert len([start for start in cloud.starts if start.run == ended.other]) == 2


def test_its_page_has_the_plan_the_result_and_the_cost(ended: Ended) -> None:
    plan = json.loads(ended.artifacts["areal-plan"].data)
    assert {row["what"] for row in plan} <= {"create", "delete", "replace", "update"}
    result = {row["what"]: row["value"] for row in json.loads(ended.artifacts["areal-result"].data)}
    assert result["steps"].endswith("(stop reason: enough)")
    assert result["tracking"].startswith("http://")
    cost = {row["role"]: row for row in json.loads(ended.artifacts["areal-cost"].data)}
    assert cost["generation"]["nodes"] == 3
    assert cost["trainer"]["nodes"] == 1
    assert cost["all"]["cost"].startswith("$")


def test_planted_secrets_are_nowhere(ended: Ended, cloud: EmulatedCloud, plane: Plane) -> None:
    secrets = {"prefect": SECRET.partition(":")[2], "mlflow": MLFLOW_SECRET, "token": ended.token}
    places: dict[str, bytes] = {"user data": "".join(ended.user_data).encode()}
    for file in (*cloud.folder.rglob("*.log"), *cloud.folder.glob("*.jsonl")):
        places[f"logs/{file.name}"] = file.read_bytes()
    for file in (path for path in plane.state.rglob("*") if path.is_file()):
        if file.name not in ("mlflow.ini", "mlflow-users.db") and "prefect-server" not in file.parts:
            places[str(file.relative_to(plane.state))] = file.read_bytes()
    with closing(sqlite3.connect(plane.state / "prefect-server" / "prefect.db")) as database:
        places["Prefect's database"] = "\n".join(database.iterdump()).encode()
    store = cloud.client("s3")
    for page in store.get_paginator("list_object_versions").paginate(Bucket=BUCKET):
        for version in page["Versions"]:
            body = store.get_object(Bucket=BUCKET, Key=version["Key"], VersionId=version["VersionId"])["Body"].read()
            places[f"s3://{version['Key']} {version['VersionId']}"] = body
    assert len(places) > 50
    found = [(name, place) for name, secret in secrets.items() for place in places if secret.encode() in places[place]]
    assert found == []
