"""The forward pass of a Qwen2 or Llama decoder for generation: prefill of prompts, and one step of many answers.

Axes: N answers, P prompts, W tokens of a padded prompt, T columns of the cache, H query heads, K key-value heads,
D head size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from areal_core.model import ModelSpec, rope_tables


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's weights, fused where they read the same input."""

    input_norm: Tensor
    qkv: Tensor  # [(H + 2K) * D, hidden]
    qkv_bias: Tensor | None
    out: Tensor  # [H * D, hidden], transposed
    mlp_norm: Tensor
    gate_up: Tensor  # [2 * intermediate, hidden]
    down: Tensor  # [intermediate, hidden], transposed


class Decoder:
    """Weights that are ready to run. Immutable: an update makes another one and swaps the two.

    Rotary embedding is one complex product: within every head of q and k the two halves that rotate together are
    interleaved (in the weights, once), which scores do not notice.
    """

    def __init__(self, spec: ModelSpec, weights: Mapping[str, Tensor], context: int, device: str = "cpu") -> None:
        self.spec = spec
        cos, sin = rope_tables(spec, context)
        half = spec.head_dim // 2
        self._rotations = torch.complex(cos[:, :half], sin[:, :half]).to(device)  # [context, D / 2]
        self._embedding = weights["model.embed_tokens.weight"].to(device)
        self._layers = [_fuse(spec, weights, index, device) for index in range(spec.layers)]
        self._norm = weights["model.norm.weight"].to(device)
        self._head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"]).to(device)

    def prefill(self, tokens: Tensor) -> Tensor:
        """Keys and values [layers, 2, P, K, W, D] of prompts [P, W], padded at the end. Padding attends to prompts, not
        prompts to padding: its columns hold finite numbers that nobody may look at."""
        spec, (prompts, width) = self.spec, tokens.shape
        positions = torch.arange(width, device=tokens.device).repeat(prompts)
        rotations = self._rotations[positions, None]
        x = self._embedding[tokens.reshape(-1)]
        cache = x.new_empty(spec.layers, 2, prompts, spec.kv_heads, width, spec.head_dim)
        for index, layer in enumerate(self._layers):
            qkv = self._project(layer, x, rotations).view(prompts, width, -1, spec.head_dim).transpose(1, 2)
            query, key, value = qkv.split((spec.heads, spec.kv_heads, spec.kv_heads), dim=1)
            cache[index, 0], cache[index, 1] = key, value
            if index + 1 < spec.layers:  # nobody reads what the last layer puts out
                mixed = F.scaled_dot_product_attention(
                    query, key, value, is_causal=True, enable_gqa=spec.kv_heads < spec.heads
                )
                x = self._finish(layer, x, mixed.transpose(1, 2).reshape(prompts * width, -1))
        return cache

    def step(self, tokens: Tensor, positions: Tensor, cache: Tensor, zones: Sequence[tuple[int, int]]) -> Tensor:
        """Logits [N, vocabulary] that follow `tokens` [N] standing at `positions` [N].

        `cache` [layers, 2, slots, K, T, D] holds what stands before them in its first N slots, and gets theirs.
        `zones` are (answers, columns), together N answers in their order: none of them stands at a later column.
        """
        spec, rows = self.spec, len(tokens)
        _, _, slots, _, columns, _ = cache.shape
        # One scatter a layer writes keys and values: row ((kind * slots + answer) * K + head) * T + position.
        heads = torch.arange(spec.kv_heads, device=tokens.device)
        blocks = torch.stack([(kind * slots + torch.arange(rows, device=tokens.device)) for kind in (0, 1)], dim=1)
        targets = (blocks[:, :, None] * spec.kv_heads + heads) * columns + positions[:, None, None]
        targets = targets.reshape(-1)  # [N, 2, K]
        masks = [
            self._mask(part, seen)
            for part, (_, seen) in zip(positions.split([count for count, _ in zones]), zones, strict=True)
        ]
        rotations = self._rotations[positions, None]
        scale = spec.head_dim**-0.5
        x = self._embedding[tokens]
        for layer, layer_cache in zip(self._layers, cache, strict=True):
            qkv = self._project(layer, x, rotations)
            layer_cache.view(-1, spec.head_dim).index_copy_(0, targets, qkv[:, spec.heads :].reshape(-1, spec.head_dim))
            keys, values = layer_cache[:, :rows].view(2, rows * spec.kv_heads, columns, spec.head_dim)
            query = qkv[:, : spec.heads].reshape(rows * spec.kv_heads, -1, spec.head_dim)
            mixed: list[Tensor] = []
            start = 0
            for mask in masks:
                span, seen = slice(start, start + len(mask)), mask.shape[-1]
                scores = torch.baddbmm(mask, query[span], keys[span, :seen].transpose(1, 2), alpha=scale)
                mixed.append(torch.bmm(scores.softmax(-1), values[span, :seen]))
                start += len(mask)
            x = self._finish(layer, x, torch.cat(mixed).view(rows, -1))
        return F.linear(self._normed(x, self._norm), self._head)

    def _mask(self, positions: Tensor, columns: int) -> Tensor:
        """What answers at `positions` [n] may not see of `columns` columns: [n * K, 1, columns], added to scores."""
        unseen = torch.arange(columns, device=positions.device) > positions[:, None]
        mask = torch.zeros(unseen.shape, device=positions.device).masked_fill_(unseen, -torch.inf)
        return mask.repeat_interleave(self.spec.kv_heads, dim=0)[:, None]

    def _project(self, layer: _Layer, x: Tensor, rotations: Tensor) -> Tensor:
        """Rotated queries, rotated keys and values [M, H + 2K, D] of hidden states [M, hidden]."""
        spec = self.spec
        qkv = F.linear(self._normed(x, layer.input_norm), layer.qkv, layer.qkv_bias).view(len(x), -1, spec.head_dim)
        rotating = qkv[:, : spec.heads + spec.kv_heads].unflatten(-1, (-1, 2))
        torch.view_as_complex(rotating).mul_(rotations)
        return qkv

    def _finish(self, layer: _Layer, x: Tensor, mixed: Tensor) -> Tensor:
        """The layer's output [M, hidden] from its input and its attention's [M, H * D]."""
        x = torch.addmm(x, mixed, layer.out)
        gate, up = F.linear(self._normed(x, layer.mlp_norm), layer.gate_up).chunk(2, dim=-1)
        return torch.addmm(x, F.silu(gate).mul_(up), layer.down)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (self.spec.hidden_size,), weight, self.spec.rms_eps)


def _fuse(spec: ModelSpec, weights: Mapping[str, Tensor], index: int, device: str) -> _Layer:
    def take(name: str) -> Tensor:
        return weights[f"model.layers.{index}.{name}"].to(device)

    def interleave(rows: Tensor) -> Tensor:
        """Put the two halves of every head's rows side by side, pair by pair."""
        return rows.unflatten(0, (-1, 2, spec.head_dim // 2)).transpose(1, 2).flatten(0, 2)

    def fuse(kind: str) -> Tensor:
        query, key, value = (take(f"self_attn.{name}_proj.{kind}") for name in "qkv")
        return torch.cat((interleave(query), interleave(key), value))

    return _Layer(
        input_norm=take("input_layernorm.weight"),
        qkv=fuse("weight"),
        qkv_bias=fuse("bias") if spec.qkv_bias else None,
        out=take("self_attn.o_proj.weight").T.contiguous(),
        mlp_norm=take("post_attention_layernorm.weight"),
        gate_up=torch.cat((take("mlp.gate_proj.weight"), take("mlp.up_proj.weight"))),
        down=take("mlp.down_proj.weight").T.contiguous(),
    )
