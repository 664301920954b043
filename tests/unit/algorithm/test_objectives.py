"""Every objective on a few tokens whose numbers are worked out here, its gradient, and what the objectives share."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from areal_core.algorithm.losses import policy_loss
from areal_core.algorithm.objectives import (
    Surrogate,
    Tokens,
    a3po,
    cispo,
    decoupled,
    find_objective,
    gspo,
    reinforce,
    standard,
)
from areal_core.config.algorithm import OBJECTIVES, AlgorithmConfig
from areal_core.config.schema import load
from tests.support.tokens import TOKENS, logs, of

CONFIG = AlgorithmConfig()


def differentiated(objective: Callable[..., Surrogate], tokens: Tokens, config: AlgorithmConfig) -> tuple[Any, Any]:
    """(terms, the gradient of their sum by log pi_theta)"""
    current = tokens.current.clone().requires_grad_()
    terms = objective(replace(tokens, current=current), config).terms
    (gradient,) = torch.autograd.grad(terms.sum(), current)
    return terms.tolist(), gradient.tolist()


def flags(surrogate: Surrogate) -> dict[str, list[int]]:
    """The tokens that have a metric other than 0, by the metric's name: {"clip_low": [2]}."""
    marked = {name: torch.as_tensor(values).nonzero()[:, 0].tolist() for name, values in surrogate.metrics.items()}
    return {name[len("loss/") : -len("_fraction")]: tokens for name, tokens in marked.items() if tokens}


LOGS = (-0.5978370007556204, -0.5108256237659907, -2.995732273553991)  # of pi_theta: 0.55, 0.6, 0.05
OLD, FRESH = (2, 1, 1 / 2, 1), (2.2, 1.5, 0.25, 1)  # pi_prox / pi_behav, and pi_theta / pi_behav
PULLED = (2.2**0.5, 1, 0.25**0.75, 1)  # A-3PO's pi_prox / pi_behav: d = 2, 1, 4, so alpha = 1/2, 1, 1/4
ALL = {"clip": [0, 1, 2], "clip_low": [2], "clip_high": [0, 1]}
BOTH = {"clip": [1, 2], "clip_low": [2], "clip_high": [1]}
LOW = {"clip": [2], "clip_low": [2]}
AGAINST = replace(TOKENS, advantages=of(-1, -1, 2, float("nan")))
UNWEIGHTED = replace(TOKENS, proximal=None)


