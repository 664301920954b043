"""The loss of a micro-batch, the token weights of its mean, and the statistics of a training step.

The loss is the weighted sum of token terms over the loss denominator, which is summed over all ranks. Token weights and
denominator are computed per completion. So the loss does not depend on how completions are partitioned into
micro-batches or over ranks.

Histogram bins of importance weights r are even in asinh(log r / 0.001). Quantiles are exact to 1.1% of log r or to
1.1e-5 nats, whichever is more.

Axes of the means: N completions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from areal_core.algorithm.objectives import Surrogate, Tokens, find_objective, log_quotient
from areal_core.config.algorithm import AlgorithmConfig
from areal_core.errors import ConfigError

Float64Array = NDArray[np.float64]


def k2(log_quotient: Tensor) -> Tensor:
    """Half the square of log q, with q = pi_ref / pi_theta. [N] nats.

    On tokens sampled from pi_theta, its gradient is an unbiased estimate of the gradient of KL(pi_theta | pi_ref).
    """
    return log_quotient.square() / 2


def k3(log_quotient: Tensor) -> Tensor:
    """q - 1 - log q: a KL estimate that is never negative (Schulman, 2020). [N] nats.

    With q = pi_ref / pi_theta and tokens from pi_theta it is an unbiased estimate of KL(pi_theta | pi_ref).
    """
    return torch.expm1(log_quotient) - log_quotient


KL_TERMS = {"k2": k2, "k3": k3}  # by AlgorithmConfig.kl_estimator; k1 changes advantages instead


class PolicyLoss(NamedTuple):
    loss: Tensor  # [], differentiable: minus the weighted sum of the objective over loss tokens / denominator
    stats: LossStats


def policy_loss(tokens: Tokens, config: AlgorithmConfig, *, denominator: float, untouched: bool = False) -> PolicyLoss:
    """Compute the loss and the statistics of one part of a minibatch; parts add up to the whole.

    `denominator` is the loss denominator of the PPO minibatch over all ranks (engine.loss_weights). `untouched` says
    that pi_theta is still the version trained on: its own tokens then show the train/inference KL. Where there is a
    pi_prox, it shows that KL at any time.
    """
    if config.kl_coef and config.kl_estimator not in KL_TERMS:
        tokens = replace(tokens, advantages=_penalised(tokens, config.kl_coef))
    surrogate = find_objective(config.objective)(tokens, config)
    terms = surrogate.terms
    if config.kl_coef and config.kl_estimator in KL_TERMS:
        assert tokens.reference is not None
        log_ratio = -log_quotient(tokens.current, tokens.reference, tokens.mask)  # log pi_ref / pi_theta
        terms = terms - config.kl_coef * KL_TERMS[config.kl_estimator](log_ratio)
    if config.entropy_coef:
        assert tokens.entropy is not None
        terms = terms + config.entropy_coef * torch.where(tokens.mask, tokens.entropy, 0.0)
    loss = -(torch.where(tokens.mask, tokens.weights, 0.0) * terms).sum() / denominator
    return PolicyLoss(loss, loss_stats(tokens, surrogate, untouched=untouched))


def _penalised(tokens: Tokens, coefficient: float) -> Tensor:
    """Subtract kl_coef times k1 from the advantages.

    k1 is log(pi / pi_ref) of the token, where pi is the policy that the step started from. k1 is no term of the loss:
    its gradient, that of log pi_theta, has mean zero under pi_theta.
    """
    assert tokens.reference is not None
    start = tokens.behaviour if tokens.proximal is None else tokens.proximal
    return tokens.advantages - coefficient * (start - tokens.reference).detach()


_UNIT = 1e-3  # nats: bins are linear in log r below it, logarithmic above it
_BINS = 1025  # odd: the middle bin holds r = 1
_REACH = math.asinh(40.0 / _UNIT)  # nats; the outermost bins also hold larger values
_WIDTH = 2 * _REACH / _BINS
_NUMBERS = ("tokens", "weight", "weight_squared", "matched", "train_inference_kl")  # sums that have no curve


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossStats:
    """Sums over loss tokens; they add up over micro-batches, minibatches and ranks.

    The importance weight r of a token is pi_prox / pi_behav before any cap or mask; without a pi_prox, pi_theta /
    pi_behav. In GSPO it is the geometric mean over the loss tokens of the completion.
    """

    tokens: float = 0.0
    sums: dict[str, float] = field(default_factory=dict[str, float])  # of metrics, by curve name
    weight: float = 0.0
    weight_squared: float = 0.0
    weight_max: float = 0.0  # a maximum, not a sum
    matched: float = 0.0  # tokens sampled by the version trained on
    train_inference_kl: float = 0.0  # k3 of trainer / generator over matched tokens
    histogram: NDArray[np.float64] = field(default_factory=lambda: np.zeros(_BINS))  # tokens by importance weight

    def __add__(self, other: LossStats) -> LossStats:
        names = self.sums.keys() | other.sums.keys()  # a part without completions has no metrics
        return LossStats(
            **{name: getattr(self, name) + getattr(other, name) for name in _NUMBERS},
            sums={name: self.sums.get(name, 0.0) + other.sums.get(name, 0.0) for name in names},
            weight_max=max(self.weight_max, other.weight_max),
            histogram=self.histogram + other.histogram,
        )

    @property
    def ess(self) -> float:
        """Effective sample size as a share of the tokens, (sum r)^2 / (N sum r^2); 1 without tokens."""
        return self.weight**2 / (self.tokens * self.weight_squared) if self.tokens else 1.0

    def weight_quantile(self, share: float) -> float:
        """Return the importance weight at quantile `share`, to the width of a bin; 1 without tokens."""
        if not self.tokens:
            return 1.0
        rank = max(1, math.ceil(share * float(self.histogram.sum())))
        held = int(np.searchsorted(self.histogram.cumsum(), rank))
        return math.exp(_UNIT * math.sinh((held - _BINS // 2) * _WIDTH))

    def metrics(self) -> dict[str, float]:
        """Return means, quantiles and the maximum by curve name (docs/metrics.md). Needs at least one token."""
        quantiles = {"p01": 0.01, "p50": 0.5, "p99": 0.99}
        return {
            **{name: total / self.tokens for name, total in self.sums.items()},
            **{f"policy/importance_weight_{name}": self.weight_quantile(share) for name, share in quantiles.items()},
            "policy/importance_weight_max": self.weight_max,
            "policy/ess": self.ess,
        }


@torch.no_grad()
def loss_stats(tokens: Tokens, surrogate: Surrogate, *, untouched: bool) -> LossStats:
    """Compute the statistics of a micro-batch. `untouched` as in policy_loss."""
    mask, nothing = tokens.mask, torch.zeros_like(tokens.mask)
    own = tokens.current if tokens.proximal is None else tokens.proximal
    matched = mask & (tokens.staleness == 0) if untouched or tokens.proximal is not None else nothing
    log_weight = surrogate.log_weight.double()  # engines agree to 1e-6, where k3 in float32 is rounding error
    weight = torch.where(mask, log_weight.exp(), 0.0)
    metrics = {
        "loss/approx_kl": k3(surrogate.log_ratio.double()),  # of u: how far this step has moved the policy
        "loss/reference_kl": nothing
        if tokens.reference is None
        else k3(-log_quotient(tokens.current, tokens.reference, mask).double()),
        "policy/entropy": nothing if tokens.entropy is None else tokens.entropy,
        **surrogate.metrics,
    }
    kl = k3(log_quotient(own, tokens.behaviour, matched).double())
    columns = (mask, weight, weight.square(), matched, kl, *(_of_tokens(name, metrics[name], mask) for name in metrics))
    bins = (torch.asinh(log_weight[mask] / _UNIT) / _WIDTH + _BINS / 2).floor().long().clamp(0, _BINS - 1)
    largest = torch.cat((weight, weight.new_zeros(1))).max()
    row = torch.stack([largest, *map(_total, columns)])
    found = torch.cat((row, bins.bincount(minlength=_BINS).double())).cpu().numpy()
    weight_max, *sums = found[: len(row)].tolist()
    named = dict(zip(_NUMBERS, sums, strict=False))
    of_metrics = dict(zip(metrics, sums[len(_NUMBERS) :], strict=True))
    return LossStats(**named, sums=of_metrics, weight_max=weight_max, histogram=found[len(row) :])


def _total(column: Tensor) -> Tensor:
    count = column.count_nonzero() if column.dtype == torch.bool else column.sum(dtype=torch.float64)
    return count.double()


def _of_tokens(name: str, values: Tensor | float, mask: Tensor) -> Tensor:
    """Expand a metric to one number per token, [N], 0 outside the mask. Raises ConfigError for any other shape."""
    values = torch.as_tensor(values, device=mask.device)
    if values.shape not in (mask.shape, ()):
        raise ConfigError(
            f"algorithm.objective: metric {name} must be a number, or one for each of the {len(mask)} tokens, "
            f"got shape {list(values.shape)}"
        )
    return mask & values if values.dtype == torch.bool else values.expand(mask.shape).masked_fill(~mask, 0.0)
