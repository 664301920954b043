"""`python -m flows.node FILE`: the Prefect worker of a node that was provisioned.

FILE names the run, the node's role, the work queue of its share, and the secrets that the share needs. The node's user
data writes it (`infra/terraform/modules/gpu_pool/user_data.sh.tftpl`). With `provision=static` you write it yourself.
This process reads the secrets from the cloud's parameter store into its environment, which only processes of the same
user can see. Then it becomes the worker. If FILE or a secret is wrong, it ends with one line, and its starter tries
again.
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
