"""Operations on float32 CPU tensors by compiled kernels; the only module that imports the kernels.

`operations` uses this module where it applies (`operations.compiled_for`) and torch elsewhere.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from areal_core.training.batching.packing import Blocks
from areal_core.training.model import kernels
from areal_core.types import Float32Array


def _flat(*tensors: Tensor) -> list[Float32Array]:
    """Flatten float32 tensors to numpy arrays for a kernel. Contiguous tensors are not copied."""
    return [np.ascontiguousarray(tensor.numpy(force=True)).reshape(-1) for tensor in tensors]


class RmsNorm(torch.autograd.Function):
    """Compiled `operations.rms_norm`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out, scales = torch.empty_like(x), x.new_empty(x.shape[:-1])
        kernels.rms_norm(*_flat(x, weight), eps, *_flat(out, scales))
        ctx.save_for_backward(x, weight, scales)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scales = ctx.saved_tensors
        made = torch.empty_like(x), torch.zeros_like(weight)
        kernels.rms_norm_backward(*_flat(x, weight, scales, gradients[0], *made))
        return *made, None


class SwiGlu(torch.autograd.Function):
    """Compiled `operations.swiglu`."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        out = torch.empty_like(gate)
        kernels.swiglu(*_flat(gate, up, out))
        ctx.save_for_backward(gate, up)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        made = torch.empty_like(gate), torch.empty_like(up)
        kernels.swiglu_backward(*_flat(gate, up, gradients[0], *made))
        return made


class Attention(torch.autograd.Function):
    """Compiled `operations.causal_attention`. The backward pass recomputes the attention weights."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, blocks: Blocks) -> Tensor:
        out, norms = torch.zeros_like(query), query.new_empty(*query.shape[:2], 2)
        ctx.how = _sequences(blocks), (query.shape[1], *key.shape[1:]), query.shape[2] ** -0.5
        kernels.attend(*_flat(query, key, value), *ctx.how, *_flat(out, norms))
        ctx.save_for_backward(query, key, value, out, norms)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        *inputs, out, norms = ctx.saved_tensors
        query, key, value = made = [torch.zeros_like(one) for one in inputs]
        kernels.attend_backward(*_flat(*inputs), *ctx.how, *_flat(out, norms, gradients[0], *made))
        return query, key, value, None


def rotated(x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    """Rotate heads by the angles, or back with a `direction` of -1; without a gradient."""
    out = torch.empty_like(x)
    kernels.rotate(*_flat(x, cos, sin), *x.shape[1:], direction, *_flat(out))
    return out


@functools.lru_cache(maxsize=16)
def _sequences(blocks: Blocks) -> NDArray[np.int64]:
    """Return [N, 4]: first token and length of each sequence, then the same of its shared prompt."""
    sequences: list[tuple[int, int, int, int]] = []
    start = 0
    for block in blocks:
        prompt, shared, *_ = (0, 0) if block.prompt is None else sequences[block.prompt]
        for _ in range(block.sequences):
            sequences.append((start, block.tokens, prompt, shared))
            start += block.tokens
    return np.array(sequences, np.int64)
