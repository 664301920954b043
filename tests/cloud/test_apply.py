"""A run's nodes, made and changed by the real terraform on an emulated cloud."""

from __future__ import annotations

import json

import pytest

from tests.support.cloud import BUCKET, RUN, SECRET, STATE, Cloud, tags_of
from tests.support.terraform import Root

pytestmark = [pytest.mark.cloud, pytest.mark.slow]


def test_the_nodes_that_were_asked_for(nodes: Root, cloud: Cloud) -> None:
    instances = cloud.instances(RUN)
    assert {host["name"]: (host["role"], host["id"], host["address"]) for host in nodes.output("hosts")} == {
        name: (name.rpartition("-")[0], instance["InstanceId"], instance["PrivateIpAddress"])
        for name, instance in instances.items()
    }
    assert sorted(instances) == ["generation-0", "generation-1", "trainer-0"]
    spot = cloud.template("generation")["InstanceMarketOptions"]
    assert (spot["MarketType"], spot["SpotOptions"]["MaxPrice"]) == ("spot", "0.2")
    assert "InstanceMarketOptions" not in cloud.template("trainer")
    (interface,) = cloud.template("trainer")["NetworkInterfaces"]
    assert interface["AssociatePublicIpAddress"] is False
    for instance in instances.values():
        assert (
            tags_of(instance).items()
            >= {
                "areal:run": RUN,
                "areal:owner": "somebody@example.org",
                "areal:expires": "2037-01-31T12:00:00Z",
            }.items()
        )


def test_nothing_is_made_or_ended_without_a_reason(nodes: Root) -> None:
    assert nodes.planned() == {}


def test_a_node_that_was_reclaimed_comes_back_alone(nodes: Root, cloud: Cloud) -> None:
    before = cloud.instances(RUN)
    cloud.client("ec2").terminate_instances(InstanceIds=[before["generation-1"]["InstanceId"]])
    assert nodes.planned() == {'module.nodes["generation"].aws_instance.node["generation-1"]': ["create"]}
    nodes.do("apply", "-input=false", "next")
    after = cloud.instances(RUN)
    assert sorted(after) == sorted(before)
    assert {name for name in after if after[name]["InstanceId"] != before[name]["InstanceId"]} == {"generation-1"}


def test_a_node_that_is_bad_is_replaced_alone(nodes: Root) -> None:
    address = 'module.nodes["generation"].aws_instance.node["generation-0"]'
    assert list(nodes.planned(f"-replace={address}")) == [address]


def test_a_longer_lease_touches_no_node_that_runs(nodes: Root, cloud: Cloud) -> None:
    before = cloud.instances(RUN)
    nodes.apply("-var", 'lease={"owner": "somebody@example.org", "expires_at": "2037-02-28T12:00:00Z"}')
    after = cloud.instances(RUN)
    nodes.apply()
    assert {name: node["InstanceId"] for name, node in after.items()} == {
        name: node["InstanceId"] for name, node in before.items()
    }
    assert {tags_of(node)["areal:expires"] for node in after.values()} == {"2037-02-28T12:00:00Z"}


def test_one_process_writes_the_state_of_a_run(nodes: Root, cloud: Cloud) -> None:
    store = cloud.client("s3")
    lock = {
        "ID": "1b9ff9a8",
        "Operation": "OperationTypeApply",
        "Who": "somebody@elsewhere",
        "Created": "2030-01-31T12:00:00Z",
    }
    store.put_object(Bucket=BUCKET, Key=f"{STATE}.tflock", Body=json.dumps(lock).encode())
    refused = nodes.attempt("apply", "-input=false", "-auto-approve")
    store.delete_object(Bucket=BUCKET, Key=f"{STATE}.tflock")
    assert refused.returncode != 0
    assert "Error acquiring the state lock" in refused.stderr
    assert "somebody@elsewhere" in refused.stderr


def test_what_is_stored_is_versioned_and_encrypted(nodes: Root, cloud: Cloud) -> None:
    store = cloud.client("s3")
    assert store.get_bucket_versioning(Bucket=BUCKET)["Status"] == "Enabled"
    assert store.head_object(Bucket=BUCKET, Key=STATE)["ServerSideEncryption"] == "AES256"


def test_secrets_are_neither_in_the_state_nor_in_what_nodes_are_told(nodes: Root, cloud: Cloud) -> None:
    assert SECRET not in cloud.state().decode()
    assert all(SECRET not in cloud.user_data(role) for role in ("generation", "trainer"))
