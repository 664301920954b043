"""`areal nodes`: plan, create, list and destroy the AWS nodes of a run by hand.

FILE is YAML with the variables of infra/terraform/run/variables.tf. Outputs of `make control` are the defaults. Applied
nodes have a lease until `lease.expires_at`; then the reaper destroys them, unless you have destroyed them before.
Exit status 0: done. Exit status 1: failed or not confirmed. Exit status 2: a setting is wrong.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from areal_core.errors import ConfigError, ProvisionError, one_line
from flows import cli
from flows.places import STATE
from flows.provision.leased import LeasedNodes, cloud_of
from flows.provision.nodes import Host, Nodes
from flows.provision.terraform import Plan


def main(arguments: Sequence[str]) -> None:
    """Plan, create, list or destroy nodes.
    Raises ConfigError, and ProvisionError on failure or without confirmation."""
    parser = cli.parser("nodes", "plan nodes.yaml", "apply nodes.yaml --yes", "destroy nodes.yaml")
    parser.add_argument("action", choices=("plan", "apply", "hosts", "destroy"))
    parser.add_argument("file", type=Path, help="YAML file with the variables of infra/terraform/run/variables.tf")
    parser.add_argument("--yes", action="store_true", help="apply the plan without asking")
    parser.add_argument(
        "--replace", nargs="*", default=[], metavar="NAME", help="names of nodes to recreate, such as generation-0"
    )
    options = parser.parse_args(arguments)
    console, request = Console(highlight=False), read(options.file)

    def log(line: str) -> None:
        console.print(line, markup=False, soft_wrap=True)

    if options.action in ("plan", "hosts"):
        with Nodes(request, STATE, lock_timeout_s=None, log=log) as nodes:
            if options.action == "plan":
                _show(nodes.plan(replace=options.replace), console)
            else:
                cloud = cloud_of(nodes.variables["foundation"])
                there = {found.id for found in cloud.found(nodes.run)}  # the reaper does not update Terraform's state
                _list([host for host in nodes.hosts() if host.id in there], console)
        return

    def agreed(plan: Plan) -> None:
        _show(plan, console)
        if plan.changes:
            _confirm(f"Run {request['run']}: {plan}.", options.yes)

    with LeasedNodes(request, STATE, by="command", kept_until=_expiry(request), log=log) as nodes:
        if options.action == "destroy":
            nodes.end(agreed)
        else:
            _list(nodes.replace(options.replace, agreed) if options.replace else nodes.make(agreed), console)


def read(path: Path) -> dict[str, Any]:
    """Read a request from a YAML file. Raises ConfigError."""
    try:
        values = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {one_line(error)}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: must hold the variables of infra/terraform/run/variables.tf, as name: value")
    return json.loads(json.dumps(values, default=_text))


def _text(value: object) -> str:
    """Text of a time, which YAML parses and Terraform expects as text."""
    if isinstance(value, datetime) and value.tzinfo:
        return value.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return str(value)


def _expiry(request: Mapping[str, Any]) -> float:
    """Expiry of the nodes' lease, in seconds since 1970. Raises ConfigError."""
    lease = request.get("lease")
    expires_at = lease.get("expires_at") if isinstance(lease, Mapping) else None
    try:
        return datetime.strptime(str(expires_at), "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC).timestamp()
    except ValueError:
        raise ConfigError(
            f"lease.expires_at: must be a time in UTC, as 2030-01-31T12:00:00Z, got {expires_at!r}"
        ) from None


def _confirm(what: str, sure: bool) -> None:
    if not sure and not (sys.stdin.isatty() and input(f"{what} Type yes to apply the plan: ") == "yes"):
        raise ProvisionError("not confirmed, so nothing was changed; answer yes, or give --yes")


def _show(plan: Plan, console: Console) -> None:
    for change in plan.changes:
        console.print(f"{change.action:8} {change.address}", markup=False, soft_wrap=True)
    console.print(f"Plan: {plan}.", markup=False)


def _list(hosts: list[Host], console: Console) -> None:
    for host in hosts:
        spot = "spot" if host.spot else "on demand"
        line = f"{host.name:14} {host.address:15} {host.id:19} {host.type:14} {spot}"
        console.print(line, markup=False, soft_wrap=True)
    if not hosts:
        console.print("No nodes.")
