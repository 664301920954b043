"""Find training engines by name or import path."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from torch import Tensor

from areal_core.config.plugins import find
from areal_core.config.schema import RunConfig
from areal_core.models.spec import ModelSpec
from areal_core.training.distributed.ranks import RankGroup
from areal_core.training.engines.emulated import EmulatedTrainingEngine
from areal_core.training.engines.engine import TrainingEngine
from areal_core.training.engines.policy_engine import PolicyEngine
from areal_core.training.engines.torch_engine import TorchEngine

MakeEngine = Callable[[RunConfig, ModelSpec, Mapping[str, Tensor], RankGroup], TrainingEngine]


def make_engine(config: RunConfig, spec: ModelSpec, weights: Mapping[str, Tensor], ranks: RankGroup) -> TrainingEngine:
    """Make the engine that `training.engine` names for one rank, with version 0 of the model weights.

    Raises ConfigError if an import path can't be imported.
    """
    return find("training.engine", config.training.engine, _ENGINES)(config, spec, weights, ranks)


def torch_engine(
    config: RunConfig,
    spec: ModelSpec,
    weights: Mapping[str, Tensor],
    ranks: RankGroup,
    *,
    kind: type[PolicyEngine] = TorchEngine,
) -> TrainingEngine:
    """Make an engine of class `kind`: TorchEngine, a subclass, or another class with the same constructor."""
    return kind(
        spec,
        weights,
        config.training,
        config.algorithm,
        temperature=config.generation.temperature,
        ranks=ranks,
        device=config.launch.accelerator,
        seed=config.seed,
    )


def _deepspeed_engine(
    config: RunConfig, spec: ModelSpec, weights: Mapping[str, Tensor], ranks: RankGroup
) -> TrainingEngine:
    os.environ["DS_ACCELERATOR"] = config.launch.accelerator  # deepspeed reads it at import
    from areal_core.training.engines.deepspeed_engine import DeepSpeedEngine  # importing it takes a second or two

    return torch_engine(config, spec, weights, ranks, kind=DeepSpeedEngine)


def _emulated_engine(
    config: RunConfig, spec: ModelSpec, weights: Mapping[str, Tensor], ranks: RankGroup
) -> TrainingEngine:
    return EmulatedTrainingEngine(config, {name: tensor.numpy() for name, tensor in weights.items()})


_ENGINES: dict[str, MakeEngine] = {
    "torch": torch_engine,
    "deepspeed": _deepspeed_engine,
    "emulated": _emulated_engine,
}
