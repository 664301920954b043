"""Operations of a layer other than matrix products: attention, norms, rotations and gates.

Causal attention stays within each sequence of a pack, without padding. One kernel takes sequences of any lengths at
once in half precision on a GPU, another in float32 on a CPU. The CPU kernel also supports shared prompts. Otherwise
attention runs once per block of contiguous sequences of equal length.

The other operations are bound by memory traffic. Their gradients are written by hand: they make fewer passes over the
activations than autograd, and in float32 on a CPU a single compiled one.

Axes: T packed tokens, N sequences, H query heads, K key-value heads, D width of a head, I width of the inner layer.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from areal_core.training.batching.packing import Blocks

Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]  # query, key, value, bounds [N + 1], longest sequence

_KERNEL_WIDTHS = range(8, 257, 8)  # head widths that the GPU kernel supports


def causal_attention(query: Tensor, key: Tensor, value: Tensor, blocks: Blocks) -> Tensor:
    """Causal attention. query [T, H, D], key and value [T, K, D] -> [T, H, D]; H is a multiple of K."""
    if has_kernel(query):
        longest = max(block.tokens for block in blocks)
        return _kernel()(query, key, value, bounds(blocks, query.device), longest)
    if compiled := compiled_for(query.device, query.dtype):
        return compiled.Attention.apply(query, key, value, blocks)
    return attention_by_block(query, key, value, blocks)


def has_kernel(query: Tensor) -> bool:
    """Whether one call can attend to sequences of different lengths."""
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and query.shape[-1] in _KERNEL_WIDTHS


def attention_by_block(query: Tensor, key: Tensor, value: Tensor, blocks: Blocks) -> Tensor:
    """Compute `causal_attention` with one call for each block."""
    shared_heads = query.shape[1] // key.shape[1]
    if shared_heads > 1 and query.is_cuda:  # on a GPU no memory-saving kernel takes them, except in half precision
        key, value = _spread(key, shared_heads), _spread(value, shared_heads)
    sizes = [block.sequences * block.tokens for block in blocks]
    prompts = _prompts(key, value, blocks)
    outputs = []
    for block, *parts in zip(blocks, query.split(sizes), key.split(sizes), value.split(sizes), strict=True):
        q, k, v = (part.unflatten(0, (block.sequences, block.tokens)) for part in parts)
        future = None
        if block.prompt is not None:
            k, v = (
                torch.cat((own.expand(block.sequences, *own.shape), part), dim=1)
                for own, part in zip(prompts[block.prompt], (k, v), strict=True)
            )
            future = _future(k.shape[1], q)[-block.tokens :]
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        mixed = F.scaled_dot_product_attention(
            q, k, v, attn_mask=future, is_causal=future is None, enable_gqa=q.shape[1] != k.shape[1]
        )
        outputs.append(mixed.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)


def _prompts(key: Tensor, value: Tensor, blocks: Blocks) -> list[tuple[Tensor, Tensor]]:
    """Return keys and values of the shared prompts, [tokens, K, D] each. Prompts come first in the pack."""
    whole = [block for block in blocks if block.prompt is None]
    if len(whole) == len(blocks):
        return []
    lengths = [block.tokens for block in whole for _ in range(block.sequences)]
    lengths.append(key.shape[0] - sum(lengths))
    return list(zip(key.split(lengths)[:-1], value.split(lengths)[:-1], strict=True))


def _future(tokens: int, like: Tensor) -> Tensor:
    """Return the causal mask added to attention scores, [tokens, tokens]: -inf for later tokens.

    Its last rows are the mask of the last tokens.
    """
    size = 1 << (tokens - 1).bit_length()
    return _causal_mask(size, like.dtype, like.device)[:tokens, :tokens]


@functools.lru_cache(maxsize=16)
def _causal_mask(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((size, size), -torch.inf, dtype=dtype, device=device).triu(1)


@functools.lru_cache(maxsize=16)
def bounds(blocks: Blocks, device: torch.device) -> Tensor:
    """[N + 1], int32: start of each sequence and end of the last one. Cached for all layers of a pass."""
    assert all(block.prompt is None for block in blocks), "the kernel does not support shared prompts"
    ends = np.cumsum(np.repeat([block.tokens for block in blocks], [block.sequences for block in blocks]))
    return torch.tensor([0, *ends.tolist()], dtype=torch.int32, device=device)


def causal_kernel(varlen_attn: Callable[..., Any]) -> Kernel:
    """Wrap torch's `varlen_attn` for causal self-attention.

    A torch version without `enable_gqa` gets one key and one value for every query head.
    """
    takes_groups = "enable_gqa" in inspect.signature(varlen_attn).parameters

    def attend(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int) -> Tensor:
        shared = query.shape[1] // key.shape[1]
        if shared > 1 and not takes_groups:
            key, value = _spread(key, shared), _spread(value, shared)
        options = {"enable_gqa": True} if shared > 1 and takes_groups else {}
        return varlen_attn(query, key, value, bounds, bounds, longest, longest, window_size=(-1, 0), **options)

    return attend


def _spread(tensor: Tensor, shared: int) -> Tensor:
    """Repeat each key-value head for all query heads that share it. [T, K, D] -> [T, K * shared, D]."""
    return tensor.repeat_interleave(shared, dim=1)


@functools.cache
def _kernel() -> Kernel:
    from torch.nn.attention.varlen import varlen_attn  # imports torch's compiler: seconds

    return causal_kernel(varlen_attn)


@functools.cache
def compiled_for(device: torch.device, dtype: torch.dtype) -> ModuleType | None:
    """Return the module of compiled operations for this device and dtype; None: use torch's."""
    if device.type != "cpu" or dtype != torch.float32:
        return None
    from areal_core.training.model import compiled  # compiles or loads the kernels on first use

    return compiled


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis. [.., W], [W] -> [.., W]."""
    if compiled := compiled_for(x.device, x.dtype):
        return compiled.RmsNorm.apply(x, weight, eps)
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding to heads, [T, H, D].

    cos and sin are [T, 1, D], equal in both halves of D, and get no gradients.
    """
    return _Rotate.apply(x, cos, sin)  # type: ignore[no-any-return]


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up. [T, I], [T, I] -> [T, I]."""
    if compiled := compiled_for(gate.device, gate.dtype):
        return compiled.SwiGlu.apply(gate, up)
    return F.silu(gate) * up


class _Rotate(torch.autograd.Function):
    """Rotation whose gradient is the rotation back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(gradients[0], cos, sin, -1), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    """Rotate heads by the angles, or back with a `direction` of -1."""
    if compiled := compiled_for(x.device, x.dtype):
        return compiled.rotated(x, cos, sin, direction)
    half = x.shape[-1] // 2
    sines = sin[..., :half]
    turned = x * cos
    turned[..., :half].addcmul_(x[..., half:], sines, value=-direction)
    turned[..., half:].addcmul_(x[..., :half], sines, value=direction)
    return turned
