"""The nodes of one run, as the root module `run` makes them: planned, made, told, ended.

What `control` has made (`make control`) is found in its state, so that a request need not repeat it.
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

_BUSY_S = 5.0  # for another command of this machine to end


@dataclass(frozen=True, kw_only=True)
class Host:
    """A node that there is."""

    name: str  # generation-0
    role: str
    address: str  # that the other nodes reach
    id: str  # the cloud's
    type: str  # the cloud's name for such machines
    spot: bool


class Nodes:
    """A context: the nodes of a run, while nobody else on this machine works on them. Raises ConfigError and
    ProvisionError."""

    def __init__(
        self,
        request: Mapping[str, Any],
        state: Path,
        *,
        busy_s: float = _BUSY_S,
        **options: Any,
    ) -> None:
        """`request` holds the variables of the root module; `foundation` and the address of Prefect are taken from
        `control` where it has none. `state` is the state folder of this checkout. Whoever works
        on the run's nodes from this machine is waited for, for `busy_s`, a terraform whose parent has died included.
        `options` are those of Terraform."""
        self.variables = completed(request, control_outputs(state))
        self.run = str(self.variables["run"])
        self.folder = state / "provision" / self.run
        self.folder.mkdir(parents=True, exist_ok=True)
        foundation = self.variables["foundation"]
        self.state_name = f"terraform/runs/{self.run}.tfstate"  # of Terraform's state in the bucket
        where = {"key": self.state_name} | {k: foundation[k] for k in ("bucket", "region")}
        self._lock = FileLock(
            self.folder / "lock",
            timeout_s=busy_s,
            busy=f"run {self.run}: another command is at its nodes on this machine",
        )
        self.terraform = Terraform("run", self.folder, backend=where, keep=(self._lock.fd,), **options)

    def __enter__(self) -> Nodes:
        self.terraform.init()
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def plan(self, *, replace: Iterable[str] = ()) -> Plan:
        """What is to change for the nodes to be as requested; `replace` names hosts that are bad."""
        roles = {name: name.rpartition("-")[0] for name in replace}
        bad = [f'module.nodes["{role}"].aws_instance.node["{name}"]' for name, role in roles.items()]
        return self.terraform.plan(self.variables, replace=bad)

    def plan_end(self) -> Plan:
        """What there is to end."""
        return self.terraform.plan(self.variables, destroy=True)

    def hosts(self) -> list[Host]:
        """Those that Terraform's state holds, by their names."""
        hosts = [Host(**host) for host in self.terraform.outputs().get("hosts", [])]
        return sorted(hosts, key=lambda host: (host.role, int(host.name.rpartition("-")[2])))


def control_outputs(state: Path) -> dict[str, Any]:
    """What the root module `control` says of what it has made; nothing where it has made nothing here."""
    try:
        told = json.loads((state / "control" / "terraform.tfstate").read_text())["outputs"]
    except FileNotFoundError:
        return {}
    return {name: output["value"] for name, output in told.items()}


def completed(request: Mapping[str, Any], control: Mapping[str, Any]) -> dict[str, Any]:
    """All variables of the root module. Raises ConfigError."""
    variables = dict(request)
    if not variables.get("run"):
        raise ConfigError("run: must be the id of a run")
    if "foundation" not in variables:
        if "foundation" not in control:
            raise ConfigError("foundation: must be what `control` has made, and `make control` has made nothing here")
        variables["foundation"] = control["foundation"]
    prefect = dict(variables.get("prefect") or {})
    if "prefect_api_url" in control:
        prefect.setdefault("api_url", control["prefect_api_url"])
    prefect.setdefault("work_pool", "areal-nodes")
    return variables | {"prefect": prefect}


# ---- what a cloud holds of runs that no state of Terraform has: it never entered one, or was removed (aws.py) ----


NODE = "aws_instance"  # kind of what is a node


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Something that there is of a run."""

    kind: str  # as Terraform calls it: aws_instance
    id: str  # as Terraform has it in its states
    run: str
    role: str | None = None  # of a node
    since: float | None = None  # when it was made, in seconds since 1970; None: nobody knows
    near: bool = False  # it is in the network that `control` has made, whatever other stores the account has

    @property
    def key(self) -> tuple[str, str]:
        return self.kind, self.id

    def __str__(self) -> str:
        return f"{self.kind} {self.id}"
