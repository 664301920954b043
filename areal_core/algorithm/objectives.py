"""What a token adds to the objective, by name of the objective: pure functions of the policies' log-probabilities.

Policies are named, and given as log-probabilities of the sampled tokens, in nats: `current` pi_theta, being optimised;
`proximal` pi_prox, before this training step; `behaviour` pi_behav, at generation; `reference` pi_ref, version 0 of the
run. All tensors are [N], one entry a token; `mask` says which are loss tokens: what stands elsewhere has no effect, not
even a NaN. Only `current` and `entropy` get a gradient. Equations and their sources: docs/algorithm.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from areal_core.algorithm.divergences import log_quotient
from areal_core.config.algorithm import AlgorithmConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """What is known of the tokens of a micro-batch, [N] each."""

    current: Tensor
    behaviour: Tensor
    advantages: Tensor
    mask: Tensor  # bool
    weights: Tensor  # of the mean over tokens, algorithm.means
    staleness: Tensor  # version trained on - version that sampled the token
    proximal: Tensor | None = None  # None: nothing is stale, or the objective has none
    reference: Tensor | None = None  # None: no divergence is asked for
    entropy: Tensor | None = None  # of pi_theta where the token was sampled


@dataclass(frozen=True, slots=True, kw_only=True)
class Surrogate:
    """What an objective makes of tokens, [N] each; 0 or False outside the mask."""

    terms: Tensor  # of the objective, to be made large; differentiable
    log_ratio: Tensor  # log u: how far pi_theta has moved from the policy that the step started at
    log_weight: Tensor  # log r, of the importance weight before any cap or mask
    clipped_low: Tensor  # bool: tokens whose gradient the lower bound of the clip removed
    clipped_high: Tensor
    capped: Tensor  # bool: tokens whose weight was above the cap
    masked: Tensor  # bool: tokens that their weight left out


def decoupled(tokens: Tokens, config: AlgorithmConfig) -> Surrogate:
    """Decoupled PPO (AReaL, Eq. 5): w min(u A, clip(u) A) with u = pi_theta / pi_prox and w = pi_prox / pi_behav. Where
    nothing is stale pi_behav is pi_prox."""
    if tokens.proximal is None:
        return naive(tokens, config)
    return _weighted_ppo(tokens, tokens.proximal, config)


def naive(tokens: Tokens, config: AlgorithmConfig) -> Surrogate:
    """PPO as if data were never stale: min(u A, clip(u) A) with u = pi_theta / pi_behav."""
    log_ratio = log_quotient(tokens.current, tokens.behaviour, tokens.mask)
    terms, low, high = _clipped(log_ratio.exp(), tokens, config)
    nothing = torch.zeros_like(tokens.mask)
    return Surrogate(
        terms=terms,
        log_ratio=log_ratio,
        log_weight=log_ratio.detach(),
        clipped_low=low,
        clipped_high=high,
        capped=nothing,
        masked=nothing,
    )


def a3po(tokens: Tokens, config: AlgorithmConfig) -> Surrogate:
    """A-3PO: decoupled PPO with log pi_prox = alpha log pi_behav + (1 - alpha) log pi_theta, without a gradient, and
    alpha = 1 / d, where d is the number of versions from the one that sampled the token to the one being made."""
    alpha = 1.0 / (tokens.staleness + 1)
    return _weighted_ppo(tokens, alpha * tokens.behaviour + (1 - alpha) * tokens.current.detach(), config)


def reinforce(tokens: Tokens, config: AlgorithmConfig) -> Surrogate:
    """REINFORCE (RLOO): w A log pi_theta, with w = pi_prox / pi_behav where there is a pi_prox, else 1. No clip."""
    start = tokens.behaviour if tokens.proximal is None else tokens.proximal
    log_ratio = log_quotient(tokens.current, start, tokens.mask)
    terms = torch.where(tokens.mask, tokens.current, 0.0) * _advantages(tokens)
    nothing = torch.zeros_like(tokens.mask)
    log_weight, capped, masked = log_ratio.detach(), nothing, nothing
    if tokens.proximal is not None:
        log_weight = log_quotient(tokens.proximal.detach(), tokens.behaviour, tokens.mask)
        weight, capped, masked = _bounded_weight(log_weight, tokens.mask, config)
        terms = terms * weight
    return Surrogate(
        terms=terms,
        log_ratio=log_ratio,
        log_weight=log_weight,
        clipped_low=nothing,
        clipped_high=nothing,
        capped=capped,
        masked=masked,
    )


OBJECTIVES: dict[str, Callable[[Tokens, AlgorithmConfig], Surrogate]] = {  # by AlgorithmConfig.objective
    "decoupled": decoupled,
    "naive": naive,
    "a3po": a3po,
    "reinforce": reinforce,
}


def _weighted_ppo(tokens: Tokens, proximal: Tensor, config: AlgorithmConfig) -> Surrogate:
    log_ratio = log_quotient(tokens.current, proximal, tokens.mask)
    log_weight = log_quotient(proximal.detach(), tokens.behaviour, tokens.mask)
    terms, low, high = _clipped(log_ratio.exp(), tokens, config)
    weight, capped, masked = _bounded_weight(log_weight, tokens.mask, config)
    return Surrogate(
        terms=weight * terms,
        log_ratio=log_ratio,
        log_weight=log_weight,
        clipped_low=low,
        clipped_high=high,
        capped=capped,
        masked=masked,
    )


def _advantages(tokens: Tokens) -> Tensor:
    return torch.where(tokens.mask, tokens.advantages.detach(), 0.0)


def _clipped(ratio: Tensor, tokens: Tokens, config: AlgorithmConfig) -> tuple[Tensor, Tensor, Tensor]:
    """min(u A, clip(u, 1 - eps, 1 + eps_high) A), and where the lower and the upper bound took effect."""
    advantages = _advantages(tokens)
    high = config.clip_eps if config.clip_eps_high is None else config.clip_eps_high
    free, bounded = ratio * advantages, ratio.clamp(1 - config.clip_eps, 1 + high) * advantages
    took_effect = bounded < free
    return torch.minimum(free, bounded), took_effect & (ratio < 1), took_effect & (ratio > 1)


def _bounded_weight(log_weight: Tensor, mask: Tensor, config: AlgorithmConfig) -> tuple[Tensor, Tensor, Tensor]:
    """The weight after cap or mask, and which tokens were capped and which were masked."""
    weight = log_weight.exp()
    capped, masked = torch.zeros_like(mask), torch.zeros_like(mask)
    if config.behaviour_cap is not None:
        capped = mask & (weight > config.behaviour_cap)
        weight = weight.clamp(max=config.behaviour_cap)
    if config.behaviour_mask_low is not None:
        masked = masked | (weight < config.behaviour_mask_low)
    if config.behaviour_mask_high is not None:
        masked = masked | (weight > config.behaviour_mask_high)
    masked = masked & mask
    return torch.where(masked, 0.0, weight), capped, masked
