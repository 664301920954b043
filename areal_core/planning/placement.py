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
    straddle two, and for heads that a tensor-parallel group can't partition. A server has no more GPUs than the run."""
    devices, vllm = config.launch.devices, config.generation.vllm
    per_host = config.launch.devices_per_host or devices
    machine = f"launch.devices_per_host ({per_host})"
    if devices > per_host:
        if devices % per_host:
            raise ConfigError(f"launch.devices: must be a multiple of {machine}, got {devices}")
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
    if config.generation_traits.own_server:
        _check_heads(vllm.tensor_parallel, spec)


def _check_heads(tensor_parallel: int, spec: ModelSpec) -> None:
    """As vLLM partitions them: query heads evenly; key-value heads evenly, or each to the same number of GPUs."""
    if spec.heads % tensor_parallel or (spec.kv_heads % tensor_parallel and tensor_parallel % spec.kv_heads):
        raise ConfigError(
            f"generation.vllm.tensor_parallel: must divide the model's {spec.heads} heads, and divide its "
            f"{spec.kv_heads} key-value heads or be a multiple of them, got {tensor_parallel}"
        )
