"""The real terraform with the real provider, on an emulated cloud: moto's server, which answers their calls."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from flows.provision import terraform
from flows.provision.terraform import INFRA, PLUGINS

if TYPE_CHECKING:
    from tests.emulated_cloud import EmulatedCloud

REQUIRE_CLOUD = "AREAL_REQUIRE_CLOUD"  # set: a machine that lacks terraform fails these tests instead of skipping them
_PROVIDER = "registry.terraform.io/hashicorp/aws"
REGION = "us-east-1"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "emulated", "AWS_SECRET_ACCESS_KEY": "emulated", "AWS_DEFAULT_REGION": REGION}

# What the emulated cloud lacks: a service that tells of an instance, a host name for each bucket, and a memory for
# descriptions of rules between security groups, which it then refuses to change.
_CONTROL = """
provider "aws" {
  skip_metadata_api_check = true
  s3_use_path_style       = true
}
"""
_RUN = """
terraform {
  backend "s3" {
    use_lockfile                = true
    encrypt                     = true
    use_path_style              = true
    skip_credentials_validation = true
    skip_metadata_api_check     = true
  }
}

resource "aws_vpc_security_group_ingress_rule" "nodes" {
  lifecycle {
    ignore_changes = [description]
  }
}

resource "aws_vpc_security_group_egress_rule" "nodes" {
  lifecycle {
    ignore_changes = [description]
  }
}
"""


def mirror() -> Path | None:
    """The folder that holds the provider, as `terraform init -plugin-dir` takes it."""
    if named := os.environ.get(PLUGINS):
        return Path(named)
    usual = (Path.home() / ".terraform.d", *(Path(share) / "share/terraform" for share in ("/usr/local", "/usr")))
    near = (found.parent for level in ("*", "*/*") for found in Path("/").glob(f"{level}/registry.terraform.io"))
    return next(
        (folder for folder in (*(folder / "plugins" for folder in usual), *near) if (folder / _PROVIDER).is_dir()), None
    )


def missing() -> str | None:
    """What this machine lacks, on one line; None if nothing."""
    if shutil.which("terraform") is None:
        return "needs terraform, 1.11 or newer, on the PATH"
    if mirror() is None:
        return f"needs a folder that mirrors the provider hashicorp/aws 5.100, which {PLUGINS} may name"
    return None


def emulated_infra(folder: Path) -> Path:
    """A copy of infra/terraform in a new folder, for an emulated cloud."""
    shutil.copytree(INFRA, folder)
    (folder / "control" / "emulated_override.tf").write_text(_CONTROL)
    (folder / "run" / "emulated_override.tf").write_text(_CONTROL + _RUN)
    return folder


def control_state(infra: Path, state: Path) -> Path:
    """`state`, the folder of a machine that `control` was applied from."""
    (state / "control").mkdir()
    shutil.copy(infra / "control" / "terraform.tfstate", state / "control")
    return state


@contextmanager
def terraform_on(cloud: EmulatedCloud, infra: Path) -> Iterator[pytest.MonkeyPatch]:
    """This process has the environment of an emulated cloud, and its terraform."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(terraform, "INFRA", infra)
        for name, value in (cloud.environment | {PLUGINS: str(mirror())}).items():
            patched.setenv(name, value)
        yield patched


class Root:
    """One root module in a copy of infra/terraform, worked on as people do it."""

    def __init__(self, folder: Path, **environment: str) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "TF_"))}
        self._environment = kept | {"TF_CLI_CONFIG_FILE": "/dev/null", "TF_IN_AUTOMATION": "1"} | environment
        self._folder = folder

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["terraform", f"-chdir={self._folder}", *arguments]
        return subprocess.run(command, env=self._environment, capture_output=True, text=True, timeout=540)

    def do(self, *arguments: str) -> str:
        """The output of a command that has to succeed."""
        ended = self.run(*arguments)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    def init(self) -> None:
        self.do("init", "-input=false", f"-plugin-dir={mirror()}")

    def apply(self, variables: dict[str, Any]) -> None:
        (self._folder / "given.auto.tfvars.json").write_text(json.dumps(variables))
        self.do("apply", "-input=false", "-auto-approve")

    def output(self, name: str) -> Any:
        return json.loads(self.do("output", "-json", name))
