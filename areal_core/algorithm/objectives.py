"""The objectives: one term per token, as pure functions of the policies' log-probabilities.

Policies are log-probabilities of the sampled tokens, in nats:
- `current`: pi_theta, being optimised
- `proximal`: pi_prox, before this training step
- `behaviour`: pi_behav, at generation
- `reference`: pi_ref, version 0 of the run

All tensors are [N], one entry per token. `mask` marks the loss tokens. Values of other tokens have no effect, even if
they are NaN. Only `current` and `entropy` receive a gradient. Equations and sources: docs/algorithm.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from areal_core.config.algorithm import OBJECTIVES, AlgorithmConfig
from areal_core.config.plugins import find


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """All tokens of S whole completions, in one micro-batch. Tensors are [N]."""

    current: Tensor
    behaviour: Tensor
    advantages: Tensor
    mask: Tensor  # bool
    weights: Tensor  # token weights of the mean, see algorithm.losses
    staleness: Tensor  # version trained on - version that sampled the token
    sequence: Tensor  # int64, 0 .. S - 1: the completion of each token
    sequences: int  # S
    proximal: Tensor | None = None  # None: no token is stale, or the objective uses none
    reference: Tensor | None = None  # None: the loss has no KL term
    entropy: Tensor | None = None  # of pi_theta at the token's position, nats
    # Coefficients of this step from algorithm.control that are not fields of AlgorithmConfig.
    coefficients: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True, kw_only=True)
class Surrogate:
    """The terms of an objective and the metrics that become curves.

    `terms`, `log_ratio` and `log_weight` are [N], and 0 outside the mask.
    """

    terms: Tensor  # to be maximised; differentiable
    log_ratio: Tensor  # log u: how far pi_theta has moved from the start of the step
    log_weight: Tensor  # log r: the importance weight before any cap, mask or clip
    # By curve name: a number a token [N], a flag a token [N], or one number []. The curve's point is the mean over all
    # loss tokens of the step, over micro-batches and ranks; one number counts for each loss token of its micro-batch.
    # Values outside the mask have no effect.
    metrics: Mapping[str, Tensor | float] = field(default_factory=dict[str, "Tensor | float"])


_LARGEST = math.exp(82.0)  # of a term: float32 can sum 800 of them
_LARGEST_LOG = 60.0  # of a log quotient, nats

ObjectiveFunction = Callable[[Tokens, AlgorithmConfig], Surrogate]
_FUNCTIONS: dict[str, ObjectiveFunction] = {}


def log_quotient(numerator: Tensor, denominator: Tensor, mask: Tensor) -> Tensor:
    """Return log(numerator / denominator) of two policies, clamped to +-60 nats. [N] each.

    `denominator` receives no gradient. Values outside the mask are 0 before `exp`, so that gradients of NaN can't
    spread. The clamp keeps infinite quotients from becoming NaN when multiplied by an advantage of 0.
    """
    return torch.where(mask, numerator - denominator.detach(), 0.0).clamp(-_LARGEST_LOG, _LARGEST_LOG)


def find_objective(name: str) -> ObjectiveFunction:
    """Find the function of AlgorithmConfig.objective by its name here or by "package.module:function".

    Raises ConfigError if there is no such module or function.
    """
    return find("algorithm.objective", name, _FUNCTIONS)


def objective(function: ObjectiveFunction) -> ObjectiveFunction:
    """Decorator: register a function under its name, which config.algorithm.OBJECTIVES must list."""
    assert function.__name__ in OBJECTIVES, f"config.algorithm.OBJECTIVES has no {function.__name__}"
    _FUNCTIONS[function.__name__] = function
    return function


@objective
def decoupled(tokens: Tokens, config: AlgorithmConfig) -> Surrogate:
    """Decoupled PPO (AReaL, Eq. 5): w min(u A, clip(u) A), u = pi_theta / pi_prox, w = pi_prox / pi_behav.

    Without stale tokens pi_behav is pi_prox.
    """
    return _ppo(tokens, config, *_log_ratios(tokens, tokens.proximal))


@objective
def standard(tokens: Tokens, config: AlgorithmConfig) -> Surrogate:
    """Standard PPO, which ignores staleness: min(u A, clip(u) A) with u = pi_theta / pi_behav."""
    return _ppo(tokens, config, *_log_ratios(tokens, None))


@objective
def a3po(tokens: Tokens, config: AlgorithmConfig) -> Surrogate:
    """A-3PO: decoupled PPO with log pi_prox = alpha log pi_behav + (1 - alpha) log pi_theta.

    This pi_prox has no gradient. alpha = 1 / d, where d counts versions from the one that sampled the token to the one
    that this step makes.
    """
    alpha = 1.0 / (tokens.staleness + 1)
    return _ppo(tokens, config, *_log_ratios(tokens, alpha * tokens.behaviour + (1 - alpha) * tokens.current.detach()))


@objective
def gspo(tokens: Tokens, config: AlgorithmConfig) -> Surrogate:
    """GSPO (Zheng et al., 2025, Eq. 5 to 7), decoupled like Eq. 5 of AReaL: w min(s A, clip(s) A).

    For a completion y of T loss tokens, s = (pi_theta(y) / pi_prox(y))^(1 / T) and w = (pi_prox(y) / pi_behav(y))^(1 /
    T). Without stale tokens pi_behav is pi_prox, and this is plain GSPO. w s is always GSPO's ratio against pi_behav.

    Every loss token of y has that term. As in Eq. 14 (GSPO-token), its gradient w s A flows through its own probability
    alone. Summed over y the gradients equal that of s, and A may differ between tokens.
    """
    log_ratio, log_weight = _log_ratios(tokens, tokens.proximal)
    valued = _sequence_mean(log_ratio.detach(), tokens) + (log_ratio - log_ratio.detach())
    weight = None if log_weight is None else _sequence_mean(log_weight, tokens)
    return replace(_ppo(tokens, config, valued, weight), log_ratio=log_ratio)


@objective
def cispo(tokens: Tokens, config: AlgorithmConfig) -> Surrogate:
    """CISPO (MiniMax-M1, Eq. 4 and 5): clip(r) A log pi_theta with r = pi_theta / pi_behav.

    clip(r) has no gradient. The clip bounds the full importance weight against the sampling policy. CISPO drops no
    gradient, so it has no trust region that a pi_prox could centre. Splitting r at a pi_prox would leave half of the
    importance weight unbounded.
    """
    log_ratio, _ = _log_ratios(tokens, None)
    weight = log_ratio.detach().exp()
    bounded = weight.clamp(*config.clip_range)
    surrogate = _weighted(tokens, config, bounded * _score(tokens), log_ratio, None)
    return _with_metrics(surrogate, {"loss/cap_fraction": bounded != weight})


@objective
def reinforce(tokens: Tokens, config: AlgorithmConfig) -> Surrogate:
    """REINFORCE (RLOO): w A log pi_theta, unclipped. w is pi_prox / pi_behav, or 1 without a pi_prox."""
    return _weighted(tokens, config, _score(tokens), *_log_ratios(tokens, tokens.proximal))


def _log_ratios(tokens: Tokens, proximal: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return log u = log(pi_theta / pi_prox) and log w = log(pi_prox / pi_behav).

    Without a pi_prox, return log(pi_theta / pi_behav) and None.
    """
    start = tokens.behaviour if proximal is None else proximal
    log_ratio = log_quotient(tokens.current, start, tokens.mask)
    return log_ratio, None if proximal is None else log_quotient(proximal.detach(), tokens.behaviour, tokens.mask)


