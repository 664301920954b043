"""Parts of a layer whose time goes into reading and writing memory, with gradients written out: fewer passes over the
activations than those that autograd puts together, and in float32 on a CPU a single one, compiled. Axes: T tokens, H
heads, D width of a head, I width of the inner layer.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@functools.cache
def compiled_for(device: torch.device, dtype: torch.dtype) -> ModuleType | None:
    """The module of compiled operations for tensors of this device and dtype; None where there is none, and torch's
    operations do the same."""
    if device.type != "cpu" or dtype != torch.float32:
        return None
    from areal_core.training.model import compiled  # kernels, compiled or loaded by the first process that needs them

    return compiled


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis. [.., W], [W] -> [.., W]."""
    if compiled := compiled_for(x.device, x.dtype):
        return compiled.RmsNorm.apply(x, weight, eps)
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of heads, [T, H, D]; cos and sin [T, 1, D], the same in both halves of D, without gradients."""
    return _Rotate.apply(x, cos, sin)  # type: ignore[no-any-return]


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up. [T, I], [T, I] -> [T, I]."""
    if compiled := compiled_for(gate.device, gate.dtype):
        return compiled.SwiGlu.apply(gate, up)
    return F.silu(gate) * up


class _Rotate(torch.autograd.Function):
    """The gradient of a rotation is the rotation back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(gradients[0], cos, sin, -1), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    """Heads rotated by the angles, or back by them for a `direction` of -1."""
    if compiled := compiled_for(x.device, x.dtype):
        return compiled.rotated(x, cos, sin, direction)
    half = x.shape[-1] // 2
    sines = sin[..., :half]
    turned = x * cos
    turned[..., :half].addcmul_(x[..., half:], sines, value=-direction)
    turned[..., half:].addcmul_(x[..., :half], sines, value=direction)
    return turned
