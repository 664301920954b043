"""Parts of a layer whose time goes into reading and writing memory, with gradients written out: fewer passes over the
activations than those that autograd puts together, and in float32 on a CPU a single one, compiled. Axes: T tokens, H
heads, D width of a head, I width of the inner layer.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from areal_core.types import Float32Array


def is_compiled(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there are CPU kernels for tensors of this device and dtype (`areal_core.training.model.kernels`)."""
    return device.type == "cpu" and dtype == torch.float32


@functools.cache
def kernels() -> ModuleType:
    from areal_core.training.model import kernels

    return kernels


def flat(tensor: Tensor) -> Float32Array:
    """A float32 tensor's numbers for a kernel; the same memory if it is contiguous."""
    return np.ascontiguousarray(tensor.numpy(force=True)).reshape(-1)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis. [.., W], [W] -> [.., W]."""
    if is_compiled(x.device, x.dtype):
        return _RmsNorm.apply(x, weight, eps)  # type: ignore[no-any-return]
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of heads, [T, H, D]; cos and sin [T, 1, D], the same in both halves of D, without gradients."""
    return _Rotate.apply(x, cos, sin)  # type: ignore[no-any-return]


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up. [T, I], [T, I] -> [T, I]."""
    if is_compiled(gate.device, gate.dtype):
        return _SwiGlu.apply(gate, up)  # type: ignore[no-any-return]
    return F.silu(gate) * up


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out, scales = torch.empty_like(x), x.new_empty(x.shape[:-1])
        kernels().rms_norm(flat(x), flat(weight), eps, flat(out), flat(scales))
        ctx.save_for_backward(x, weight, scales)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scales = ctx.saved_tensors
        made = torch.empty_like(x), torch.zeros_like(weight)
        kernels().rms_norm_backward(*map(flat, (x, weight, scales, gradients[0], *made)))
        return *made, None


class _Rotate(torch.autograd.Function):
    """The gradient of a rotation is the rotation back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(gradients[0], cos, sin, -1), None, None


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        out = torch.empty_like(gate)
        kernels().swiglu(flat(gate), flat(up), flat(out))
        ctx.save_for_backward(gate, up)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        made = torch.empty_like(gate), torch.empty_like(up)
        kernels().swiglu_backward(*map(flat, (gate, up, gradients[0], *made)))
        return made


def _turned(x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    """Heads rotated by the angles, or back by them for a `direction` of -1."""
    if is_compiled(x.device, x.dtype):
        out = torch.empty_like(x)
        kernels().rotate(flat(x), flat(cos), flat(sin), *x.shape[1:], direction, flat(out))
        return out
    half = x.shape[-1] // 2
    sines = sin[..., :half]
    turned = x * cos
    turned[..., :half].addcmul_(x[..., half:], sines, value=-direction)
    turned[..., half:].addcmul_(x[..., :half], sines, value=direction)
    return turned
