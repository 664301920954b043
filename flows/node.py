"""`python -m flows.node FILE`: the Prefect worker of a node that was provisioned.

FILE is what the node was told when it booted (`infra/terraform/modules/gpu_pool/user_data.sh.tftpl`), or, on a host
that is given (`provision=static`), what somebody has written there: its run and role, the work queue that its share of
the run comes by, and the names of the secrets that the share needs. Secrets are read from the cloud's parameter store
into the environment, which none but this user's processes can see; then this process becomes the worker. Where FILE or
a secret is not as it must be it ends with one line; who started it tries again.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import msgspec

from areal_core.run.command import run_command
from flows.machine import identity, secret_values, told


class Prefect(msgspec.Struct, forbid_unknown_fields=True):
    """Where work comes from."""

    api_url: str
    work_pool: str
    work_queue: str


class Node(msgspec.Struct, forbid_unknown_fields=True):
    """What a node is told when it boots. None of it is secret."""

    run: str  # `static` for a host of no run's own
    role: str
    prefect: Prefect
    region: str = ""
    expires_at: str = ""  # RFC 3339; the node shuts itself down then
    environment: dict[str, str] = {}
    secrets: dict[str, str] = {}  # environment variable -> name of the parameter that holds its value


def worker() -> NoReturn:
    """Become the worker of the node's queue; one piece of work at a time, as it uses the whole node."""
    node = told(Node)
    environment = {
        **os.environ,
        **node.environment,
        **secret_values(node.region, node.secrets),
        "DO_NOT_TRACK": "1",
        "PREFECT_API_URL": node.prefect.api_url,
        "PREFECT_WORKER_ENABLE_CANCELLATION": "true",
    }
    argv = [sys.executable, "-m", "prefect", "worker", "start", "--type", "process", "--limit", "1"]
    argv += ["--pool", node.prefect.work_pool, "--work-queue", node.prefect.work_queue]
    argv += ["--name", f"{node.run}-{node.role}-{identity()}"]
    os.execve(sys.executable, argv, environment)


if __name__ == "__main__":
    sys.exit(run_command(worker))
