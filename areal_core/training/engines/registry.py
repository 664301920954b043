"""Training engines by the names that a configuration gives them: registered ones, and import paths."""

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
    """The engine of `training.engine` for one rank, with version 0 of the weights. Raises ConfigError for an import
    path that can't be imported."""
    return find("training.engine", config.training.engine, _ENGINES)(config, spec, weights, ranks)


def torch_engine(
    config: RunConfig,
    spec: ModelSpec,
    weights: Mapping[str, Tensor],
    ranks: RankGroup,
    *,
    kind: type[PolicyEngine] = TorchEngine,
) -> TrainingEngine:
    """`kind`: TorchEngine, a subclass with another optimiser, or another engine that is made alike."""
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
    os.environ["DS_ACCELERATOR"] = config.launch.accelerator  # read as deepspeed is imported
    from areal_core.training.engines.deepspeed_engine import DeepSpeedEngine  # takes a second or two

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
