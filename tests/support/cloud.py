"""An emulated cloud: moto's server, in a process of its own, and clients of it."""

from __future__ import annotations

import base64
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config

from areal_core.launch.process import die_with_parent
from flows.stack import responds
from tests.support.processes import free_port, wait_for
from tests.support.terraform import CREDENTIALS, REGION

BUCKET = "areal-emulated"
RUN, POOL = "cpu-async-0123456789ab", "areal-nodes"
STATE = f"terraform/runs/{RUN}.tfstate"  # where terraform keeps the run's, in the bucket
MLFLOW_PARAMETER, MLFLOW_SECRET = "/areal/mlflow-password", "planted-password"
PARAMETER, SECRET = "/areal/prefect-auth", "admin:planted-secret"


class Cloud:
    """What it holds, as its API tells it."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint

    def client(self, service: str, config: Config | None = None) -> Any:
        return boto3.client(
            service,
            config=config,
            endpoint_url=self.endpoint,
            region_name=REGION,
            aws_access_key_id=CREDENTIALS["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
        )

    def image(self) -> str:
        """One that can be booted."""
        x86_64 = [{"Name": "architecture", "Values": ["x86_64"]}]
        return min(image["ImageId"] for image in self.client("ec2").describe_images(Filters=x86_64)["Images"])

    def instances(self, run: str) -> dict[str, dict[str, Any]]:
        """Those of a run that cost, by the names of the nodes."""
        filters = [
            {"Name": "tag:areal:run", "Values": [run]},
            {"Name": "instance-state-name", "Values": ["pending", "running", "stopping", "stopped"]},
        ]
        found = self.client("ec2").describe_instances(Filters=filters)["Reservations"]
        each = [instance for reservation in found for instance in reservation["Instances"]]
        return {tags_of(instance)["areal:node"]: instance for instance in each}

    def user_data(self, role: str, run: str = RUN) -> str:
        """What the nodes of a role run when they boot."""
        return base64.b64decode(self.template(role, run)["UserData"]).decode()

    def template(self, role: str, run: str = RUN) -> dict[str, Any]:
        """What the nodes of a role are started with."""
        found = self.client("ec2").describe_launch_template_versions(LaunchTemplateName=f"areal-{run}-{role}")
        newest = max(found["LaunchTemplateVersions"], key=lambda version: version["VersionNumber"])
        return newest["LaunchTemplateData"]

    def state(self) -> bytes:
        return self.client("s3").get_object(Bucket=BUCKET, Key=STATE)["Body"].read()

    def left(self, run: str = RUN) -> dict[str, list[str]]:
        """Everything of a run, by kind."""
        ec2, iam = self.client("ec2"), self.client("iam")
        reservations = ec2.describe_instances()["Reservations"]
        instances = [instance for reservation in reservations for instance in reservation["Instances"]]
        found = {
            "instances": [tags_of(i).get("Name", "") for i in instances if i["State"]["Name"] != "terminated"],
            "templates": [t["LaunchTemplateName"] for t in ec2.describe_launch_templates()["LaunchTemplates"]],
            "groups": [g["GroupName"] for g in ec2.describe_security_groups()["SecurityGroups"]],
            "roles": [r["RoleName"] for r in iam.list_roles()["Roles"]],
            "profiles": [p["InstanceProfileName"] for p in iam.list_instance_profiles()["InstanceProfiles"]],
        }
        of_runs = {kind: [n for n in names if n.startswith(f"areal-{run}")] for kind, names in found.items()}
        return {kind: names for kind, names in of_runs.items() if names}


def tags_of(resource: Mapping[str, Any]) -> dict[str, str]:
    return {tag["Key"]: tag["Value"] for tag in resource.get("Tags", [])}


@contextlib.contextmanager
def emulated(folder: Path) -> Iterator[Cloud]:
    """A process of its own: a busy test would keep a thread from answering."""
    endpoint, log = f"http://127.0.0.1:{(port := free_port())}", folder / "moto.log"
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    settings = os.environ | {"MOTO_IAM_LOAD_MANAGED_POLICIES": "true"}
    with (
        log.open("wb") as output,
        subprocess.Popen(command, env=settings, stdout=output, stderr=output, preexec_fn=die_with_parent) as server,
    ):
        try:
            wait_for(lambda: responds(f"{endpoint}/moto-api/"), f"moto's server; its log: {log}")
            yield Cloud(endpoint)
        finally:
            server.terminate()
