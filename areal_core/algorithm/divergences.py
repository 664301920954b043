"""KL divergence of two policies, estimated from their log-probabilities of sampled tokens. [N] each, nats."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_LARGEST = 60.0  # nats


def log_quotient(numerator: Tensor, denominator: Tensor, mask: Tensor) -> Tensor:
    """The log of the quotient of two policies, the second without gradient. 0 outside the mask, before `exp`: the
    gradient of a NaN there would otherwise spread. Clamped to 60 nats: an infinite quotient times an advantage of 0
    would be a NaN too."""
    return torch.where(mask, numerator - denominator.detach(), 0.0).clamp(-_LARGEST, _LARGEST)


def k2(log_quotient: Tensor) -> Tensor:
    """Half the square of log q, q = pi_ref / pi_theta. Its gradient has, over tokens of pi_theta, the mean of that of
    KL(pi_theta | pi_ref)."""
    return log_quotient.square() / 2


def k3(log_quotient: Tensor) -> Tensor:
    """q - 1 - log q: with q = pi_ref / pi_theta and tokens of pi_theta an unbiased estimate of KL(pi_theta | pi_ref)
    that is never negative (Schulman, 2020)."""
    return torch.expm1(log_quotient) - log_quotient


KL_TERMS: dict[str, Callable[[Tensor], Tensor]] = {  # by AlgorithmConfig.kl_estimator; k1 is no term of the loss
    "k2": k2,
    "k3": k3,
}
