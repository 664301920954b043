"""The emulated training engine: takes the time of accelerators and leaves model weights unchanged.

One process stands for all training accelerators, which share a batch without overhead. Losses, gradients and entropies
are zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from areal_core.config.schema import RunConfig
from areal_core.models.tensorfile import to_bfloat16
from areal_core.planning.time_model import Pace, TimeModel
from areal_core.training.engines.engine import EngineState, StepStats, TrainingBatch
from areal_core.types import Float32Array

_LOGPROB = -0.1  # nats, of every token; the emulated generation engine has the same


class EmulatedTrainingEngine:
    """A `TrainingEngine` that takes the time of the emulated training accelerators.

    If the same accelerators also generate, every step includes two switches between the roles. With mode=sync a step
    also includes the batch's last rewards, because nothing is generated meanwhile.
    """

    def __init__(self, config: RunConfig, weights: Mapping[str, Float32Array], pace: Pace | None = None) -> None:
        emulation = config.emulation
        self._weights = dict(weights)
        self._served: dict[str, NDArray[Any]] = self._weights
        if config.training.dtype == "bfloat16":
            self._served = {name: to_bfloat16(array) for name, array in weights.items()}
        self._time = TimeModel(emulation)
        self._accelerators = config.training_ranks * emulation.replicas * emulation.tensor_parallel
        self._idle_s = 2 * emulation.switch_s if config.takes_turns else 0.0
        self._idle_s += emulation.rewards_s if config.mode == "sync" else 0.0
        self._scale = emulation.tokens_per_token
        self._learning_rate = config.training.learning_rate
        self._pace = pace or Pace(emulation.speed)
        self._updates = 0

    def proximal_logprobs(self, batch: TrainingBatch) -> Float32Array:
        later = [index for members in batch.minibatches[1:] for index in members]
        self._pace.restart()
        self._pace.spend(self._time.forward_s(self._lengths(batch, later), self._accelerators))
        return np.where(batch.versions >= 0, np.float32(_LOGPROB), np.float32(0.0))

    def train_step(self, batch: TrainingBatch, proximal: Float32Array | None) -> StepStats:
        self._pace.restart()
        self._pace.spend(
            self._time.train_s(self._lengths(batch, range(len(batch.lengths))), self._accelerators) + self._idle_s
        )
        updates = sum(tokens > 0 for tokens in batch.loss_tokens)
        self._updates += updates
        return StepStats(learning_rate=self._learning_rate, updates=updates, loss_tokens=sum(batch.loss_tokens))

    def train_inference_kl(
        self, batch: TrainingBatch, weights: Mapping[str, NDArray[Any]], version: int
    ) -> tuple[float, int]:
        return 0.0, 0

    def compute_s(self) -> float:
        return 0.0

    def weights(self) -> dict[str, Float32Array]:
        return dict(self._weights)

    def served(self) -> dict[str, NDArray[Any]]:
        return dict(self._served)

    def state(self) -> EngineState:
        arrays: dict[str, NDArray[Any]] = {f"weight/{name}": array for name, array in self._weights.items()}
        return EngineState(arrays=arrays, scalars={"updates": self._updates})

    def parts(self) -> Mapping[str, tuple[int, int]]:
        return {}

    def load_state(self, state: EngineState) -> None:
        self._updates = state.scalars["updates"]

    def _lengths(self, batch: TrainingBatch, members: Sequence[int]) -> list[int]:
        """Return lengths of some of the sequences, prompt and completion, in real tokens."""
        return (batch.lengths[list(members)].astype(np.int64) * self._scale).tolist()