def _sequence_mean(values: Tensor, tokens: Tokens) -> Tensor:
    """Mean over the loss tokens of each token's completion. [N] -> [N]; 0 outside the mask."""
    zeros = values.new_zeros(tokens.sequences)
    sums = zeros.index_add(0, tokens.sequence, values)
    counts = zeros.index_add(0, tokens.sequence, tokens.mask.to(values.dtype))
    return torch.where(tokens.mask, (sums / counts.clamp(min=1))[tokens.sequence], 0.0)


def _ppo(tokens: Tokens, config: AlgorithmConfig, log_ratio: Tensor, log_weight: Tensor | None) -> Surrogate:
    """w min(u A, clip(u, 1 - eps, 1 + eps_high) A), with flags of the tokens where a bound took effect."""
    ratio, advantages = log_ratio.exp(), _advantages(tokens)
    free, bounded = ratio * advantages, ratio.clamp(*config.clip_range) * advantages
    took_effect = bounded < free
    surrogate = _weighted(tokens, config, torch.minimum(free, bounded), log_ratio, log_weight)
    flags = {
        "loss/clip_fraction": took_effect,
        "loss/clip_low_fraction": took_effect & (ratio < 1),
        "loss/clip_high_fraction": took_effect & (ratio > 1),
    }
    return _with_metrics(surrogate, flags)


def _weighted(
    tokens: Tokens, config: AlgorithmConfig, terms: Tensor, log_ratio: Tensor, log_weight: Tensor | None
) -> Surrogate:
    """Multiply `terms` by w after its cap or mask. Without a w, keep the terms and use u as r."""
    capped = masked = torch.zeros_like(tokens.mask)
    if log_weight is not None:
        weight, capped, masked = _bounded_weight(log_weight, tokens.mask, config)
        terms = (weight * terms).clamp(-_LARGEST, _LARGEST)  # w and u are finite, their product may overflow
    return Surrogate(
        terms=terms,
        log_ratio=log_ratio,
        log_weight=log_ratio.detach() if log_weight is None else log_weight,
        metrics={"loss/cap_fraction": capped, "loss/mask_fraction": masked},
    )


def _with_metrics(surrogate: Surrogate, metrics: Mapping[str, Tensor | float]) -> Surrogate:
    return replace(surrogate, metrics={**surrogate.metrics, **metrics})


def _score(tokens: Tokens) -> Tensor:
    """A log pi_theta."""
    return torch.where(tokens.mask, tokens.current, 0.0) * _advantages(tokens)


def _advantages(tokens: Tokens) -> Tensor:
    return torch.where(tokens.mask, tokens.advantages.detach(), 0.0)


def _bounded_weight(log_weight: Tensor, mask: Tensor, config: AlgorithmConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Return the importance weight after cap or mask, a flag per capped token and a flag per masked token."""
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


assert _FUNCTIONS.keys() == OBJECTIVES.keys()
