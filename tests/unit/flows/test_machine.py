"""What a machine of a cloud was told, what it makes of it, and what is found wrong with it; what AWS holds of runs, as
moto has it in this process."""

from __future__ import annotations

import json
import os
import queue
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import boto3
import pytest
from botocore.client import BaseClient
from botocore.exceptions import ClientError
from moto import mock_aws
from moto.core.models import DEFAULT_ACCOUNT_ID
from moto.ec2.models import ec2_backends

from areal_core.config.groups import NodesConfig
from areal_core.errors import ConfigError
from areal_core.run.command import run_command
from areal_core.storage.lease import LeaseLostError
from flows import control, machine, node
from flows.machine import secret_values
from flows.provision.aws import Aws
from tests.support.terraform import CREDENTIALS, REGION


class Server(ThreadingHTTPServer):
    """Of the cloud's metadata."""

    reclaimed = False


@pytest.fixture
def server() -> Iterator[Server]:
    class Handler(BaseHTTPRequestHandler):
        def answer(self, status: int, body: bytes = b"") -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_PUT(self) -> None:
            self.answer(200 if "X-aws-ec2-metadata-token-ttl-seconds" in self.headers else 400, b"token")

        def do_GET(self) -> None:
            if self.headers["X-aws-ec2-metadata-token"] != "token":
                self.answer(401)
            elif served.reclaimed and self.path == "/latest/meta-data/spot/instance-action":
                self.answer(200, b'{"action":\n "terminate"}')
            else:
                self.answer(404)

        def log_message(self, format: str, *args: object) -> None: ...

    served = Server(("127.0.0.1", 0), Handler)
    Thread(target=served.serve_forever, daemon=True).start()
    yield served
    served.shutdown()
    served.server_close()


@pytest.mark.parametrize(
    ("found", "line"),
    [
        (None, "nvidia-smi failed, so the image lacks a GPU driver or its GPU: "),
        ("H100, 570.1\n" * 7, "must have 8 GPUs, has 7: H100, 570.1; "),
        ("H100, 570.1\n" * 8, None),
    ],
)
def test_gpus_that_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: str | None, line: str | None
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/none")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    if found is not None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\nprintf '{found}'\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    assert machine.gpu_problem(NodesConfig(gpus=0, gpu="none")) is None
    said = machine.gpu_problem(NodesConfig())
    assert (said or "").startswith(line) if line else said is None


def test_a_notice_is_heeded(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_METADATA", f"http://127.0.0.1:{server.server_port}/latest")
    monkeypatch.setattr(machine, "_POLL_S", 0.01)
    said: list[str] = []
    heeded: queue.SimpleQueue[str] = queue.SimpleQueue()
    with machine.ReclaimNotice(said.append) as looked:
        looked.on_arrival(heeded.put)
        assert looked.text is None
        server.reclaimed = True
        assert heeded.get(timeout=20.0) == '{"action": "terminate"}' == looked.text
    assert said == ['the cloud reclaims this node: {"action": "terminate"}']


TOLD: dict[str, Any] = {
    "run": "run-1",
    "role": "generation",
    "region": "us-east-1",
    "prefect": {"api_url": "http://10.0.0.1:4200/api", "work_pool": "areal-nodes", "work_queue": "run-1-generation"},
    "environment": {"MLFLOW_TRACKING_USERNAME": "admin"},
    "secrets": {"PREFECT_API_AUTH_STRING": "/areal/0"},
}
SECRETS = {f"SECRET_{number}": f"/areal/{number}" for number in range(23)}  # one request may not name all


@pytest.fixture
def parameters(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "emulated")
    with mock_aws():
        store = boto3.client("ssm", region_name="us-east-1")
        for variable, name in SECRETS.items():
            store.put_parameter(Name=name, Value=f"value of {variable}", Type="SecureString")
        yield


@pytest.mark.usefixtures("parameters")
def test_every_secret_is_read_and_absent_ones_are_named() -> None:
    assert secret_values("us-east-1", SECRETS) == {variable: f"value of {variable}" for variable in SECRETS}
    with pytest.raises(ConfigError, match=r"^secrets: must be SSM parameters in us-east-1, which has no /areal/b$"):
        secret_values("us-east-1", SECRETS | {"B": "/areal/b"})


def test_wrong_file_costs_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    (tmp_path / "node.json").write_text(json.dumps(TOLD | {"rolle": "trainer"}))
    monkeypatch.setattr(sys, "argv", ["node", str(tmp_path / "node.json")])
    assert run_command(node.worker) == 2
    assert capsys.readouterr().err == f"areal: error: {tmp_path}/node.json: Object contains unknown field `rolle`\n"


@pytest.mark.usefixtures("parameters")
def test_node_becomes_the_worker_of_its_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    became: list[Any] = []
    (tmp_path / "node.json").write_text(json.dumps(TOLD))
    monkeypatch.setattr(sys, "argv", ["node", str(tmp_path / "node.json")])
    monkeypatch.setattr(os, "execve", lambda *arguments: became.extend(arguments))
    monkeypatch.setattr(node, "identity", lambda: "i-0")
    node.worker()
    program, argv, environment = became
    assert program == sys.executable
    assert "value of" not in " ".join(argv)  # which everybody on the machine can read
    options = dict(zip(argv[5::2], argv[6::2], strict=True))
    assert (options["--pool"], options["--work-queue"]) == ("areal-nodes", "run-1-generation")
    assert options["--name"] == "run-1-generation-i-0"
    assert environment["PREFECT_API_URL"] == "http://10.0.0.1:4200/api"
    assert environment["PREFECT_API_AUTH_STRING"] == "value of SECRET_0"
    assert environment["MLFLOW_TRACKING_USERNAME"] == "admin"


def test_a_password_that_mlflow_would_refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "secret_values", lambda *_: {"prefect": "a:b", "mlflow": "planted"})
    boot = control.Control(str(tmp_path), str(tmp_path), "s3://b", "us-east-1", "/areal/prefect", "/areal/mlflow")
    monkeypatch.setattr(control, "read_boot_file", lambda kind: boot)
    monkeypatch.setenv(control.MARK, "")
    with pytest.raises(ConfigError, match=r"^/areal/mlflow: must have at least 12 characters, got \d+$"):
        control.serve()
    assert list(tmp_path.iterdir()) == []


ROLE = '{"Version": "2012-10-17", "Statement": []}'
POLICY = ROLE.replace("[]", '[{"Effect": "Allow", "Action": "s3:ListBucket", "Resource": "*"}]')


class Account:
    """Things of runs, made as terraform makes them."""

    def __init__(self) -> None:
        self.ec2: Any = boto3.client("ec2", region_name=REGION)
        self.iam: Any = boto3.client("iam", region_name=REGION)
        self.network = self.ec2.create_vpc(CidrBlock="10.64.0.0/16")["Vpc"]["VpcId"]
        self._subnet = self.ec2.create_subnet(VpcId=self.network, CidrBlock="10.64.0.0/24")["Subnet"]["SubnetId"]
        self._image = min(ec2_backends[DEFAULT_ACCOUNT_ID][REGION].amis)  # a request for all takes a second

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
    assert not any(each.own_vpc for each in Aws(REGION, "vpc-of-another-one").found())
    cloud = Aws(REGION, account.network)
    found = cloud.found("first")
    assert {each.kind: each.id for each in found} == first
    assert (found[0].kind, found[0].role) == ("aws_instance", "trainer")
    assert {each.run for each in found} == {"first"}
    assert {each.kind for each in found if each.own_vpc} == {"aws_instance", "aws_security_group"}
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
