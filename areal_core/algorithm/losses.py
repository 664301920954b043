"""The loss of a micro-batch: an objective, a KL divergence from the reference policy and an entropy bonus, in one
weighted sum."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from areal_core.algorithm.divergences import KL_TERMS, log_quotient
from areal_core.algorithm.objectives import Tokens, find_objective
from areal_core.algorithm.statistics import LossStats, loss_stats
from areal_core.config.algorithm import AlgorithmConfig


class PolicyLoss(NamedTuple):
    loss: Tensor  # [], differentiable: minus the weighted sum of the objective over loss tokens / denominator
    stats: LossStats


def policy_loss(tokens: Tokens, config: AlgorithmConfig, *, denominator: float, untouched: bool = False) -> PolicyLoss:
    """The loss of one share of a minibatch: losses and statistics add up over any partition of it.

    `denominator` is the loss denominator (algorithm.means) of the PPO minibatch over all ranks. `untouched`: pi_theta
    is still the version that is trained on, so that its own tokens show how far trainer and generator disagree;
    pi_prox, where there is one, shows it at any time.
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
    """Advantages minus k1, log(pi / pi_ref) of the token, where pi is the policy that the step started from.

    As a term of the loss k1 would do nothing: its gradient, that of log pi_theta, has mean zero under pi_theta.
    """
    assert tokens.reference is not None
    start = tokens.behaviour if tokens.proximal is None else tokens.proximal
    return tokens.advantages - coefficient * (start - tokens.reference).detach()
