"""Parts of a layer whose time goes into reading and writing memory, with gradients written out: fewer passes over the
activations than those that autograd puts together. Axes: T tokens, H heads, D width of a head.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis. [T, W], [W] -> [T, W]."""
    if x.device.type == "cpu" and x.dtype == torch.float32:
        return _RmsNorm.apply(x, weight, eps)  # type: ignore[no-any-return]
    return F.rms_norm(x, (x.shape[-1],), weight, eps)  # elsewhere one kernel, or more than float32's care is needed


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of heads, [T, H, D]; cos and sin [T, 1, D], the same in both halves of D, without gradients."""
    return _Rotate.apply(x, cos, sin)  # type: ignore[no-any-return]


class _RmsNorm(torch.autograd.Function):
    """Keeps the normed rows n and their scales s, y = n w. With h = dy w: dx = s (h - n mean(h n)), dw = sum(dy n)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        norms = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scales = norms.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        normed = x * scales
        ctx.save_for_backward(normed, weight, scales)
        return normed * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        normed, weight, scales = ctx.saved_tensors
        product = gradients[0] * normed
        minus_means = (product @ weight).div_(-len(weight))
        change = torch.mul(gradients[0], weight).addcmul_(normed, minus_means[:, None]).mul_(scales)
        return change, product.sum(0), None


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


def _turned(x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    """By the angles, or by as much the other way for a `direction` of -1."""
    half = x.shape[-1] // 2
    sines = sin[..., :half]
    turned = x * cos
    turned[..., :half].addcmul_(x[..., half:], sines, value=-direction)
    turned[..., half:].addcmul_(x[..., :half], sines, value=direction)
    return turned
