"""Helpers for programs on a node: boot file, secrets, GPUs, and the cloud's metadata service.

Secrets are in the cloud's parameter store (AWS SSM). The metadata service announces the reclaim of a spot node two
minutes ahead.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import boto3
import msgspec
from botocore.exceptions import BotoCoreError, ClientError

from areal_core.config.groups import NodesConfig
from areal_core.errors import ConfigError, StorageError
from areal_core.run.roles import visible_gpus

T = TypeVar("T")

_AT_ONCE = 10  # most parameters per request
_METADATA = "http://169.254.169.254/latest"
_TOKEN_S = 60
_POLL_S = 5.0  # interval of checks for the notice
_METADATA_S = 2.0  # short: the service answers at once where it exists


def read_boot_file(kind: type[T]) -> T:
    """Read the boot file that the command line names. Raises ConfigError."""
    if len(sys.argv) != 2:
        raise ConfigError(f"{Path(sys.argv[0]).name}: must get one argument, the boot file, got {len(sys.argv) - 1}")
    try:
        return msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{sys.argv[1]}: {error}") from None


def secret_values(region: str, names: Mapping[str, str]) -> dict[str, str]:
    """Values of the parameters in `names`, under the same keys.
    Raises ConfigError for a missing parameter. Raises StorageError if the parameter store fails."""
    asked = sorted(set(names.values()))
    values: dict[str, str] = {}
    if not asked:
        return {}
    try:
        store = boto3.client("ssm", region_name=region)
        for first in range(0, len(asked), _AT_ONCE):
            found = store.get_parameters(Names=asked[first : first + _AT_ONCE], WithDecryption=True)
            values |= {parameter["Name"]: parameter["Value"] for parameter in found["Parameters"]}
    except (BotoCoreError, ClientError) as error:
        raise StorageError(f"secrets: {error}") from None
    if absent := [name for name in asked if name not in values]:
        raise ConfigError(f"secrets: must be SSM parameters in {region}, which has no {', '.join(absent)}")
    return {key: values[name] for key, name in names.items()}


def identity() -> str:
    """The cloud's id of this machine; its host name if no cloud gives one."""
    return metadata("instance-id") or socket.gethostname()


class ReclaimNotice:
    """Context manager that polls, in a thread, for the cloud's notice that it reclaims this machine."""

    def __init__(self, log: Callable[[str], None]) -> None:
        self.text: str | None = None  # the cloud's notice; None before it
        self._log = log
        self._over = threading.Event()
        self._action: Callable[[str], None] = lambda text: None
        self._thread = threading.Thread(target=self._poll, name="notice", daemon=True)

    def __enter__(self) -> ReclaimNotice:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def on_arrival(self, action: Callable[[str], None]) -> None:
        """Call `action` with the notice once it arrives, in the polling thread; at once if it has arrived."""
        self._action = action
        if self.text is not None:
            action(self.text)

    def _poll(self) -> None:
        while not self._over.wait(_POLL_S):
            if text := metadata("spot/instance-action"):
                self.text = " ".join(text.split())
                self._log(f"the cloud reclaims this node: {self.text}")
                self._action(self.text)
                return


def metadata(name: str) -> str | None:
    """Read an entry of the cloud's metadata service; None if the entry or the service does not exist."""
    try:
        token = _metadata("PUT", "api/token", {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_S)})
        return _metadata("GET", f"meta-data/{name}", {"X-aws-ec2-metadata-token": token})
    except OSError:  # not found, no service, or no response in time
        return None


def _metadata(method: str, path: str, headers: Mapping[str, str]) -> str:
    asked = urllib.request.Request(f"{_METADATA}/{path}", headers=dict(headers), method=method)
    with urllib.request.urlopen(asked, timeout=_METADATA_S) as response:
        return response.read().decode()


def own_address(url: str) -> str:
    """This machine's address on the route to the host of `url`. Sends no packet."""
    where = urlsplit(url)
    family, kind, *_, address = socket.getaddrinfo(where.hostname, where.port or 80, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return probe.getsockname()[0]


_NVIDIA_SMI_S = 60.0  # a machine's first call loads the driver


def gpu_problem(nodes: NodesConfig) -> str | None:
    """Check the node's driver and number of GPUs against the run's needs; return the problem, or None."""
    if not nodes.gpus:
        return None
    try:
        command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        text = subprocess.run(command, capture_output=True, text=True, timeout=_NVIDIA_SMI_S, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return f"nvidia-smi failed, so the image lacks a GPU driver or its GPU: {error}"
    found = min(len(text.splitlines()), len(visible_gpus()))
    return None if found >= nodes.gpus else f"must have {nodes.gpus} GPUs, has {found}: {'; '.join(text.splitlines())}"
