"""A run's nodes, made and changed by the real terraform on an emulated cloud."""

from __future__ import annotations

import json

import pytest

from areal_core.errors import ProvisionError
from flows.provision.nodes import Nodes
from flows.provision.terraform import Change, Plan
from tests.support.cloud import BUCKET, RUN, SECRET, STATE, Cloud, tags_of

pytestmark = pytest.mark.cloud


def address(name: str) -> str:
    return f'module.nodes["{name.rpartition("-")[0]}"].aws_instance.node["{name}"]'


def made_or_ended(plan: Plan) -> list[Change]:
    """Changes in place are left out: the emulated cloud forgets this and that, which is then to be put again."""
    return [change for change in plan.changes if change.action != "update"]


def ids(cloud: Cloud) -> dict[str, str]:
    return {name: instance["InstanceId"] for name, instance in cloud.instances(RUN).items()}


def test_the_nodes_that_were_asked_for(nodes: Nodes, cloud: Cloud) -> None:
    instances = cloud.instances(RUN)
    assert [(host.name, host.role, host.spot) for host in nodes.hosts()] == [
        ("generation-0", "generation", True),
        ("generation-1", "generation", True),
        ("trainer-0", "trainer", False),
    ]
    assert {host.name: (host.id, host.address) for host in nodes.hosts()} == {
        name: (instance["InstanceId"], instance["PrivateIpAddress"]) for name, instance in instances.items()
    }
    spot = cloud.template("generation")["InstanceMarketOptions"]
    assert (spot["MarketType"], spot["SpotOptions"]["MaxPrice"]) == ("spot", "0.2")
    assert "InstanceMarketOptions" not in cloud.template("trainer")
    (interface,) = cloud.template("trainer")["NetworkInterfaces"]
    assert interface["AssociatePublicIpAddress"] is False
    tags = {"areal:run": RUN, "areal:owner": "somebody@example.org", "areal:expires": "2037-01-31T12:00:00Z"}
    for instance in instances.values():
        assert tags_of(instance).items() >= tags.items()


def test_only_a_node_that_is_bad_or_was_reclaimed_is_made_anew(nodes: Nodes, cloud: Cloud) -> None:
    assert made_or_ended(nodes.plan()) == []
    assert made_or_ended(nodes.plan(replace=["generation-0"])) == [Change(address("generation-0"), "replace")]
    before = ids(cloud)
    cloud.client("ec2").terminate_instances(InstanceIds=[before["generation-1"]])
    plan = nodes.plan()
    assert made_or_ended(plan) == [Change(address("generation-1"), "create")]
    nodes.terraform.apply(plan)
    after = ids(cloud)
    assert sorted(after) == sorted(before)
    assert {name for name in after if after[name] != before[name]} == {"generation-1"}
    with pytest.raises(ProvisionError, match=r"^terraform apply: Saved plan is stale: "):
        nodes.terraform.apply(plan)  # others have changed what it was made for


def test_a_longer_lease_touches_no_node_that_runs(nodes: Nodes, cloud: Cloud) -> None:
    before, lease = ids(cloud), nodes.variables["lease"]
    nodes.variables["lease"] = lease | {"expires_at": "2037-02-28T12:00:00Z"}
    nodes.terraform.apply(nodes.plan())
    assert ids(cloud) == before
    assert {tags_of(instance)["areal:expires"] for instance in cloud.instances(RUN).values()} == {
        "2037-02-28T12:00:00Z"
    }


def test_one_process_writes_the_state_of_a_run(nodes: Nodes, cloud: Cloud) -> None:
    store = cloud.client("s3")
    lock = {"ID": "1b9ff9a8", "Operation": "OperationTypeApply", "Who": "somebody@elsewhere"}
    lock["Created"] = "2030-01-31T12:00:00Z"
    store.put_object(Bucket=BUCKET, Key=f"{STATE}.tflock", Body=json.dumps(lock).encode())
    with pytest.raises(ProvisionError, match=r"^terraform plan: Error acquiring the state lock: .*somebody@elsewhere"):
        nodes.plan()
    store.delete_object(Bucket=BUCKET, Key=f"{STATE}.tflock")


def test_secrets_are_neither_in_the_state_nor_in_what_nodes_are_told(nodes: Nodes, cloud: Cloud) -> None:
    assert SECRET not in cloud.state().decode()
    assert all(SECRET not in cloud.user_data(role) for role in ("generation", "trainer"))
    files = [path for path in (nodes.folder / "copy").rglob("*") if path.is_file()]
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
