"""The plain torch engine: float32 weights, AdamW, data-parallel over gloo.

All parameters are views into one flat buffer, and so are their gradients: the all-reduce, the gradient norm and the
optimiser each are one operation on one tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from areal_core.algorithm.losses import LossStats, PolicyLoss, decoupled_ppo, k3, naive_ppo
from areal_core.config import AlgorithmConfig, TrainingConfig
from areal_core.errors import DivergenceError, ModelError
from areal_core.model import ModelSpec, check_weights, weight_shapes
from areal_core.training.batching import allocate
from areal_core.training.engine import EngineState, StepStats, TrainingBatch
from areal_core.training.packed import Packed, answer_logprobs, pack
from areal_core.types import BoolArray, Float32Array

_MISMATCH_SEQUENCES = 64  # a sample is enough to see that two engines disagree


def learning_rate(config: TrainingConfig, update: int) -> float:
    """Of optimiser update 0, 1, ...: a linear warm-up whose last update has the full rate, then constant."""
    return config.learning_rate * min(1.0, (update + 1) / max(1, config.warmup_steps))


class TorchEngine:
    """`training.engine.TrainingEngine` on one core for each rank.

    The same state and batch give bitwise the same weights. Ranks find each other through the file `rendezvous`, which
    must not be left over from an earlier group; every wait for another rank is bounded by `timeout_s`.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[str, Tensor],
        training: TrainingConfig,
        algorithm: AlgorithmConfig,
        *,
        rank: int = 0,
        world_size: int = 1,
        rendezvous: Path | None = None,
        timeout_s: float = 120.0,
    ) -> None:
        check_weights(spec, weights)
        self._spec, self._training, self._algorithm = spec, training, algorithm
        self._rank, self._world_size = rank, world_size
        self._updates = 0
        self._shapes = {name: weights[name].shape for name in weight_shapes(spec)}
        self._flat = torch.cat([weights[name].detach().float().flatten() for name in self._shapes])
        self._reduced = torch.zeros(len(self._flat) + 1)  # what ranks sum: the gradient, and the loss in the last place
        self._gradient = self._flat.grad = self._reduced[:-1]
        self._parameters = _views(self._flat, self._shapes)
        for name, gradient in _views(self._gradient, self._shapes).items():
            self._parameters[name].requires_grad_().grad = gradient
        self._optimiser = _adamw(self._flat, training)
        if world_size > 1:
            assert rendezvous is not None
            dist.init_process_group(
                "gloo",
                init_method=f"file://{rendezvous.absolute()}",
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout_s),
            )

    def logprobs(self, batch: TrainingBatch) -> Float32Array:
        proximal = np.zeros(len(batch.tokens), np.float32)
        with torch.no_grad():
            for packed in self._microbatches(batch, np.flatnonzero(batch.has_gradient).tolist()):
                proximal[packed.source] = answer_logprobs(self._spec, self._parameters, packed)[0].numpy()
        if not np.isfinite(proximal).all():
            raise DivergenceError(f"proximal log-probabilities of step {batch.step} are not finite")
        return proximal

    def train_step(self, batch: TrainingBatch, proximal: Float32Array | None) -> StepStats:
        assert proximal is None or self._algorithm.objective == "decoupled"
        loss_tokens = self.all_sum(np.array(batch.loss_tokens, np.float64)).tolist()
        losses: list[float] = []
        norms: list[float] = []
        stats = LossStats()
        for members, denominator in zip(batch.minibatches, loss_tokens, strict=True):
            if not denominator:
                continue  # all its answers are masked out, on every rank
            # pi_prox is version step - 1 throughout; pi_theta, its stand-in in naive PPO, until the first update.
            own_version = batch.step - 1 if proximal is not None or not losses else None
            stats += self._accumulate(batch, proximal, own_version, members, denominator)
            loss, norm = self._update(batch.step)
            losses.append(loss)
            norms.append(norm)
        return self._step_stats(losses, norms, int(sum(loss_tokens)), self._merged(stats))

    @torch.no_grad()
    def mismatch(self, batch: TrainingBatch, weights: Mapping[str, NDArray[Any]], version: int) -> tuple[float, int]:
        tensors = {name: torch.from_numpy(array) for name, array in weights.items()}
        total, tokens = 0.0, 0
        for packed in self._microbatches(batch, range(min(_MISMATCH_SEQUENCES, len(batch.lengths)))):
            ours, _ = answer_logprobs(self._spec, tensors, packed)
            matched = torch.from_numpy(((batch.versions == version) & batch.loss_mask)[packed.source])
            theirs = torch.from_numpy(batch.behaviour_logprobs[packed.source])
            total += float(k3((ours.double() - theirs)[matched]).sum())
            tokens += int(matched.sum())
        return total, tokens

    def all_sum(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        total = torch.from_numpy(values.copy())
        if self._world_size > 1:
            dist.all_reduce(total)
        return total.numpy()

    def weights(self) -> dict[str, Float32Array]:
        return self._named(self._flat)

    def state(self) -> EngineState:
        arrays: dict[str, NDArray[Any]] = {"rng": torch.get_rng_state().numpy()}
        for kind, flat in self._saved().items():
            arrays |= {f"{kind}/{name}": values for name, values in self._named(flat).items()}
        return EngineState(arrays=arrays, scalars={"updates": self._updates})

    def load_state(self, state: EngineState) -> None:
        for kind, flat in self._saved().items():
            for name, view in _views(flat, self._shapes).items():
                values = state.arrays.get(f"{kind}/{name}")
                if values is None or values.shape != view.shape:
                    found = "nothing" if values is None else f"shape {list(values.shape)}"
                    raise ModelError(
                        f"{kind}/{name}: expected shape {list(view.shape)} in the saved state, got {found}"
                    )
                view.copy_(torch.from_numpy(values))
        self._updates = state.scalars["updates"]
        self._optimiser.state[self._flat]["step"].fill_(self._updates)
        torch.set_rng_state(torch.from_numpy(state.arrays["rng"]))

    def close(self) -> None:
        if self._world_size > 1:
            dist.destroy_process_group()

    def _microbatches(self, batch: TrainingBatch, members: Sequence[int]) -> Iterator[Packed]:
        lengths = batch.lengths[list(members)].tolist()
        for indices in allocate(lengths, self._training.microbatch_tokens, self._training.min_microbatches):
            yield pack(batch.tokens, batch.lengths, batch.prompt_lengths, [members[index] for index in indices])

    def _accumulate(
        self,
        batch: TrainingBatch,
        proximal: Float32Array | None,
        own_version: int | None,
        members: Sequence[int],
        denominator: float,
    ) -> LossStats:
        """Put the loss of a minibatch's local share and its gradient into the flat buffer.

        own_version: the version whose tokens say how far trainer and generator disagree; None: none does.
        """
        self._reduced.zero_()
        matched = batch.versions == own_version if own_version is not None else np.zeros_like(batch.loss_mask)
        has_gradient = batch.has_gradient
        stats = LossStats()
        for packed in self._microbatches(batch, [i for i in members if has_gradient[i]]):
            loss, sums = self._policy_loss(batch, proximal, matched, packed, denominator)
            loss.backward()
            self._reduced[-1] += loss.detach()
            stats += sums
        return stats

    def _policy_loss(
        self,
        batch: TrainingBatch,
        proximal: Float32Array | None,
        matched: BoolArray,
        packed: Packed,
        denominator: float,
    ) -> PolicyLoss:
        def packed_values(values: NDArray[Any]) -> Tensor:
            return torch.from_numpy(values[packed.source])

        current, entropy = answer_logprobs(self._spec, self._parameters, packed)
        behaviour, advantages = packed_values(batch.behaviour_logprobs), packed_values(batch.advantages)
        options: dict[str, Any] = {
            "denominator": denominator,
            "clip_eps": self._algorithm.clip_eps,
            "matched": packed_values(matched),
            "entropy": entropy,
        }
        mask = packed_values(batch.loss_mask)
        if proximal is None:
            return naive_ppo(current, behaviour, advantages, mask, **options)
        options["behaviour_cap"] = self._algorithm.behaviour_cap
        return decoupled_ppo(current, packed_values(proximal), behaviour, advantages, mask, **options)

    def _update(self, step: int) -> tuple[float, float]:
        """Sum loss and gradient over the ranks, step the optimiser. Returns loss and gradient norm before clipping."""
        if self._world_size > 1:
            dist.all_reduce(self._reduced)
        loss, norm = float(self._reduced[-1]), float(self._gradient.norm())
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise DivergenceError(
                f"step {step}, update {self._updates}: loss {loss} and gradient norm {norm} must be finite"
            )
        self._gradient.mul_(min(1.0, self._training.grad_clip / (norm + 1e-6)))
        self._optimiser.param_groups[0]["lr"] = learning_rate(self._training, self._updates)
        self._optimiser.step()
        self._updates += 1
        return loss, norm

    def _merged(self, stats: LossStats) -> LossStats:
        """Over all ranks; one all-reduce carries sums and maximum alike, as each rank fills a row of its own."""
        rows = np.zeros((self._world_size, len(astuple(stats))))
        rows[self._rank] = astuple(stats)
        return sum((LossStats.from_values(row) for row in self.all_sum(rows).tolist()), LossStats())

    def _step_stats(self, losses: list[float], norms: list[float], loss_tokens: int, stats: LossStats) -> StepStats:
        updates, tokens = len(losses), max(stats.tokens, 1.0)
        return StepStats(
            loss=sum(losses) / max(updates, 1),
            grad_norm=sum(norms) / max(updates, 1),
            learning_rate=learning_rate(self._training, max(self._updates - 1, 0)),
            updates=updates,
            loss_tokens=loss_tokens,
            trained_tokens=int(stats.tokens),
            clip_fraction=stats.clipped / tokens,
            cap_fraction=stats.capped / tokens,
            entropy=stats.entropy / tokens,
            approx_kl=stats.kl / tokens,
            mismatch_kl=stats.mismatch / stats.matched if stats.matched else None,
            mismatch_tokens=int(stats.matched),
            ess=stats.ess,
            weight_max=stats.weight_max,
        )

    def _saved(self) -> dict[str, Tensor]:
        moments = self._optimiser.state[self._flat]
        return {"weight": self._flat, "exp_avg": moments["exp_avg"], "exp_avg_sq": moments["exp_avg_sq"]}

    def _named(self, flat: Tensor) -> dict[str, Float32Array]:
        return {name: view.numpy().copy() for name, view in _views(flat, self._shapes).items()}


def _adamw(flat: Tensor, config: TrainingConfig) -> torch.optim.AdamW:
    """AdamW whose moments are there from the start, so that a state can be saved and loaded at any time."""
    betas = (config.beta1, config.beta2)
    optimiser = torch.optim.AdamW(
        [flat], betas=betas, eps=config.adam_eps, weight_decay=config.weight_decay, fused=True
    )
    optimiser.state[flat] = {
        "step": torch.zeros(()),
        "exp_avg": torch.zeros_like(flat),
        "exp_avg_sq": torch.zeros_like(flat),
    }
    return optimiser


def _views(flat: Tensor, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """The tensors that lie end to end in `flat`, sharing its memory."""
    parts = flat.split([shape.numel() for shape in shapes.values()])
    return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
