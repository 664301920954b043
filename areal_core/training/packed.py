"""The forward pass of training: sequences packed without padding.

Linear layers see all tokens of a micro-batch as one matrix; attention runs once for each group of sequences of the same
length, which are contiguous. Axes: T packed input tokens, A answer tokens (the targets), H heads, D width of a head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from areal_core.model import ModelSpec, rope_tables

_LOGITS_AT_ONCE = 1 << 22  # elements of the logits that exist at any moment


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """One micro-batch, ready for the forward pass. A sequence's last token is a target only, never an input."""

    inputs: Tensor  # [T] token ids
    positions: Tensor  # [T] position of each input in its sequence
    blocks: tuple[tuple[int, int], ...]  # (sequences, input tokens of each), in the order of `inputs`
    rows: Tensor  # [A] inputs that predict an answer token
    targets: Tensor  # [A] the answer tokens
    source: NDArray[np.int64]  # [A] where the answer tokens stand in the arrays that were packed


def pack(
    tokens: NDArray[np.int32], lengths: NDArray[Any], prompt_lengths: NDArray[Any], chosen: Sequence[int]
) -> Packed:
    """Pack the `chosen` of N sequences that lie end to end in `tokens`.

    lengths: [N] tokens of each sequence, prompt and answer; prompt_lengths: [N], each at least 1.
    """
    ends = np.cumsum(lengths)
    order = sorted(chosen, key=lambda index: lengths[index])
    inputs: list[NDArray[np.int64]] = []
    positions: list[NDArray[np.int64]] = []
    answer: list[NDArray[np.bool_]] = []
    blocks: list[tuple[int, int]] = []
    for length, members in groupby(order, key=lambda index: lengths[index]):
        block = np.fromiter(members, np.int64)
        steps = np.arange(length - 1)
        inputs.append((ends[block, None] - length + steps).ravel())
        positions.append(np.broadcast_to(steps, (len(block), len(steps))).ravel())
        answer.append((steps >= prompt_lengths[block, None] - 1).ravel())
        blocks.append((len(block), int(length) - 1))
    source = np.concatenate(inputs)
    rows = np.flatnonzero(np.concatenate(answer))
    targets = source[rows] + 1
    return Packed(
        inputs=torch.from_numpy(tokens[source].astype(np.int64)),
        positions=torch.from_numpy(np.concatenate(positions)),
        blocks=tuple(blocks),
        rows=torch.from_numpy(rows),
        targets=torch.from_numpy(tokens[targets].astype(np.int64)),
        source=targets,
    )


def answer_logprobs(spec: ModelSpec, weights: Mapping[str, Tensor], packed: Packed) -> tuple[Tensor, Tensor]:
    """Log-probability of each answer token and entropy of the distribution it was drawn from, at temperature 1.

    Returns ([A], [A]), nats, in the order of `packed.rows`. Only the log-probabilities are differentiable.
    """
    hidden = hidden_states(spec, weights, packed)
    head = weights["model.embed_tokens.weight" if spec.tie_embeddings else "lm_head.weight"]
    logprobs, entropy = _TargetLogprobs.apply(hidden.index_select(0, packed.rows), head, packed.targets)  # type: ignore[misc]
    return logprobs, entropy


def hidden_states(spec: ModelSpec, weights: Mapping[str, Tensor], packed: Packed) -> Tensor:
    """Qwen2 or Llama up to the last norm. Returns [T, hidden_size]."""
    tables = rope_tables(spec, max(length for _, length in packed.blocks))
    cos, sin = (table[packed.positions, None] for table in tables)  # [T, 1, D]
    x = F.embedding(packed.inputs, weights["model.embed_tokens.weight"])
    for layer in range(spec.layers):
        at = f"model.layers.{layer}."

        def linear(name: str, inputs: Tensor, at: str = at) -> Tensor:
            return F.linear(inputs, weights[f"{at}{name}.weight"], weights.get(f"{at}{name}.bias"))

        normed = _rms_norm(x, weights[at + "input_layernorm.weight"], spec.rms_eps)
        query = linear("self_attn.q_proj", normed).unflatten(-1, (spec.heads, spec.head_dim))
        key = linear("self_attn.k_proj", normed).unflatten(-1, (spec.kv_heads, spec.head_dim))
        value = linear("self_attn.v_proj", normed).unflatten(-1, (spec.kv_heads, spec.head_dim))
        mixed = _attention(_rotate(query, cos, sin), _rotate(key, cos, sin), value, packed.blocks)
        x = x + linear("self_attn.o_proj", mixed.flatten(-2))
        normed = _rms_norm(x, weights[at + "post_attention_layernorm.weight"], spec.rms_eps)
        x = x + linear("mlp.down_proj", F.silu(linear("mlp.gate_proj", normed)) * linear("mlp.up_proj", normed))
    return _rms_norm(x, weights["model.norm.weight"], spec.rms_eps)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of heads, [T, H, D]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def _attention(query: Tensor, key: Tensor, value: Tensor, blocks: tuple[tuple[int, int], ...]) -> Tensor:
    """Causal attention within each sequence. query [T, H, D], key and value [T, H_kv, D] -> [T, H, D]."""
    sizes = [count * length for count, length in blocks]
    outputs = []
    for (count, length), *parts in zip(blocks, query.split(sizes), key.split(sizes), value.split(sizes), strict=True):
        q, k, v = (part.unflatten(0, (count, length)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        outputs.append(mixed.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)


class _TargetLogprobs(torch.autograd.Function):
    """log_softmax(hidden @ head.T)[target] and its entropy, a slice of rows at a time in both directions: the logits,
    vocabulary wide, are made again in the backward pass rather than kept."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logprobs, entropies, normalisers = [], [], []
        for rows in _slices(hidden, head):
            logits = hidden[rows] @ head.T
            normaliser = logits.logsumexp(-1)
            logprobs.append(logits.gather(-1, targets[rows, None]).squeeze(-1) - normaliser)
            entropies.append(normaliser - ((logits - normaliser[:, None]).exp_() * logits).sum(-1))
            normalisers.append(normaliser)
        ctx.save_for_backward(hidden, head, targets, torch.cat(normalisers))
        entropy = torch.cat(entropies)
        ctx.mark_non_differentiable(entropy)
        return torch.cat(logprobs), entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden, head, targets, normalisers = ctx.saved_tensors
        gradient = gradients[0]
        hidden_gradient, head_gradient = torch.empty_like(hidden), torch.zeros_like(head)
        for rows in _slices(hidden, head):
            # d logprob / d logits = one_hot(target) - softmax
            logits = hidden[rows] @ head.T
            logits_gradient = (logits - normalisers[rows, None]).exp_().mul_(-gradient[rows, None])
            logits_gradient.scatter_add_(-1, targets[rows, None], gradient[rows, None])
            hidden_gradient[rows] = logits_gradient @ head
            head_gradient.addmm_(logits_gradient.T, hidden[rows])
        return hidden_gradient, head_gradient, None


def _slices(hidden: Tensor, head: Tensor) -> list[slice]:
    size = max(1, _LOGITS_AT_ONCE // head.shape[0])
    return [slice(start, start + size) for start in range(0, max(1, hidden.shape[0]), size)]