@pytest.mark.parametrize(
    ("objective", "tokens", "config", "terms", "gradient", "flagged", "weights"),
    [
        # w u A = 2 * 1.1; 1 * 1.2, as 1.5 is clipped; 1/2 * 0.8 * -2, as 1/2 is clipped and -1.6 is below 0.5 * -2.
        # d u / d log pi_theta = u, and only token 0 is not clipped.
        (decoupled, TOKENS, {}, (2.2, 1.2, -0.8), (2.2, 0, 0), BOTH, OLD),
        (decoupled, TOKENS, {"clip_eps_high": 0.28}, (2.2, 1.28, -0.8), (2.2, 0, 0), BOTH, OLD),
        (decoupled, TOKENS, {"clip_eps_high": 0.6}, (2.2, 1.5, -0.8), (2.2, 1.5, 0), LOW, OLD),
        (decoupled, TOKENS, {"behaviour_cap": 1.5}, (1.65, 1.2, -0.8), (1.65, 0, 0), BOTH | {"cap": [0]}, OLD),
        # u = pi_theta / pi_behav = 2.2, 1.5, 0.25: all three are clipped, but on the pessimistic side.
        (standard, TOKENS, {}, (1.2, 1.2, -1.6), (0, 0, 0), ALL, FRESH),
        (standard, AGAINST, {}, (-2.2, -1.5, 0.5), (-2.2, -1.5, 0.5), {}, FRESH),
        # u = pi_theta / pi_prox = 2.2^(1/2), 1.5, 0.25^(1/4): 1.483, 1.5 and 0.707, all clipped.
        (a3po, TOKENS, {}, (2.2**0.5 * 1.2, 1.2, 0.25**0.75 * 0.8 * -2), (0, 0, 0), ALL, PULLED),
        (a3po, UNWEIGHTED, {"clip_eps": 0.9}, (2.2, 1.5, -0.5), (2.2, 1.5, -0.5), {}, PULLED),  # w u = FRESH
        # w A log pi_theta
        (reinforce, TOKENS, {}, (2 * LOGS[0], LOGS[1], -LOGS[2]), (2, 1, -1), {}, OLD),
        (reinforce, UNWEIGHTED, {}, (LOGS[0], LOGS[1], -2 * LOGS[2]), (1, 1, -2), {}, FRESH),
        (
            reinforce,
            TOKENS,
            {"behaviour_cap": 1.5},
            (1.5 * LOGS[0], LOGS[1], -LOGS[2]),
            (1.5, 1, -1),
            {"cap": [0]},
            OLD,
        ),
        # r = pi_theta / pi_behav held between 0.5 and 2, or only below 2: no token's gradient is dropped.
        *(
            (
                cispo,
                tokens,
                {"clip_eps": eps, "clip_eps_high": 1.0},
                (2 * LOGS[0], 1.5 * LOGS[1], -2 * least * LOGS[2]),
                (2, 1.5, -2 * least),
                {"cap": capped},
                FRESH,
            )
            for tokens, eps, least, capped in (
                (TOKENS, 0.5, 0.5, [0, 2]),
                (UNWEIGHTED, 0.5, 0.5, [0, 2]),
                (TOKENS, 1.0, 0.25, [0]),
                (TOKENS, 5.0, 0.25, [0]),
            )
        ),
    ],
)
def test_objective_by_hand(objective, tokens, config, terms, gradient, flagged, weights):
    changed = replace(CONFIG, **config)
    found, slopes = differentiated(objective, tokens, changed)
    assert found == pytest.approx([*terms, 0])
    assert slopes == pytest.approx([*gradient, 0])
    surrogate = objective(tokens, changed)
    assert flags(surrogate) == flagged
    assert surrogate.log_weight.exp().tolist() == pytest.approx(weights)  # before any cap or clip


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("apart", [80.0, 85.0, 90.0, 120.0, 1e4])
def test_terms_and_gradients_are_finite_however_far_apart_policies_are(name: str, apart: float):
    """In float32, whose largest number is e^88.7; log pi_prox lies half-way between the two others."""
    near, half, far = -1.0, -1.0 - apart / 2, -1.0 - apart
    logprobs = {"current": (near, near, far, 0), "proximal": (half,) * 4, "behaviour": (far, far, near, 0)}
    tokens = replace(TOKENS, **{name: of(*values) for name, values in logprobs.items()}, advantages=of(-3, 3, -3, 0))
    terms, gradient = differentiated(find_objective(name), tokens, CONFIG)
    assert np.isfinite([*terms, *gradient]).all()
    assert not OBJECTIVES[name].weighs or max(map(abs, terms)) <= math.exp(82.001)


@pytest.mark.parametrize(
    ("low", "high", "kept"), [(0.6, 1.5, [1]), (None, 1.5, [1, 2]), (0.6, None, [0, 1]), (0.5, 2.0, [0, 1, 2])]
)
def test_the_mask_takes_tokens_out_by_their_weight(low: float | None, high: float | None, kept: list[int]):
    exact = replace(TOKENS, proximal=logs(0.5, 0.5, 0.25, 1), behaviour=logs(0.25, 0.5, 0.5, 1))  # w = 2, 1, 1/2
    config = replace(CONFIG, behaviour_mask_low=low, behaviour_mask_high=high)
    whole = decoupled(exact, CONFIG).terms
    surrogate = decoupled(exact, config)
    masked = [index for index in range(3) if index not in kept]
    assert flags(surrogate) == flags(decoupled(exact, CONFIG)) | ({"mask": masked} if masked else {})
    for index in range(3):
        assert surrogate.terms[index] == (whole[index] if index in kept else 0)


