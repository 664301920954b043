"""Is a node as it should be? Looked at before its share begins: a bad one is named, and replaced."""

from __future__ import annotations

import shutil
import subprocess
import time
import urllib.error
import urllib.request
from email.utils import parsedate_to_datetime
from pathlib import Path
from urllib.parse import urlsplit

from areal_core.config.groups import NodesConfig
from areal_core.config.schema import RunConfig
from areal_core.run.roles import visible_gpus
from areal_core.storage.durable import free_inodes

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
    if inodes is not None and inodes < (needed := config.launch.disk_low_inodes):
        return f"{inodes} inodes free in {folder}, should be {needed} (launch.disk_low_inodes)"
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
