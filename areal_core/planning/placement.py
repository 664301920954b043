"""Which GPUs of which machine the servers and ranks of a run take, and what can't be placed.

Servers take GPUs from the first one on, `tensor_parallel x data_parallel` each; ranks those after them (asynchronous
mode), or the same ones from the first on (synchronous mode). Machines have `launch.devices_per_host` GPUs each.
"""

from __future__ import annotations

from areal_core.config.schema import RunConfig
from areal_core.errors import ConfigError
from areal_core.models.spec import ModelSpec


def check_placement(config: RunConfig, spec: ModelSpec) -> None:
    """Raises ConfigError for machines that are not filled, for servers that no machine holds as a whole or that would
    straddle two, and for heads that a tensor-parallel group can't partition."""
    devices, per_host = config.launch.devices, config.launch.devices_per_host or config.launch.devices
    if devices > per_host:
        _check_machines(config, per_host)
    elif config.devices_per_server > per_host:
        raise ConfigError(
            f"generation.vllm.tensor_parallel: a server takes {config.devices_per_server} GPUs "
            f"(tensor_parallel x data_parallel) of one machine, which has {per_host}"
        )
    if config.generation_traits.own_server:
        _check_heads(config.generation.vllm.tensor_parallel, spec)


def _check_machines(config: RunConfig, per_host: int) -> None:
    machine = f"launch.devices_per_host ({per_host})"
    if config.launch.devices % per_host:
        raise ConfigError(f"launch.devices: must be a multiple of {machine}, got {config.launch.devices}")
    vllm = config.generation.vllm
    if config.generation_traits.own_server and per_host % vllm.tensor_parallel:
        raise ConfigError(
            f"generation.vllm.tensor_parallel: must divide {machine}, so that no group straddles two machines, "
            f"got {vllm.tensor_parallel}"
        )
    if per_host % config.devices_per_server:
        raise ConfigError(
            f"generation.vllm.data_parallel: with tensor_parallel={vllm.tensor_parallel} a server takes "
            f"{config.devices_per_server} GPUs, which must divide {machine}; got {vllm.data_parallel}"
        )
    if config.training_ranks % per_host:
        raise ConfigError(
            f"training.ranks: must be a multiple of {machine}, so that ranks fill whole machines, "
            f"got {config.training_ranks}"
        )


def _check_heads(tensor_parallel: int, spec: ModelSpec) -> None:
    """As vLLM partitions them: query heads evenly; key-value heads evenly, or each to the same number of GPUs."""
    if spec.heads % tensor_parallel or (spec.kv_heads % tensor_parallel and tensor_parallel % spec.kv_heads):
        raise ConfigError(
            f"generation.vllm.tensor_parallel: must divide the model's {spec.heads} heads, and divide its "
            f"{spec.kv_heads} key-value heads or be a multiple of them, got {tensor_parallel}"
        )
