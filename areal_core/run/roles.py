"""Command lines and environments of a run's processes, on the head node and on remote workers.

- `role_specs`: all roles of the head node. `rendezvous` is the meeting point of the torchrun agents if several machines
  train; `node` is the head node's own agent. `evaluation` are the evaluator's own generation servers. `files` is the
  data server for other machines.
- `generation`: generation servers, here or of a remote worker.
- `training_node`: one machine's share of the ranks, under torchrun.
- `remote_rewards`: reward workers of a remote worker, in one process.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from areal_core.config.engines import known_generation
from areal_core.config.schema import RunConfig
from areal_core.errors import ConfigError
from areal_core.evaluation.servers import ROLE as EVALUATION
from areal_core.launch.process import EXIT_FINAL
from areal_core.launch.supervisor import RoleSpec
from areal_core.storage.rundir import RunDir

LOOPBACK = "127.0.0.1"
_GENERATION_NICE = 10  # nice value of servers that share cores with ranks: about a tenth of a core beside a busy rank
_QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # suppresses a warning for every address without a host name


def role_specs(run: RunDir, config: RunConfig, cores: Sequence[int]) -> dict[str, RoleSpec]:
    """The process specification of every role of the head node, by role name.
    `cores` are the CPU cores that this process may use."""
    servers, ranks, per_server = config.generation_servers, config.trainer_processes, config.devices_per_server
    # In both modes, generation and training are pinned to `launch.devices` cores; other roles are not.
    on_cores = config.launch.accelerator == "cpu" and not config.emulated
    allowed = frozenset(cores[: config.launch.devices]) if on_cores else None

    def role(module: str) -> list[str]:
        return python(module, "--run-dir", run.root)

    generating = servers * per_server if config.mode == "async" and "generation" not in config.remote_roles else 0
    training = config.training_ranks // config.training.hosts if config.launch.head_trains else 0
    taken = generating + training if config.mode == "async" else max(servers * per_server, training)
    specs = (
        generation(run, config, address=LOOPBACK, first=0, count=servers, cpus=allowed),
        _evaluation(run, config, after=taken),
        RoleSpec(name="controller", argv=lambda _: role("areal_core.controller.service"), final=EXIT_FINAL),
        RoleSpec(
            name="trainer",
            argv=lambda _: role("areal_core.training.trainer"),
            count=ranks,
            cpus=allowed,
            gang=ranks > 1,
            env=lambda index: _rank(config, index) | _gpus(config, generating + index, 1),
        ),
        RoleSpec(
            name="rendezvous",
            argv=lambda _: python(
                "areal_core.training.distributed.rendezvous",
                *("--address", config.launch.address, "--ready-file", run.ready_file("rendezvous")),
            ),
            env=lambda _: _QUIET,
            exits=False,
        ),
        training_node(run, config, address=config.launch.address, node=0, after=generating),
        RoleSpec(name="files", argv=lambda _: role("areal_core.run.remote.files")),
        RoleSpec(
            name="evaluator", argv=lambda _: role("areal_core.evaluation.evaluator"), nice=config.launch.evaluator_nice
        ),
        RoleSpec(name="tracker", argv=lambda _: role("areal_core.tracking"), nice=config.launch.evaluator_nice),
    )
    return {spec.name: spec for spec in specs}


def training_node(run: RunDir, config: RunConfig, *, address: str, node: int, after: int = 0) -> RoleSpec:
    """The torchrun agent of one machine's share of the ranks.
    On GPUs, the ranks use the GPUs after the first `after` ones, which belong to generation servers."""

    def environment(_: int) -> dict[str, str]:
        name = interface(address)
        network = {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}
        return network | _QUIET | _gpus(config, after, config.ranks_per_host)

    return RoleSpec(
        name="node",
        argv=lambda index: python(
            "areal_core.training.distributed.node", *("--run-dir", run.root, "--address", address, "--node", index)
        ),
        first=node,
        announces=False,
        final=EXIT_FINAL,
        sessions=True,
        env=environment,
    )


def remote_rewards(run: RunDir, *, first: int, count: int) -> RoleSpec:
    """The process that hosts `count` reward workers of this machine, numbered from `first`."""
    where = ("--run-dir", run.root, "--first", first, "--workers", count)
    argv = python("areal_core.rewards.host", *where)
    return RoleSpec(name="rewards", argv=lambda _: argv, first=first, final=EXIT_FINAL, exits=False)


def visible_gpus() -> list[str]:
    """The GPUs that this process may use: those in CUDA_VISIBLE_DEVICES, or all GPUs if it is unset."""
    if (named := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name.strip() for name in named.split(",") if name.strip()]
    return [str(index) for index in range(len(list(Path("/dev").glob("nvidia[0-9]*"))))]


def interpreter(path: str | None) -> str:
    """The Python interpreter that runs vLLM: `path`, relative to the working directory, or this one."""
    return sys.executable if path is None else os.path.abspath(path)  # keep symlinks: a venv's is one


def python(module: str, *arguments: Any) -> list[str]:
    """The command line of a Python module, run by this interpreter."""
    return [sys.executable, "-m", module, *map(str, arguments)]


def interface(address: str) -> str:
    """The network interface of this machine that has `address`. Raises ConfigError if there is none."""
    if (name := interface_of(address)) is None:
        raise ConfigError(f"--address: no network interface of this machine has {address}")
    return name


def interface_of(address: str) -> str | None:
    """The network interface of this machine that has `address`, or None."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == address for one in addresses if one.family in (socket.AF_INET, socket.AF_INET6)):
            return name
    return None


