"""The real terraform with the real provider, on an emulated cloud: moto's server, which answers their calls."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

INFRA = Path(__file__).resolve().parents[2] / "infra" / "terraform"
REQUIRE_CLOUD = "AREAL_REQUIRE_CLOUD"  # set: a machine that lacks terraform fails these tests instead of skipping them
PLUGINS = "AREAL_TERRAFORM_PLUGINS"  # names a folder that mirrors the provider, where it is not found by looking
_PROVIDER = "registry.terraform.io/hashicorp/aws"
REGION = "us-east-1"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "emulated", "AWS_SECRET_ACCESS_KEY": "emulated", "AWS_DEFAULT_REGION": REGION}

# What the emulated cloud lacks: a service that tells of an instance, a host name for each bucket, and a memory for
# descriptions of rules between security groups, which it then refuses to change.
_OVERRIDE = """
provider "aws" {
  skip_metadata_api_check = true
  s3_use_path_style       = true
}
"""
_RUN_OVERRIDE = "".join(
    f"""
resource "aws_vpc_security_group_{way}_rule" "nodes" {{
  lifecycle {{
    ignore_changes = [description]
  }}
}}
"""
    for way in ("ingress", "egress")
)


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


class Terraform:
    """A copy of infra/terraform, in which commands run."""

    def __init__(self, folder: Path, **settings: str) -> None:
        """`settings` are variables of the environment."""
        shutil.copytree(INFRA, folder)
        self.folder = folder
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "TF_"))}
        self._environment = kept | {"TF_CLI_CONFIG_FILE": "/dev/null", "TF_IN_AUTOMATION": "1"} | settings

    def run(self, root: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["terraform", f"-chdir={self.folder / root}", *arguments]
        return subprocess.run(command, env=self._environment, capture_output=True, text=True, timeout=540)

    def done(self, root: str, *arguments: str) -> str:
        """The output of a command that has to succeed."""
        ended = self.run(root, *arguments)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    def init(self, root: str, *arguments: str) -> None:
        self.done(root, "init", "-input=false", f"-plugin-dir={mirror()}", *arguments)


class Root(Terraform):
    """One root module on an emulated cloud."""

    def __init__(self, folder: Path, root: str, endpoint: str, variables: dict[str, Any], *backend: str) -> None:
        super().__init__(folder, AWS_ENDPOINT_URL=endpoint, **CREDENTIALS)
        self._root = root
        (folder / root / "emulated_override.tf").write_text(_OVERRIDE + (_RUN_OVERRIDE if root == "run" else ""))
        (folder / root / "given.auto.tfvars.json").write_text(json.dumps(variables))
        self.init(root, *(f"-backend-config={setting}" for setting in backend))

    def do(self, *arguments: str) -> str:
        return self.done(self._root, *arguments)

    def attempt(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.run(self._root, *arguments)

    def apply(self, *options: str) -> None:
        self.do("apply", "-input=false", "-auto-approve", *options)

    def destroy(self) -> None:
        self.do("destroy", "-input=false", "-auto-approve")

    def output(self, name: str) -> Any:
        return json.loads(self.do("output", "-json", name))

    def planned(self, *options: str) -> dict[str, list[str]]:
        """What applying the plan `next` would make and end: actions by address. Changes in place are left out, as the
        emulated cloud forgets descriptions and the like, which are then to be put again."""
        self.do("plan", "-input=false", "-out=next", *options)
        changes = json.loads(self.do("show", "-json", "next")).get("resource_changes", [])
        actions = {change["address"]: change["change"]["actions"] for change in changes}
        return {address: each for address, each in actions.items() if {"create", "delete"} & {*each}}
