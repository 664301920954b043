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
from flows.machine import identity, read_boot_file, secret_values


class Prefect(msgspec.Struct, forbid_unknown_fields=True):
    """Prefect's API, work pool and work queue."""

    api_url: str
    work_pool: str
    work_queue: str


class Node(msgspec.Struct, forbid_unknown_fields=True):
    """Boot file of a node. It contains no secrets."""

    run: str  # run id; `static` for a host that serves any run
    role: str
    prefect: Prefect
    region: str = ""
    expires_at: str = ""  # RFC 3339; the node then shuts itself down
    environment: dict[str, str] = {}
    secrets: dict[str, str] = {}  # environment variable -> name of its parameter


def worker() -> NoReturn:
    """Become the worker of the node's queue.
    It runs one share at a time, because a share uses the whole node."""
    node = read_boot_file(Node)
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
