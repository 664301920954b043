"""The forward pass of a Qwen2, Qwen3 or Llama decoder in torch operations, for devices except CPUs.

Axes: M rows, A completions that sample a token, T columns of the cache, H query heads, K key-value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from areal_core.generation.engines.slots import Pass
from areal_core.models.folders import ModelSpec, rope_tables
from areal_core.types import Float32Array, Int32Array


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's weights, fused if they read the same input."""

    input_norm: Tensor
    qkv: Tensor  # [(H + 2K) * D, hidden]
    qkv_bias: Tensor | None
    qk_norm: Tensor | None  # [H + K, D]
    out: Tensor  # [hidden, H * D]
    mlp_norm: Tensor
    gate_up: Tensor  # [2 * intermediate, hidden]
    down: Tensor  # [hidden, intermediate]


class TorchCache:
    def __init__(self, spec: ModelSpec, slots: int, context: int, device: str) -> None:
        self.kv = torch.zeros(spec.layers, 2, slots, spec.kv_heads, context, spec.head_dim, device=device)

    def copy(self, source: int, targets: Int32Array, tokens: int) -> None:
        self.kv[:, :, targets.astype(np.int64), :, :tokens] = self.kv[:, :, source, None, :, :tokens]


class TorchDecoder:
    def __init__(self, spec: ModelSpec, arrays: Mapping[str, Any], context: int, device: str) -> None:
        self._spec, self._context, self._device = spec, context, device
        weights = {name: one if isinstance(one, Tensor) else torch.tensor(one) for name, one in arrays.items()}
        self._cos, self._sin = (table.to(device) for table in rope_tables(spec, context))  # [context, D]
        self._embedding = weights["model.embed_tokens.weight"].to(device)
        self._layers = [_fuse(spec, weights, index, device) for index in range(spec.layers)]
        self._norm = weights["model.norm.weight"].to(device)
        self._head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"]).to(device)

    def cache(self, slots: int, rows: int) -> TorchCache:
        return TorchCache(self._spec, slots, self._context, self._device)

    @torch.inference_mode()
    def run(self, cache: TorchCache, rows: Pass) -> tuple[Int32Array, Float32Array] | None:
        table = np.stack((rows.tokens, rows.slots, rows.positions)).astype(np.int64)  # [3, M]
        hidden = self._hidden(cache, table)
        if not len(rows.of):
            return np.empty(0, dtype=np.int32), np.empty(0, dtype=np.float32)
        logits = F.linear(self._normed(hidden[self._on_device(rows.ends.astype(np.int64))], self._norm), self._head)
        return self._sample(logits[self._on_device(rows.of)].float(), rows)

    def _sample(self, logits: Tensor, rows: Pass) -> tuple[Int32Array, Float32Array] | None:
        """Sample tokens and log-probabilities, both [A], from logits [A, vocabulary]; None if not finite."""
        temperatures = self._on_device(rows.temperatures)[:, None]
        greedy = temperatures == 0
        logprobs = (logits / torch.where(greedy, 1, temperatures)).log_softmax(-1)
        cumulative = logprobs.double().exp().cumsum(-1)
        total = cumulative[:, -1:]
        if not total.isfinite().all():
            return None
        sampled = torch.searchsorted(cumulative, self._on_device(rows.uniforms)[:, None] * total, right=True)
        chosen = torch.where(greedy, logprobs.argmax(-1, keepdim=True), sampled)
        return chosen[:, 0].int().cpu().numpy(), logprobs.gather(1, chosen)[:, 0].cpu().numpy()

    def _hidden(self, cache: TorchCache, table: NDArray[np.int64]) -> Tensor:
        """Run all layers for rows of (token, slot, position) [3, M], and return hidden states [M, hidden].

        Keys and values are added to the cache.
        """
        spec, rows = self._spec, table.shape[1]
        tokens, slots, positions = self._on_device(table)
        cos, sin = self._cos[positions, None], self._sin[positions, None]
        heads = torch.arange(spec.kv_heads, device=self._device)
        columns = int(table[2].max()) + 1
        seen = torch.arange(columns, device=self._device) <= positions[:, None]  # [M, T]
        starts = np.flatnonzero(np.diff(table[1], prepend=-1))
        lengths = np.diff(starts, append=rows)
        alone = self._on_device(starts[lengths == 1])
        sequences = [(int(at), int(at + n), int(table[1, at])) for at, n in zip(starts, lengths, strict=True) if n > 1]
        x = self._embedding[tokens]
        for layer, (keys, values) in zip(self._layers, cache.kv, strict=True):
            qkv = F.linear(self._normed(x, layer.input_norm), layer.qkv, layer.qkv_bias).view(rows, -1, spec.head_dim)
            rotating, value = qkv.split((spec.heads + spec.kv_heads, spec.kv_heads), dim=1)
            if layer.qk_norm is not None:
                rotating = F.rms_norm(rotating, (spec.head_dim,), eps=spec.rms_eps) * layer.qk_norm
            first, second = rotating.chunk(2, dim=-1)
            query, key = (rotating * cos + torch.cat((-second, first), dim=-1) * sin).split(
                (spec.heads, spec.kv_heads), dim=1
            )
            place = slots[:, None], heads, positions[:, None]
            keys[place], values[place] = key, value
            mixed = torch.empty_like(query)  # [M, H, D]
            if len(alone):
                own = slots[alone]
                mixed[alone] = self._attend(
                    query[alone, :, None], keys[own, :, :columns], values[own, :, :columns], seen[alone, None, None]
                )[:, :, 0]
            for start, end, slot in sequences:
                mixed[start:end] = self._attend(
                    query[start:end].transpose(0, 1), keys[slot, :, :columns], values[slot, :, :columns],
                    seen[start:end],
                ).transpose(0, 1)  # fmt: skip
            x = x + F.linear(mixed.flatten(1), layer.out)
            gate, up = F.linear(self._normed(x, layer.mlp_norm), layer.gate_up).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, layer.down)
        return x

    def _attend(self, query: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> Tensor:
        """Attend with queries [.., H, rows, D] to keys and values [.., K, T, D] under the mask `seen`."""
        return F.scaled_dot_product_attention(
            query, keys, values, attn_mask=seen, enable_gqa=self._spec.kv_heads < self._spec.heads
        )

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (self._spec.hidden_size,), weight, self._spec.rms_eps)

    def _on_device(self, array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def _fuse(spec: ModelSpec, weights: Mapping[str, Tensor], index: int, device: str) -> _Layer:
    def take(name: str) -> Tensor:
        return weights[f"model.layers.{index}.{name}"].to(device)

    def fuse(kind: str) -> Tensor:
        return torch.cat([take(f"self_attn.{name}_proj.{kind}") for name in "qkv"])

    def by_head(name: str, heads: int) -> Tensor:
        return take(f"self_attn.{name}_norm.weight").expand(heads, -1)

    return _Layer(
        input_norm=take("input_layernorm.weight"),
        qkv=fuse("weight"),
        qkv_bias=fuse("bias") if spec.qkv_bias else None,
        qk_norm=torch.cat((by_head("q", spec.heads), by_head("k", spec.kv_heads))) if spec.qk_norm else None,
        out=take("self_attn.o_proj.weight"),
        mlp_norm=take("post_attention_layernorm.weight"),
        gate_up=torch.cat((take("mlp.gate_proj.weight"), take("mlp.up_proj.weight"))),
        down=take("mlp.down_proj.weight"),
    )