def generation(
    run: RunDir, config: RunConfig, *, address: str, first: int, count: int, cpus: frozenset[int] | None = None
) -> RoleSpec:
    """`count` generation servers of this machine, numbered from `first`, that listen on `address`."""
    settings, per_server = config.generation, config.devices_per_server
    where = ("--host", address, "--slots", settings.slots)
    return RoleSpec(
        name="generation",
        argv=lambda index: _server(
            run, config, "generation", index, settings.engine, config.launch.accelerator, *where
        ),
        count=count,
        first=first,
        cpus=cpus,
        nice=_GENERATION_NICE if config.shares_cores else 0,
        spare=count > 1,
        env=lambda index: _gpus(config, (index - first) * per_server, per_server),
        exits=False,
    )


def _evaluation(run: RunDir, config: RunConfig, *, after: int) -> RoleSpec:
    """The evaluator's own servers; on GPUs, they use the GPUs after the first `after` ones.
    The scores of a version do not depend on how the servers batch requests."""
    its, where = config.evaluation, ("--host", LOOPBACK, "--slots", config.evaluation.slots)
    per_server = config.evaluation_devices // max(1, config.evaluation_servers)
    return RoleSpec(
        name=EVALUATION,
        argv=lambda index: _server(run, config, EVALUATION, index, its.engine, its.accelerator, *where),
        count=config.evaluation_servers,
        nice=config.launch.evaluator_nice,
        spare=config.evaluation_servers > 1,
        env=lambda index: _gpus(config, after + index * per_server, per_server),
        exits=False,
    )


def _server(
    run: RunDir, config: RunConfig, role: str, index: int, engine: str, device: str, *options: Any
) -> list[str]:
    """The command line of a generation server for the base model, with the context length of the tasks."""
    served = (
        *("--model", run.info().model_path, "--port", 0, "--token-file", run.token_file),
        *("--ready-file", run.ready_file(role, index), "--weight-version", 0),
        *("--context", config.context),
        *options,
    )
    if not known_generation(engine).own_server:
        return python(
            "areal_core.generation.server.routes",
            *served,
            *("--timeline", run.timeline_file(role, index), "--engine", engine, "--device", device),
            *(["--emulate", run.root / "config.json"] if config.emulated else []),
        )
    vllm = config.generation.vllm
    return python(
        "areal_core.generation.vllm.server",
        *served,
        *("--log-file", run.log_file("vllm" if role == "generation" else f"vllm-{role}", index)),
        *("--python", interpreter(vllm.python), "--dtype", vllm.dtype, f"--arguments={vllm.arguments}"),
        *("--tensor-parallel", vllm.tensor_parallel, "--data-parallel", vllm.data_parallel),
        *("--memory-share", vllm.memory_share, "--kv-cache-gib", vllm.kv_cache_gib),
        *([] if (rank := config.training.lora.rank) is None else ["--lora-rank", rank]),
        *(["--sleep"] if config.sleeps and role == "generation" else []),
    )


def _rank(config: RunConfig, index: int) -> dict[str, str]:
    """The environment that torchrun would give a rank of this machine.
    Ranks on one machine meet through a file and communicate over the loopback interface."""
    ranks = config.trainer_processes
    return {
        "RANK": str(index),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(index if config.launch.accelerator == "cpu" else 0),  # among its visible GPUs
        "LOCAL_WORLD_SIZE": str(ranks),
        "GLOO_SOCKET_IFNAME": "lo",
    }


def _gpus(config: RunConfig, first: int, count: int) -> dict[str, str]:
    """Environment that restricts a process to `count` GPUs of this machine, from index `first`."""
    if config.launch.accelerator == "cpu" or not count:
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(visible_gpus()[first : first + count])}
