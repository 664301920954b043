"""What a run uses of this machine: GPUs, their memory, interpreters, and the packages that not every run needs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Collection, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from areal_core.config.schema import RunConfig
from areal_core.errors import ConfigError
from areal_core.planning.footprint import GIB

HEAD = "head"  # the launcher's machine, as the place of what no other role does
_NVIDIA_SMI_S = 30.0


def check_packages(config: RunConfig, roles: Collection[str]) -> None:
    """Raises ConfigError for a package that one of these roles (generation, trainer, HEAD) imports with this
    configuration, and that this Python lacks. What every part of the package imports is not asked after."""
    for package, role, setting in _packages(config):
        if role in roles and find_spec(package) is None:
            raise ConfigError(
                f"{setting}: needs the package {package}, which {sys.executable} lacks; pyproject.toml has its version"
            )


def _packages(config: RunConfig) -> Iterator[tuple[str, str, str]]:
    """Package, the role that imports it, the setting that asks for it."""
    generation, evaluation = config.generation, config.evaluation
    for package in config.generation_traits.on(config.launch.accelerator):
        yield package, "generation", f"generation.engine={generation.engine}"
    if config.evaluated and evaluation.servers:
        for package in config.evaluation_traits.on(evaluation.accelerator):
            yield package, HEAD, f"evaluation.engine={evaluation.engine}"
    for package in config.training_traits.packages:
        yield package, "trainer", f"training.engine={config.training.engine}"
    if config.tracking.enabled:
        yield "mlflow", HEAD, "tracking.enabled=true"
    if config.storage.url.startswith("s3://"):
        yield "s3fs", HEAD, "storage.url=s3://..."
        yield "s3fs", "trainer", "storage.url=s3://..."


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES has it; all of the machine's where it is unset."""
    if (named := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name.strip() for name in named.split(",") if name.strip()]
    return [str(index) for index in range(len(list(Path("/dev").glob("nvidia[0-9]*"))))]


def device_memory(config: RunConfig) -> float:
    """Bytes of the smallest GPU that the run may use: launch.device_memory_gib, else what nvidia-smi says. Raises
    ConfigError when it can't be run."""
    if config.launch.device_memory_gib is not None:
        return config.launch.device_memory_gib * GIB
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    if gpus := visible_gpus()[: config.launch.devices]:
        command.append(f"--id={','.join(gpus)}")
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=_NVIDIA_SMI_S, check=True).stdout
        return min(int(line) for line in asked.split()) * 2**20
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise ConfigError(
            f"launch.device_memory_gib: must be given where nvidia-smi can't be asked for it ({error})"
        ) from None


def interpreter(path: str | None) -> str:
    """The Python that runs vLLM: a path, from the working directory, or this one."""
    return sys.executable if path is None else os.path.abspath(path)  # not resolved: a venv's is a link


def python(module: str, *arguments: Any) -> list[str]:
    """The command line of a module of this package, run by this interpreter."""
    return [sys.executable, "-m", module, *map(str, arguments)]
