"""Terraform variables of a run's nodes, and the configuration overrides of a run on nodes."""

from __future__ import annotations

import getpass
import socket
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from areal_core.config.groups import NodesConfig, StorageConfig, shell_pairs
from areal_core.config.schema import RunConfig
from areal_core.errors import ConfigError

ROLES = ("generation", "trainer")
_TRACKING = "MLFLOW_TRACKING_URI"


def by_role(config: RunConfig) -> dict[str, NodesConfig]:
    """The nodes of every role that has at least one."""
    each = zip(ROLES, (config.provision.generation, config.provision.trainer), strict=True)
    return {role: nodes for role, nodes in each if nodes.count}


def variables(config: RunConfig, run_id: str, control: Mapping[str, Any], now: datetime) -> dict[str, Any]:
    """Variables of the root module `run` (infra/terraform/run/variables.tf).
    `control` are the outputs of the root module `control`. Raises ConfigError."""
    its = config.provision
    environment, asked = shell_pairs("provision.environment", its.environment), by_role(config)
    if "mlflow_url" in control:
        environment.setdefault(_TRACKING, control["mlflow_url"])
    values: dict[str, Any] = {
        "run": run_id,
        "nodes": {
            role: {name: getattr(nodes, name) for name in ("count", "gpu", "gpus", "spot", "max_price", "disk_gib")}
            for role, nodes in asked.items()
        },
        "lease": {
            "owner": its.owner or f"{getpass.getuser()}@{socket.gethostname()}",
            "expires_at": (now + timedelta(hours=its.hours)).astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        },
        "prefect": {"api_url": its.prefect_api_url or _api_url(control), "work_pool": its.work_pool},
        "environment": environment,
        "secrets": shell_pairs("provision.secrets", its.secrets),
        "software": {"path": its.software} | ({} if its.install is None else {"install": _script(its.install)}),
        "image": its.image,
    }
    return values if its.zone is None else values | {"zone": its.zone}


def overrides(config: RunConfig, control: Mapping[str, Any]) -> list[str]:
    """Overrides for a run on nodes: remote roles, servers, ranks, devices and store.
    The first trainer node is the head node. Raises ConfigError."""
    roles, its = by_role(config), config.provision
    remote = [role for role in roles if role == "generation" or its.trainer.count > 1]
    chosen = ["launch.remote_roles=" + ("both" if len(remote) > 1 else remote[0] if remote else "none")]
    if "generation" in remote:
        per_node = max(1, its.generation.gpus // config.devices_per_server)
        chosen.append(f"generation.servers={its.generation.count * per_node}")
    if "trainer" in remote:
        chosen.append(f"training.hosts={its.trainer.count}")
        if config.training.ranks is None:
            chosen.append(f"training.ranks={its.trainer.count * max(1, its.trainer.gpus)}")
    if gpus := sum(nodes.count * nodes.gpus for nodes in roles.values()):
        chosen += [f"launch.devices={gpus}", f"launch.devices_per_host={max(nodes.gpus for nodes in roles.values())}"]
    if config.storage.url == StorageConfig.url:
        if "foundation" not in control:
            raise ConfigError("storage.url: must be a store that all nodes can reach, as s3://bucket/prefix")
        chosen.append(f"storage.url=s3://{control['foundation']['bucket']}")
    return chosen


def servers_per_node(config: RunConfig) -> int:
    """Generation servers per node, for a configuration with `overrides` applied."""
    return config.generation_servers // max(1, config.provision.generation.count)


def queue(config: RunConfig, run_id: str, role: str) -> str:
    """The Prefect work queue of a role's nodes."""
    return role if config.provision.kind == "static" else f"{run_id}-{role}"


def _api_url(control: Mapping[str, Any]) -> str:
    """Address of Prefect's API for nodes, from the outputs of `control`. Raises ConfigError."""
    if "prefect_api_url" not in control:
        raise ConfigError(
            "provision.prefect_api_url: must be given, as http://HOST:4200/api, or run `make control` here first"
        )
    return control["prefect_api_url"]


def _script(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError as error:
        raise ConfigError(f"provision.install: can't read {path}: {error.strerror}") from None
