"""Training without packing, in plain torch: the baseline of `benchmarks.training`.

It is optimised as far as padding allows. Sequences are padded on the right to the longest of their micro-batch, so that
causal attention needs no mask. Logits are computed for completion tokens only. The optimiser is fused, and the loss is
that of this system.
Axes: N sequences, L tokens of the longest, H heads, D width of a head, A completion tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from areal_core.algorithm.losses import policy_loss
from areal_core.algorithm.objectives import Tokens
from areal_core.config.groups import TrainingConfig
from areal_core.config.schema import AlgorithmConfig
from areal_core.models.folders import ModelSpec, rope_tables
from areal_core.training.engines.engine import TrainingBatch
from areal_core.types import Float32Array


def sorted_cut(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Sort sequences by length and cut them so that no micro-batch exceeds `capacity` tokens, padding included.
    A longer sequence gets a micro-batch of its own."""
    cut: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda each: -lengths[each]):
        if cut and lengths[cut[-1][0]] * (len(cut[-1]) + 1) <= capacity:
            cut[-1].append(index)
        else:
            cut.append([index])
    return cut


@dataclass(frozen=True, slots=True, kw_only=True)
class Padded:
    """A padded micro-batch. The last token of a sequence is only a target, never an input."""

    inputs: Tensor  # [N, L - 1] token ids; padding is token 0
    rows: Tensor  # [A] inputs that predict a completion token, as places in the flattened [N x (L - 1)]
    targets: Tensor  # [A] the completion tokens
    source: NDArray[np.int64]  # [A] where they stand in the batch


def pad(batch: TrainingBatch, members: Sequence[int]) -> Padded:
    lengths, prompts = batch.lengths[list(members), None], batch.prompt_lengths[list(members), None]
    starts = np.cumsum(batch.lengths)[list(members), None] - lengths
    steps = np.arange(lengths.max() - 1)
    inside = steps < lengths - 1
    inputs = np.where(inside, batch.tokens[np.where(inside, starts + steps, 0)], 0)
    completions = inside & (steps >= prompts - 1)
    source = (starts + steps + 1)[completions]
    return Padded(
        inputs=torch.from_numpy(inputs.astype(np.int64)),
        rows=torch.from_numpy(np.flatnonzero(completions)),
        targets=torch.from_numpy(batch.tokens[source].astype(np.int64)),
        source=source,
    )


class PaddedTraining:
    """A policy and its optimiser.
    `capacity` bounds the tokens of a length-sorted micro-batch, padding included; None: one micro-batch."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[str, Tensor],
        training: TrainingConfig,
        algorithm: AlgorithmConfig,
        capacity: int | None,
    ) -> None:
        self._spec, self._training, self._algorithm, self._capacity = spec, training, algorithm, capacity
        self._weights = {name: tensor.detach().clone().requires_grad_() for name, tensor in weights.items()}
        self._optimiser = torch.optim.AdamW(
            self._weights.values(),
            lr=training.learning_rate,
            betas=(training.beta1, training.beta2),
            eps=training.adam_eps,
            weight_decay=training.weight_decay,
            fused=True,
        )

    def cut(self, batch: TrainingBatch) -> list[Padded]:
        lengths = batch.lengths.tolist()
        whole = [list(range(len(lengths)))]
        return [
            pad(batch, members)
            for members in (whole if self._capacity is None else sorted_cut(lengths, self._capacity))
        ]

    def update(self, batch: TrainingBatch, proximal: Float32Array) -> float:
        """Update the model weights once from the whole batch; return the loss."""
        total = 0.0
        for padded in self.cut(batch):
            loss = self._loss(batch, padded, proximal)
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(self._weights.values(), self._training.grad_clip)
        self._optimiser.step()
        self._optimiser.zero_grad()
        return total

    def gradient(self) -> dict[str, Float32Array]:
        """The clipped gradient of the first update, times 1 - beta1."""
        state = self._optimiser.state
        return {name: state[weight]["exp_avg"].numpy() for name, weight in self._weights.items()}

    def _loss(self, batch: TrainingBatch, padded: Padded, proximal: Float32Array) -> Tensor:
        def values(of: NDArray[Any]) -> Tensor:
            return torch.from_numpy(of[padded.source])

        tokens = Tokens(
            current=self._logprobs(padded),
            behaviour=values(batch.behaviour_logprobs),
            proximal=values(proximal),
            advantages=values(batch.advantages),
            mask=values(batch.loss_mask),
            weights=values(batch.weights),
            staleness=values(batch.step - 1 - batch.versions),
            sequence=values(np.repeat(np.arange(len(batch.lengths)), batch.lengths)),
            sequences=len(batch.lengths),
        )
        return policy_loss(tokens, self._algorithm, denominator=sum(batch.denominators)).loss

    def _logprobs(self, padded: Padded) -> Tensor:
        spec, weights = self._spec, self._weights
        x = F.embedding(padded.inputs, weights["model.embed_tokens.weight"])
        cos, sin = rope_tables(spec, padded.inputs.shape[1])
        for layer in range(spec.layers):
            x = self._layer(f"model.layers.{layer}.", x, cos, sin)
        x = x.flatten(0, 1).index_select(0, padded.rows)
        x = F.rms_norm(x, (spec.hidden_size,), weights["model.norm.weight"], spec.rms_eps)
        logits = F.linear(x, weights["model.embed_tokens.weight" if spec.tie_embeddings else "lm_head.weight"])
        return -F.cross_entropy(logits, padded.targets, reduction="none")

    def _layer(self, at: str, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        spec, weights = self._spec, self._weights

        def linear(name: str, inputs: Tensor) -> Tensor:
            return F.linear(inputs, weights[f"{at}{name}.weight"], weights.get(f"{at}{name}.bias"))

        def norm(name: str, inputs: Tensor) -> Tensor:
            return F.rms_norm(inputs, (spec.hidden_size,), weights[f"{at}{name}.weight"], spec.rms_eps)

        def heads(name: str, inputs: Tensor) -> Tensor:
            return linear(f"self_attn.{name}_proj", inputs).unflatten(-1, (-1, spec.head_dim)).transpose(1, 2)

        def rotated(each: Tensor) -> Tensor:
            first, second = each.chunk(2, dim=-1)
            return each * cos + torch.cat((-second, first), dim=-1) * sin

        normed = norm("input_layernorm", x)
        query, key, value = (heads(name, normed) for name in "qkv")
        mixed = F.scaled_dot_product_attention(
            rotated(query), rotated(key), value, is_causal=True, enable_gqa=spec.heads != spec.kv_heads
        )
        x = x + linear("self_attn.o_proj", mixed.transpose(1, 2).flatten(-2))
        normed = norm("post_attention_layernorm", x)
        return x + linear("mlp.down_proj", F.silu(linear("mlp.gate_proj", normed)) * linear("mlp.up_proj", normed))
