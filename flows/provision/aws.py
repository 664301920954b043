"""AWS resources of runs: find them by tag or name, and delete them without Terraform.

Runs tag their resources (infra/terraform/run). IAM can't be searched by tag, so its resources are found by name.

Instances, launch templates and security groups are deleted by id, and AWS never reuses an id. Roles, instance profiles
and placement groups can be deleted by name only. Their names end in the epoch of the lease that made them. So a late
call from a process that has lost its lease can't hit a newer resource, but it can hit an older one. Therefore the
process that takes over a run in the middle of its teardown keeps no resource of it (leased.py).

Only this module and flows.machine use boto3. Credentials and endpoints are those of the AWS command line.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from botocore.parsers import ResponseParserError

from areal_core.errors import ProvisionError, one_line
from flows.provision.nodes import NODE, CloudResource

T = TypeVar("T")

_RUN, _NODE = "areal:run", "areal:node"  # tags
_NAMED = re.compile("areal-(.+)-(generation|trainer)-[0-9a-f]{6}")  # IAM names: areal-RUN-ROLE-EPOCH
_COST = ["pending", "running", "stopping", "stopped"]  # instance states before shutting-down
_GONE = (".NotFound", ".Unknown", "NoSuchEntity")  # parts of error codes for a missing resource
_INSTANCE, _TEMPLATE, _GROUP = NODE, "aws_launch_template", "aws_security_group"
_PROFILE, _ROLE, _PLACEMENT = "aws_iam_instance_profile", "aws_iam_role", "aws_placement_group"
_POLLS, _POLL_S = 300, 2.0  # checks for a terminated instance, and seconds between them


class Aws:
    """Client for one region of one AWS account. Raises ProvisionError."""

    def __init__(self, region: str | None, network: str | None) -> None:
        """Connect. `network` is the id of the VPC that the root module `control` made; None if unknown."""
        self._network = network
        session = boto3.Session(region_name=region)
        settings = Config(retries={"mode": "standard", "max_attempts": 6})
        try:
            self._ec2: Any = session.client("ec2", config=settings)
            self._iam: Any = session.client("iam", config=settings)
        except BotoCoreError as error:
            raise ProvisionError(f"aws: {one_line(error)}") from None

    def found(self, run: str | None = None) -> list[CloudResource]:
        """List the resources of a run, nodes first; None means all runs.
        Leaves out resources that are being deleted."""
        return _request(lambda: [*self._ec2_found(run), *self._iam_found(run)])

    def end(self, found: Iterable[CloudResource], confirm: Callable[[], None]) -> None:
        """Delete resources in dependency order, and wait until they are gone. A missing resource is no error.

        `confirm` is called before each deletion and during waits. It raises once this process has lost the right to
        delete."""
        ends = {
            _INSTANCE: lambda id_: self._ec2.terminate_instances(InstanceIds=[id_]),
            _TEMPLATE: lambda id_: self._ec2.delete_launch_template(LaunchTemplateId=id_),
            _PROFILE: self._end_profile,
            _ROLE: self._end_role,
            _PLACEMENT: lambda id_: self._ec2.delete_placement_group(GroupName=id_),
            _GROUP: lambda id_: self._ec2.delete_security_group(GroupId=id_),
        }
        found = list(found)
        for kind, end in ends.items():  # dependency order
            ids = [each.id for each in found if each.kind == kind]
            for id_ in ids:
                confirm()
                _request(lambda end=end, id_=id_: _if_exists(lambda: end(id_)))
            if kind == _INSTANCE:  # instances use the other resources until they are gone
                for id_ in ids:
                    self._wait(id_, confirm)
                for id_ in self._ending({each.run for each in found if each.kind in (_PLACEMENT, _GROUP)}):
                    self._wait(id_, confirm)

    def _ending(self, runs: set[str]) -> list[str]:
        """Ids of instances of these runs that are shutting down, which `found` leaves out."""
        if not runs:
            return []
        states = {"Name": "instance-state-name", "Values": ["shutting-down"]}
        filters = [{"Name": f"tag:{_RUN}", "Values": sorted(runs)}, states]
        pages = _request(lambda: list(_each(self._ec2, "describe_instances", "Reservations", Filters=filters)))
        return [each["InstanceId"] for reservation in pages for each in reservation["Instances"]]

    def _wait(self, instance: str, confirm: Callable[[], None]) -> None:
        for _ in range(_POLLS):
            page = _request(lambda: _if_exists(lambda: self._ec2.describe_instances(InstanceIds=[instance])))
            found = [each for reservation in (page or {}).get("Reservations", []) for each in reservation["Instances"]]
            if all(each["State"]["Name"] == "terminated" for each in found):
                return
            confirm()
            time.sleep(_POLL_S)
        raise ProvisionError(
            f"aws: instance {instance} still exists {_POLLS * _POLL_S:g} s after the request to terminate it"
        )

    def _ec2_found(self, run: str | None) -> Iterator[CloudResource]:
        tagged = {"Name": "tag-key", "Values": [_RUN]} if run is None else {"Name": f"tag:{_RUN}", "Values": [run]}
        living = {"Name": "instance-state-name", "Values": _COST}
        for reservation in _each(self._ec2, "describe_instances", "Reservations", Filters=[tagged, living]):
            for each in reservation["Instances"]:
                yield CloudResource(
                    kind=_INSTANCE,
                    id=each["InstanceId"],
                    run=_tags(each)[_RUN],
                    role=_tags(each).get(_NODE, "").rpartition("-")[0] or None,
                    since=each["LaunchTime"].timestamp(),
                    own_vpc=self._own_vpc(each),
                )
        for each in _each(self._ec2, "describe_launch_templates", "LaunchTemplates", Filters=[tagged]):
            since = each["CreateTime"].timestamp()
            yield CloudResource(kind=_TEMPLATE, id=each["LaunchTemplateId"], run=_tags(each)[_RUN], since=since)
        for each in self._ec2.describe_placement_groups(Filters=[tagged])["PlacementGroups"]:
            yield CloudResource(kind=_PLACEMENT, id=each["GroupName"], run=_tags(each)[_RUN])
        for each in _each(self._ec2, "describe_security_groups", "SecurityGroups", Filters=[tagged]):
            yield CloudResource(kind=_GROUP, id=each["GroupId"], run=_tags(each)[_RUN], own_vpc=self._own_vpc(each))

    def _iam_found(self, run: str | None) -> Iterator[CloudResource]:
        """Instance profiles and roles of the account whose name and tag name the same run."""
        for operation, key, name_of, kind in (
            ("list_instance_profiles", "InstanceProfiles", "InstanceProfileName", _PROFILE),
            ("list_roles", "Roles", "RoleName", _ROLE),
        ):
            for each in _each(self._iam, operation, key):
                name, since = each[name_of], each["CreateDate"].timestamp()
                named = _NAMED.fullmatch(name)
                if named and run in (None, named[1]) and self._is_tagged(kind, name, named[1]):
                    yield CloudResource(kind=kind, id=name, run=named[1], role=named[2], since=since)

    def _profile(self, name: str) -> dict[str, Any]:
        return self._iam.get_instance_profile(InstanceProfileName=name)["InstanceProfile"]

    def _is_tagged(self, kind: str, name: str, run: str) -> bool:
        """Read the tags of one resource: IAM's lists leave them out."""
        each = _if_exists(
            lambda: self._profile(name) if kind == _PROFILE else self._iam.get_role(RoleName=name)["Role"]
        )
        return each is not None and _tags(each).get(_RUN) == run

    def _end_profile(self, name: str) -> None:
        for role in self._profile(name)["Roles"]:
            role_name = role["RoleName"]
            self._iam.remove_role_from_instance_profile(InstanceProfileName=name, RoleName=role_name)
        self._iam.delete_instance_profile(InstanceProfileName=name)

    def _end_role(self, name: str) -> None:
        for profile in self._iam.list_instance_profiles_for_role(RoleName=name)["InstanceProfiles"]:
            its = profile["InstanceProfileName"]
            self._iam.remove_role_from_instance_profile(InstanceProfileName=its, RoleName=name)
        for policy in self._iam.list_role_policies(RoleName=name)["PolicyNames"]:
            self._iam.delete_role_policy(RoleName=name, PolicyName=policy)
        self._iam.delete_role(RoleName=name)

    def _own_vpc(self, each: dict[str, Any]) -> bool:
        return self._network is not None and each.get("VpcId") == self._network


def _each(client: Any, operation: str, key: str, **arguments: Any) -> Iterator[dict[str, Any]]:
    for page in client.get_paginator(operation).paginate(**arguments):
        yield from page[key]


def _tags(each: dict[str, Any]) -> dict[str, str]:
    return {tag["Key"]: tag["Value"] for tag in each.get("Tags", [])}


def _if_exists(ask: Callable[[], T]) -> T | None:
    try:
        return ask()
    except ClientError as error:
        if not any(gone in error.response["Error"]["Code"] for gone in _GONE):
            raise
        return None


def _request(ask: Callable[[], T]) -> T:
    try:
        return ask()
    except (BotoCoreError, ClientError, ResponseParserError) as error:
        raise ProvisionError(f"aws: {one_line(error)}") from None
