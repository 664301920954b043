"""Statistics of a training step over its loss tokens, with a histogram of importance weights for their quantiles.

The bins are even in asinh(log r / 0.001): a quantile is exact to 1.1% of log r, or to 1.1e-5 nats where r is close to
1, whichever is more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from areal_core.algorithm.divergences import k3, log_quotient
from areal_core.algorithm.objectives import Surrogate, Tokens

_UNIT = 1e-3  # nats: bins are even in log r below it, in the logarithm of log r above it
_BINS = 1025  # odd: the middle one holds r = 1
_REACH = math.asinh(40.0 / _UNIT)  # bins end at 40 nats, those at the ends hold what lies beyond
_WIDTH = 2 * _REACH / _BINS


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossStats:
    """Sums over loss tokens: they add up over micro-batches, minibatches and ranks.

    The weight r of a token is pi_prox / pi_behav before any cap or mask; without a pi_prox, pi_theta / pi_behav. In
    GSPO it is the geometric mean over the loss tokens of the token's completion.
    """

    tokens: float = 0.0
    clipped_low: float = 0.0  # tokens whose gradient the clip's lower bound removed
    clipped_high: float = 0.0  # the same for its upper bound
    capped: float = 0.0  # tokens whose weight was clamped to a bound
    masked: float = 0.0  # tokens whose weight was outside the mask's bounds
    entropy: float = 0.0  # of pi_theta, nats
    kl: float = 0.0  # k3 of the token's u: how far the step has moved the policy
    reference_kl: float = 0.0  # k3 of pi_theta against the reference policy
    weight: float = 0.0
    weight_squared: float = 0.0
    weight_max: float = 0.0  # the one maximum among sums
    matched: float = 0.0  # tokens sampled by the version trained on
    mismatch: float = 0.0  # k3 of trainer / generator over matched tokens
    histogram: NDArray[np.float64] = field(default_factory=lambda: np.zeros(_BINS))  # tokens by their weight

    def __add__(self, other: LossStats) -> LossStats:
        sums: dict[str, Any] = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        sums["weight_max"] = max(self.weight_max, other.weight_max)
        return LossStats(**sums)

    def values(self) -> NDArray[np.float64]:
        """All fields in one row, as `from_values` takes it back."""
        return np.array([*(getattr(self, f.name) for f in fields(self)[:-1]), *self.histogram])

    @classmethod
    def from_values(cls, values: NDArray[np.float64]) -> LossStats:
        names = [f.name for f in fields(cls)[:-1]]
        numbers = dict(zip(names, values[: len(names)].tolist(), strict=True))
        return cls(**numbers, histogram=values[len(names) :])

    @property
    def ess(self) -> float:
        """Effective sample size as a share of the tokens, (sum r)^2 / (N sum r^2); 1 without tokens."""
        return self.weight**2 / (self.tokens * self.weight_squared) if self.tokens else 1.0

    def weight_quantile(self, share: float) -> float:
        """The weight that `share` of the tokens do not exceed, to the width of a bin; 1 without tokens."""
        if not self.tokens:
            return 1.0
        rank = max(1, math.ceil(share * float(self.histogram.sum())))
        held = int(np.searchsorted(self.histogram.cumsum(), rank))
        return math.exp(_UNIT * math.sinh((held - _BINS // 2) * _WIDTH))

    def metrics(self) -> dict[str, float]:
        """Means, quantiles and the maximum by the names of their curves (docs/metrics.md). Needs a token."""
        sums = {
            "loss/clip_fraction": self.clipped_low + self.clipped_high,
            "loss/clip_low_fraction": self.clipped_low,
            "loss/clip_high_fraction": self.clipped_high,
            "loss/cap_fraction": self.capped,
            "loss/mask_fraction": self.masked,
            "loss/approx_kl": self.kl,
            "loss/reference_kl": self.reference_kl,
            "policy/entropy": self.entropy,
        }
        quantiles = {"p01": 0.01, "p50": 0.5, "p99": 0.99}
        return {
            **{name: total / self.tokens for name, total in sums.items()},
            **{f"policy/importance_weight_{name}": self.weight_quantile(share) for name, share in quantiles.items()},
            "policy/importance_weight_max": self.weight_max,
            "policy/ess": self.ess,
        }


@torch.no_grad()
def loss_stats(tokens: Tokens, surrogate: Surrogate, *, untouched: bool) -> LossStats:
    """The statistics of a micro-batch. `untouched` as in losses.policy_loss."""
    mask, nothing = tokens.mask, torch.zeros_like(tokens.mask)
    own = tokens.current if tokens.proximal is None else tokens.proximal
    matched = mask & (tokens.staleness == 0) if untouched or tokens.proximal is not None else nothing
    log_weight = surrogate.log_weight.double()  # engines agree to 1e-6: in float32 k3 would be rounding error
    weight = torch.where(mask, log_weight.exp(), 0.0)
    sums = (
        mask,
        surrogate.clipped_low,
        surrogate.clipped_high,
        surrogate.capped,
        surrogate.masked,
        nothing if tokens.entropy is None else torch.where(mask, tokens.entropy, 0.0),
        k3(surrogate.log_ratio.double()),
        nothing if tokens.reference is None else k3(-log_quotient(tokens.current, tokens.reference, mask).double()),
        weight,
        weight.square(),
        torch.cat((weight, weight.new_zeros(1))).max(),
        matched,
        k3(log_quotient(own, tokens.behaviour, matched).double()),
    )
    bins = (torch.asinh(log_weight[mask] / _UNIT) / _WIDTH + _BINS / 2).floor().long().clamp(0, _BINS - 1)
    row = torch.cat((torch.stack([value.double().sum() for value in sums]), bins.bincount(minlength=_BINS).double()))
    return LossStats.from_values(row.cpu().numpy())
