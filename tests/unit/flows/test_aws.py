"""What AWS holds of runs, as moto has it in this process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import boto3
import pytest
from botocore.client import BaseClient
from botocore.exceptions import ClientError
from moto import mock_aws
from moto.core.models import DEFAULT_ACCOUNT_ID
from moto.ec2.models import ec2_backends

from areal_core.storage.lease import LeaseLostError
from flows.provision.aws import Aws
from tests.support.terraform import CREDENTIALS, REGION

ROLE = '{"Version": "2012-10-17", "Statement": []}'
POLICY = ROLE.replace("[]", '[{"Effect": "Allow", "Action": "s3:ListBucket", "Resource": "*"}]')


class Account:
    """Things of runs, made as terraform makes them."""

    def __init__(self) -> None:
        self.ec2: Any = boto3.client("ec2", region_name=REGION)
        self.iam: Any = boto3.client("iam", region_name=REGION)
        self.network = self.ec2.create_vpc(CidrBlock="10.64.0.0/16")["Vpc"]["VpcId"]
        self._subnet = self.ec2.create_subnet(VpcId=self.network, CidrBlock="10.64.0.0/24")["Subnet"]["SubnetId"]
        images = self.ec2.describe_images(Filters=[{"Name": "architecture", "Values": ["x86_64"]}])["Images"]
        self._image = min(image["ImageId"] for image in images)

    def make(self, run: str) -> dict[str, str]:
        """One of everything, by its type."""
        tags = [{"Key": "areal:run", "Value": run}]
        name = f"areal-{run}-trainer-0a1b2c"

        def tagged(kind: str, *more: dict[str, str]) -> list[dict[str, Any]]:
            return [{"ResourceType": kind, "Tags": [*tags, *more]}]

        group = self.ec2.create_security_group(
            GroupName=name, Description="-", VpcId=self.network, TagSpecifications=tagged("security-group")
        )["GroupId"]
        image, kind = {"ImageId": self._image}, "launch-template"
        template = self.ec2.create_launch_template(
            LaunchTemplateName=name, LaunchTemplateData=image, TagSpecifications=tagged(kind)
        )["LaunchTemplate"]["LaunchTemplateId"]
        self.iam.create_role(RoleName=name, AssumeRolePolicyDocument=ROLE, Tags=tags)
        self.iam.put_role_policy(RoleName=name, PolicyName="run", PolicyDocument=POLICY)
        self.iam.create_instance_profile(InstanceProfileName=name, Tags=tags)
        self.iam.add_role_to_instance_profile(InstanceProfileName=name, RoleName=name)
        self.ec2.create_placement_group(GroupName=name, Strategy="cluster", TagSpecifications=tagged("placement-group"))
        node = tagged("instance", {"Key": "areal:node", "Value": "trainer-0"})
        (instance,) = self.ec2.run_instances(
            **image, MinCount=1, MaxCount=1, SubnetId=self._subnet, SecurityGroupIds=[group], TagSpecifications=node
        )["Instances"]
        return {
            "aws_instance": instance["InstanceId"],
            "aws_launch_template": template,
            "aws_placement_group": name,
            "aws_security_group": group,
            "aws_iam_instance_profile": name,
            "aws_iam_role": name,
        }


class PlacementGroups:
    """Which moto has none of."""

    def __init__(self) -> None:
        self._tags: dict[str, list[dict[str, str]]] = {}

    def answer(self, operation: str, asked: dict[str, Any]) -> dict[str, Any]:
        if operation == "CreatePlacementGroup":
            self._tags[asked["GroupName"]] = asked["TagSpecifications"][0]["Tags"]
        elif operation == "DeletePlacementGroup" and self._tags.pop(asked["GroupName"], None) is None:
            raise ClientError({"Error": {"Code": "InvalidPlacementGroup.Unknown"}}, operation)
        (wanted,) = asked.get("Filters", [{"Name": "tag-key"}])
        names = [
            name
            for name, tags in self._tags.items()
            if wanted["Name"] == "tag-key" or tags[0]["Value"] in wanted["Values"]
        ]
        return {"PlacementGroups": [{"GroupName": name, "Tags": self._tags[name]} for name in names]}


@pytest.fixture
def account(monkeypatch: pytest.MonkeyPatch) -> Iterator[Account]:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    groups, call = PlacementGroups(), BaseClient._make_api_call  # pyright: ignore[reportAttributeAccessIssue]

    def call_or_answer(client: Any, operation: str, asked: dict[str, Any]) -> dict[str, Any]:
        return groups.answer(operation, asked) if "PlacementGroup" in operation else call(client, operation, asked)

    monkeypatch.setattr(BaseClient, "_make_api_call", call_or_answer)
    with mock_aws():
        yield Account()


def forbid() -> None:
    raise LeaseLostError("lost")


def test_what_there_is_of_a_run_is_found_and_ended(account: Account) -> None:
    account.iam.create_role(RoleName="areal-first-trainer-0a1b2c", AssumeRolePolicyDocument=ROLE)  # not tagged
    account.ec2.create_security_group(GroupName="areal-control", Description="control", VpcId=account.network)
    assert Aws(REGION, account.network).found() == []
    account.iam.delete_role(RoleName="areal-first-trainer-0a1b2c")
    first, second = account.make("first"), account.make("second.1")
    assert not any(each.near for each in Aws(REGION, "vpc-of-another-one").found())
    cloud = Aws(REGION, account.network)
    found = cloud.found("first")
    assert {each.kind: each.id for each in found} == first
    assert (found[0].kind, found[0].role) == ("aws_instance", "trainer")
    assert {each.run for each in found} == {"first"}
    assert {each.kind for each in found if each.near} == {"aws_instance", "aws_security_group"}
    assert {each.kind for each in found if each.since is None} == {"aws_placement_group", "aws_security_group"}
    every = cloud.found()
    assert {(each.kind, each.id) for each in every} == {*first.items(), *second.items()}
    assert {each.run for each in every} == {"first", "second.1"}
    with pytest.raises(LeaseLostError):
        cloud.end(found, forbid)
    assert {each.kind: each.id for each in cloud.found("first")} == first
    for _ in range(2):  # what is gone is fine
        cloud.end(found, lambda: None)
    assert {(each.kind, each.id) for each in cloud.found()} == set(second.items())
    cloud.end([], lambda: None)


def test_groups_are_ended_once_instances_that_are_shutting_down_are_gone(
    account: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = account.make("first")
    instance: Any = ec2_backends[DEFAULT_ACCOUNT_ID][REGION].get_instance(first["aws_instance"])
    instance._state.name, instance._state.code = "shutting-down", 32  # it powers itself off, with the lease
    listed: list[set[str]] = []

    def pass_(seconds: float) -> None:
        listed.append({each.kind for each in cloud.found("first")})
        if len(listed) == 2:
            instance._state.name, instance._state.code = "terminated", 48

    monkeypatch.setattr("flows.provision.aws.time.sleep", pass_)
    cloud = Aws(REGION, account.network)
    found = cloud.found("first")
    assert "aws_instance" not in {each.kind for each in found}
    cloud.end(found, lambda: None)
    assert listed == [{each.kind for each in found}] * 2
    assert cloud.found("first") == []