def sample(seed: int, count: int = 40) -> Tokens:
    """Tokens of completions of every length from 0, some with few loss tokens or none."""
    generator = torch.Generator().manual_seed(seed)
    behaviour, drift, noise, advantages = torch.randn(4, count, generator=generator, dtype=torch.float64)
    return Tokens(
        current=behaviour + 0.4 * drift + 0.2 * noise,
        proximal=behaviour + 0.4 * drift,
        behaviour=behaviour,
        advantages=advantages,
        mask=torch.rand(count, generator=generator) < 0.7,
        weights=torch.ones(count, dtype=torch.float64),
        staleness=torch.randint(0, 4, (count,), generator=generator),
        sequence=torch.randint(0, count // 4, (count,), generator=generator),
        sequences=count // 4,
        reference=behaviour + 0.1,
        entropy=torch.ones(count, dtype=torch.float64),
    )


def with_what_has_no_gradient_held(name: str, tokens: Tokens) -> tuple[Callable[..., Surrogate], Tokens]:
    """An objective of the same gradient at these tokens, in which nothing follows pi_theta that has none."""
    current, proximal, behaviour = tokens.current, tokens.proximal, tokens.behaviour
    assert proximal is not None
    if name == "a3po":  # pi_prox follows pi_theta
        return decoupled, replace(tokens, proximal=(behaviour - current) / (tokens.staleness + 1) + current)
    if name == "cispo":  # the weight does: that of REINFORCE, were its pi_prox where pi_theta is
        return reinforce, replace(tokens, proximal=current)
    if name == "gspo":  # what other tokens of the completion add to the ratio does
        ratio, weight = torch.zeros_like(current), torch.zeros_like(current)
        for number in range(tokens.sequences):
            members = tokens.mask & (tokens.sequence == number)
            ratio[members] = (current - proximal)[members].mean()
            weight[members] = (proximal - behaviour)[members].mean()
        return decoupled, replace(tokens, proximal=current - ratio, behaviour=current - ratio - weight)
    return find_objective(name), tokens


@pytest.mark.parametrize("name", OBJECTIVES)
def test_gradients_agree_with_finite_differences(name: str):
    tokens = sample(1, 16)
    wide = replace(CONFIG, clip_eps=1.0, clip_eps_high=0.2)
    mine = differentiated(find_objective(name), tokens, wide)
    held, at = with_what_has_no_gradient_held(name, tokens)
    config = replace(wide, behaviour_cap=1.2) if name == "cispo" else wide

    def terms(current: Tensor) -> Tensor:
        return held(replace(at, current=current), config).terms

    assert torch.autograd.gradcheck(terms, tokens.current.clone().requires_grad_())
    theirs = differentiated(held, at, config)
    assert mine[0] == pytest.approx(theirs[0])
    assert mine[1] == pytest.approx(theirs[1])
    assert any(mine[1])


@pytest.mark.parametrize("name", OBJECTIVES)
def test_only_the_current_policy_gets_a_gradient(name: str):
    tokens = sample(2)
    given = {
        field: getattr(tokens, field).clone().requires_grad_()
        for field in ("current", "proximal", "behaviour", "advantages")
    }
    find_objective(name)(replace(tokens, **given), CONFIG).terms.sum().backward()
    assert given["current"].grad is not None
    assert given["proximal"].grad is given["behaviour"].grad is given["advantages"].grad is None


@pytest.mark.parametrize("name", OBJECTIVES)
def test_nothing_outside_the_mask_matters(name: str):
    tokens = sample(3)
    poisoned = {
        field: torch.where(tokens.mask, getattr(tokens, field), float("nan"))
        for field in ("current", "proximal", "behaviour", "advantages")
    }
    config = replace(CONFIG, behaviour_cap=1.1)
    function = find_objective(name)
    assert differentiated(function, replace(tokens, **poisoned), config) == differentiated(function, tokens, config)
    surrogate = function(replace(tokens, **poisoned), config)
    for of_token in (surrogate.log_ratio, surrogate.log_weight, *map(torch.as_tensor, surrogate.metrics.values())):
        assert not of_token[~tokens.mask].any()


def test_decoupled_is_ppo_where_nothing_is_stale():
    tokens = sample(4)
    ppo = differentiated(standard, tokens, CONFIG)
    fresh = replace(tokens, proximal=tokens.behaviour)
    terms, gradient = differentiated(decoupled, fresh, CONFIG)
    assert terms == ppo[0]
    assert gradient == pytest.approx(ppo[1])
    assert differentiated(decoupled, replace(tokens, proximal=None), CONFIG) == ppo


# -- completions -----------------------------------------------------------------------------------------------


# completion            0           1                       2      3 (none)   4
# pi_theta / pi_prox    1.44, 1     0.5, 0.72, -            1.05   -          1.96, 1     s = 1.2, 0.6, 1.05, 1.4
# pi_prox / pi_behav    4, 1        0.5, 0.5, -             3      -          1, 1        w = 2, 0.5, 3, 1
# A                     1           -2                      1      -          -1
# loss tokens           both        the first two           one    none       both
NAN = float("nan")
RATIO = logs(1.44, 1, 0.5, 0.72, NAN, 1.05, NAN, 1.96, 1)
WEIGHT = logs(4, 1, 0.5, 0.5, NAN, 3, NAN, 1, 1)
SAMPLED = logs(0.1, 0.2, 0.3, 0.4, 0.5, 0.2, 0.1, 0.3, 0.2)
COMPLETIONS = Tokens(
    current=SAMPLED + WEIGHT + RATIO,
    proximal=SAMPLED + WEIGHT,
    behaviour=SAMPLED,
    advantages=of(1, 1, -2, -2, NAN, 1, NAN, -1, -1),
    mask=torch.tensor([True, True, True, True, False, True, False, True, True]),
    weights=of(0.5, 0.5, 0.5, 0.5, NAN, 1, NAN, 0.5, 0.5),  # of loss_mean=sequence: 1 / T
    staleness=torch.ones(9),
    sequence=torch.tensor([0, 0, 1, 1, 1, 2, 3, 4, 4]),
    sequences=5,
)
TENTH = AlgorithmConfig(objective="gspo", loss_mean="sequence", clip_eps=0.1)


def test_gspo_by_hand():
    terms, gradient = differentiated(gspo, COMPLETIONS, TENTH)
    # completion 0: s = sqrt(1.44) = 1.2 is above 1.1 with A > 0:   2 * 1.1 = 2.2, no gradient
    # completion 1: s = sqrt(0.36) = 0.6 is below 0.9 with A < 0:   0.5 * 0.9 * -2 = -0.9, no gradient
    # completion 2: s = 1.05 is within:                              3 * 1.05 = 3.15, and so is w s A
    # completion 4: s = sqrt(1.96) = 1.4 with A < 0 is left alone:   1 * 1.4 * -1 = -1.4, for both of its tokens
    assert terms == pytest.approx([2.2, 2.2, -0.9, -0.9, 0, 3.15, 0, -1.4, -1.4])
    assert gradient == pytest.approx([0, 0, 0, 0, 0, 3.15, 0, -1.4, -1.4])
    surrogate = gspo(COMPLETIONS, TENTH)
    assert flags(surrogate) == {"clip": [0, 1, 2, 3], "clip_low": [2, 3], "clip_high": [0, 1]}
    assert surrogate.log_weight.exp().tolist() == pytest.approx([2, 2, 0.5, 0.5, 1, 3, 1, 1, 1])
    assert surrogate.log_ratio.exp().tolist() == pytest.approx([1.44, 1, 0.5, 0.72, 1, 1.05, 1, 1.96, 1])
    # the mean over the four completions that have loss tokens
    assert policy_loss(COMPLETIONS, TENTH, denominator=4).loss.item() == pytest.approx(-(2.2 - 0.9 + 3.15 - 1.4) / 4)


def test_gspo_caps_and_masks_whole_completions():
    # w = 2, 0.5, 3, 1, though the tokens of completion 0 have 4 and 1
    capped = gspo(COMPLETIONS, replace(TENTH, behaviour_cap=2.5))
    assert capped.terms.tolist() == pytest.approx([2.2, 2.2, -0.9, -0.9, 0, 2.5 * 1.05, 0, -1.4, -1.4])
    assert flags(capped)["cap"] == [5]
    masked = gspo(COMPLETIONS, replace(TENTH, behaviour_mask_low=0.8, behaviour_mask_high=2.5))
    assert masked.terms.tolist() == pytest.approx([2.2, 2.2, 0, 0, 0, 0, 0, -1.4, -1.4])
    assert flags(masked)["mask"] == [2, 3, 5]


@pytest.mark.parametrize("stale", [True, False])
def test_gspo_of_completions_of_one_token_is_ppo(stale: bool):
    tokens = replace(sample(13), sequence=torch.arange(40), sequences=40)
    tokens = tokens if stale else replace(tokens, proximal=None)
    config = replace(CONFIG, clip_eps=0.05, behaviour_cap=1.1)
    assert differentiated(gspo, tokens, config) == differentiated(decoupled, tokens, config)
    assert flags(gspo(tokens, config)) == flags(decoupled(tokens, config))
    assert differentiated(gspo, sample(13), config) != differentiated(decoupled, sample(13), config)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_neither_order_nor_number_of_completions_matters(name: str):
    tokens = sample(14)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    moved = {
        field: getattr(tokens, field)[order]
        for field in ("current", "proximal", "behaviour", "advantages", "mask", "weights", "staleness")
    }
    renamed = (3 * tokens.sequence + 1) % 11  # 10 completions: by other numbers, one of which nobody has
    terms, gradient = differentiated(find_objective(name), tokens, CONFIG)
    other = replace(tokens, **moved, sequence=renamed[order], sequences=11)
    assert differentiated(find_objective(name), other, CONFIG) == (
        pytest.approx(np.array(terms)[order].tolist()),
        pytest.approx(np.array(gradient)[order].tolist()),
    )


# -- the registry ----------------------------------------------------------------------------------------------


def doubled(tokens: Tokens, config: AlgorithmConfig) -> Surrogate:
    surrogate = decoupled(tokens, config)
    return replace(surrogate, terms=2 * surrogate.terms)


def test_an_objective_of_ones_own_is_named_by_where_it_is():
    config = load({"algorithm": {"objective": f"{__name__}:doubled", "behaviour_cap": 2.0}}).algorithm
    assert config.takes_proximal
    expected = policy_loss(TOKENS, replace(config, objective="decoupled"), denominator=1).loss
    assert policy_loss(TOKENS, config, denominator=1).loss == 2 * expected


@pytest.mark.parametrize("d", [2, 3, 6])
def test_a3po_has_the_gradient_of_standard_ppo_under_a_clip_that_widens_with_staleness(d: int):
    """w u = pi_theta / pi_behav = q, and u = q^(1/d) is clipped where q leaves the d-th powers of the bounds."""
    tokens = replace(sample(6), staleness=torch.full((40,), d - 1))
    wide = replace(CONFIG, clip_eps=1 - 0.8**d, clip_eps_high=1.2**d - 1)
    gradient = differentiated(a3po, tokens, CONFIG)[1]
    assert gradient == pytest.approx(differentiated(standard, tokens, wide)[1])
    assert gradient != pytest.approx(differentiated(standard, tokens, CONFIG)[1])


def test_gspo_is_the_papers_mean_over_completions_and_so_is_its_gradient():
    current, mean = COMPLETIONS.current.clone().requires_grad_(), of(0.0).sum()
    for number in (0, 1, 2, 4):
        at = COMPLETIONS.mask & (COMPLETIONS.sequence == number)
        ratio = (current - COMPLETIONS.proximal)[at].mean().exp()
        weight = (COMPLETIONS.proximal - COMPLETIONS.behaviour)[at].mean().exp()
        advantage = COMPLETIONS.advantages[at][0]
        mean = mean + weight * torch.minimum(ratio * advantage, ratio.clamp(0.9, 1.1) * advantage) / 4
    loss = policy_loss(replace(COMPLETIONS, current=current), TENTH, denominator=4).loss
    torch.testing.assert_close(loss, -mean)
    torch.testing.assert_close(torch.autograd.grad(loss, current), torch.autograd.grad(-mean, current))


def test_a3po_is_standard_ppo_for_tokens_of_the_version_trained_on():
    tokens = replace(sample(5), staleness=torch.zeros(40, dtype=torch.long))
    assert differentiated(a3po, tokens, CONFIG) == differentiated(standard, tokens, CONFIG)


def test_cispo_without_a_clip_has_the_gradient_of_weighted_reinforce_and_of_unclipped_ppo():
    tokens, free = sample(15), replace(CONFIG, clip_eps=1e9)
    gradient = differentiated(cispo, tokens, free)[1]
    assert gradient == pytest.approx(differentiated(standard, tokens, free)[1])
    weighted = replace(tokens, proximal=tokens.current)  # w = pi_theta / pi_behav
    assert gradient == pytest.approx(differentiated(reinforce, weighted, free)[1])
    assert gradient != pytest.approx(differentiated(cispo, tokens, CONFIG)[1])
