"""Helpers for programs on a node: its boot file, secrets, and the cloud's metadata service.

Secrets lie in the cloud's parameter store (AWS's SSM). The metadata service announces the end of a spot node two
minutes before.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import boto3
import msgspec
from botocore.exceptions import BotoCoreError, ClientError

from areal_core.config.groups import NodesConfig
from areal_core.config.schema import RunConfig
from areal_core.errors import ConfigError, StorageError
from areal_core.run.folders import LOW_INODES
from areal_core.run.roles import visible_gpus
from areal_core.storage.durable import free_inodes

T = TypeVar("T")

_AT_ONCE = 10  # parameters that one request may name
_METADATA = "http://169.254.169.254/latest"
_TOKEN_S = 60
_LOOK_S = 5.0  # between two looks whether the machine is to be reclaimed
_METADATA_S = 2.0  # it is on this machine, or there is none


def told(kind: type[T]) -> T:
    """What the machine was told, from the file that the command line names. Raises ConfigError."""
    if len(sys.argv) != 2:
        raise ConfigError(f"{Path(sys.argv[0]).name}: must be given the file that says what the machine was told")
    try:
        return msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{sys.argv[1]}: {error}") from None


def secret_values(region: str, names: Mapping[str, str]) -> dict[str, str]:
    """The values of the parameters that `names` names, by its keys. Raises ConfigError for those that there are not,
    and StorageError where the store doesn't say."""
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
        raise ConfigError(f"secrets: there is no parameter {', '.join(absent)} in {region}")
    return {key: values[name] for key, name in names.items()}


def identity() -> str:
    """The cloud's id of this machine; its host name where no cloud says one."""
    return metadata("instance-id") or socket.gethostname()


class Notice:
    """A context that looks, in a thread, whether the cloud is to take this machine back."""

    def __init__(self, log: Callable[[str], None]) -> None:
        self.text: str | None = None  # what the cloud has said; None so far
        self._log = log
        self._over = threading.Event()
        self._heed: Callable[[str], None] = lambda text: None
        self._thread = threading.Thread(target=self._look, name="notice", daemon=True)

    def __enter__(self) -> Notice:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def heed(self, action: Callable[[str], None]) -> None:
        """Have `action` called with the notice, in a thread, once there is one."""
        self._heed = action
        if self.text is not None:
            action(self.text)

    def _look(self) -> None:
        while not self._over.wait(_LOOK_S):
            if text := metadata("spot/instance-action"):
                self.text = " ".join(text.split())
                self._log(f"this node is to be reclaimed: {self.text}")
                self._heed(self.text)
                return


def metadata(name: str) -> str | None:
    """What the cloud's metadata service says of this machine; None where it says nothing, or there is none."""
    try:
        token = _metadata("PUT", "api/token", {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_S)})
        return _metadata("GET", f"meta-data/{name}", {"X-aws-ec2-metadata-token": token})
    except OSError:  # not found, nobody there, no response in time
        return None


def _metadata(method: str, path: str, headers: Mapping[str, str]) -> str:
    asked = urllib.request.Request(f"{_METADATA}/{path}", headers=dict(headers), method=method)
    with urllib.request.urlopen(asked, timeout=_METADATA_S) as response:
        return response.read().decode()


def own_address(url: str) -> str:
    """The address of this machine by which it reaches the host of `url`, which is sent nothing."""
    where = urlsplit(url)
    family, kind, *_, address = socket.getaddrinfo(where.hostname, where.port or 80, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return probe.getsockname()[0]


# ---- is the node as it should be? ----


_GIB = 2**30
_CLOCK_S = 10.0  # that a clock may be wrong by: the store takes no requests of one that is far off
_NETWORK_S = 10.0
_NVIDIA_SMI_S = 60.0  # the first call of a machine loads the driver


def troubles(config: RunConfig, nodes: NodesConfig, prefect_api: str) -> list[str]:
    """What this node lacks of what the run asks of its role's: driver, GPUs, disk, network, clock. A line each."""
    store = config.storage.endpoint_url  # Amazon's is reached by what comes with the machine; another one may not be
    found = (_gpus(nodes), _disk(config), _response(store)[1] if store else None, _clock(prefect_api))
    return [each for each in found if each]


def _gpus(nodes: NodesConfig) -> str | None:
    if not nodes.gpus:
        return None
    try:
        command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        told = subprocess.run(command, capture_output=True, text=True, timeout=_NVIDIA_SMI_S, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return f"no driver: nvidia-smi can't be asked ({error})"
    found = min(len(told.splitlines()), len(visible_gpus()))
    return None if found >= nodes.gpus else f"{found} GPUs, should be {nodes.gpus}: {'; '.join(told.splitlines())}"


def _disk(config: RunConfig) -> str | None:
    folder = Path(config.state_dir)
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free / _GIB
    if free < (needed := config.launch.disk_low_gib):
        return f"{free:.1f} GiB free in {folder}, should be {needed:g} (launch.disk_low_gib)"
    inodes = free_inodes(folder)
    if inodes is not None and inodes < LOW_INODES:
        return f"{inodes} inodes free in {folder}, should be {LOW_INODES}"
    return None


def _clock(prefect_api: str) -> str | None:
    before = time.time()
    date, trouble = _response(f"{prefect_api.rstrip('/')}/health")
    if date is None:
        return trouble
    off = before - parsedate_to_datetime(date).timestamp()
    return None if abs(off) < _CLOCK_S else f"its clock is {off:+.0f} s off that of Prefect's server"


def _response(url: str) -> tuple[str | None, str | None]:
    """The date of a response, whichever it is, or what is wrong."""
    try:
        with urllib.request.urlopen(url, timeout=_NETWORK_S) as response:
            return response.headers["Date"], None
    except urllib.error.HTTPError as refused:
        return refused.headers["Date"], None
    except OSError as error:
        return None, f"can't reach {urlsplit(url).netloc}: {getattr(error, 'reason', error)}"
