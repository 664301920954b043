"""The nodes of one run: the Terraform root module `run` with its variables, state and outputs.

The state of the root module `control` (`make control`) supplies defaults, so that a request need not repeat them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_core.errors import ConfigError
from areal_core.launch.supervisor import FileLock
from flows.provision.terraform import Plan, Terraform

_BUSY_S = 5.0  # patience with another command on this machine


@dataclass(frozen=True, kw_only=True)
class Host:
    """A node that exists, or a host that the user provides."""

    name: str  # such as generation-0
    role: str
    address: str  # address for the other nodes; empty if unknown
    id: str  # the cloud's id
    type: str  # the cloud's instance type; empty if unknown
    spot: bool


class Nodes:
    """Context manager for the nodes of a run, exclusive on this machine.
    Raises ConfigError and ProvisionError."""

    def __init__(self, request: Mapping[str, Any], state: Path, *, busy_s: float = _BUSY_S, **options: Any) -> None:
        """Lock the run's folder and prepare Terraform.

        `request` holds variables of the root module `run`. The outputs of `control` supply a missing `foundation` and
        Prefect address. `state` is the state folder of this checkout. `busy_s` is the longest wait for another process
        on this machine that works on the nodes, including a terraform whose parent has died. `options` are those of
        Terraform."""
        self.variables = with_defaults(request, control_outputs(state))
        self.run = str(self.variables["run"])
        self.folder = state / "provision" / self.run
        self.folder.mkdir(parents=True, exist_ok=True)
        foundation = self.variables["foundation"]
        self.state_name = f"terraform/runs/{self.run}.tfstate"  # Terraform's state in the bucket
        where = {"key": self.state_name} | {k: foundation[k] for k in ("bucket", "region")}
        self._lock = FileLock(
            self.folder / "lock",
            timeout_s=busy_s,
            busy=f"run {self.run}: another command on this machine is changing its nodes; retry later",
        )
        self.terraform = Terraform("run", self.folder, backend=where, keep=(self._lock.fd,), **options)

    def __enter__(self) -> Nodes:
        self.terraform.init()
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def plan(self, *, replace: Iterable[str] = ()) -> Plan:
        """Plan the changes that make the nodes as requested; `replace` names hosts to recreate."""
        roles = {name: name.rpartition("-")[0] for name in replace}
        bad = [f'module.nodes["{role}"].aws_instance.node["{name}"]' for name, role in roles.items()]
        return self.terraform.plan(self.variables, replace=bad)

    def plan_end(self) -> Plan:
        """Plan the destruction of all nodes."""
        return self.terraform.plan(self.variables, destroy=True)

    def hosts(self) -> list[Host]:
        """Hosts in Terraform's state, sorted by role and index."""
        hosts = [Host(**host) for host in self.terraform.outputs().get("hosts", [])]
        return sorted(hosts, key=lambda host: (host.role, int(host.name.rpartition("-")[2])))


def control_outputs(state: Path) -> dict[str, Any]:
    """Outputs of the root module `control`; empty if it was not applied from this checkout."""
    try:
        outputs = json.loads((state / "control" / "terraform.tfstate").read_text())["outputs"]
    except FileNotFoundError:
        return {}
    return {name: output["value"] for name, output in outputs.items()}


def with_defaults(request: Mapping[str, Any], control: Mapping[str, Any]) -> dict[str, Any]:
    """All variables of the root module `run`. Raises ConfigError."""
    variables = dict(request)
    if not variables.get("run"):
        raise ConfigError("run: must be given, the id of the run")
    if "foundation" not in variables:
        if "foundation" not in control:
            raise ConfigError("foundation: must be given, or run `make control` here, whose outputs contain it")
        variables["foundation"] = control["foundation"]
    prefect = dict(variables.get("prefect") or {})
    if "prefect_api_url" in control:
        prefect.setdefault("api_url", control["prefect_api_url"])
    prefect.setdefault("work_pool", "areal-nodes")
    return variables | {"prefect": prefect}


# ---- cloud resources of runs, whether or not a Terraform state holds them (aws.py) ----


NODE = "aws_instance"  # kind of a node


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudResource:
    """A cloud resource of a run."""

    kind: str  # Terraform's resource type, such as aws_instance
    id: str  # id in Terraform's states
    run: str
    role: str | None = None  # role of a node
    since: float | None = None  # creation time, in seconds since 1970; None: unknown
    own_vpc: bool = False  # in the VPC that `control` made; an account may have several stores

    @property
    def key(self) -> tuple[str, str]:
        return self.kind, self.id

    def __str__(self) -> str:
        return f"{self.kind} {self.id}"
