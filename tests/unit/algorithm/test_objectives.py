"""Every objective on a few tokens whose numbers are worked out here, its gradient, and what the objectives share."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from areal_core.algorithm.losses import policy_loss
from areal_core.algorithm.objectives import (
    Surrogate,
    Tokens,
    a3po,
    decoupled,
    find_objective,
    naive,
    objective,
    reinforce,
)
from areal_core.config.algorithm import OBJECTIVES, AlgorithmConfig
from areal_core.config.schema import load
from areal_core.errors import ConfigError
from tests.support.tokens import TOKENS, logs, of

CONFIG = AlgorithmConfig()


def differentiated(objective: Callable[..., Surrogate], tokens: Tokens, config: AlgorithmConfig) -> tuple[Any, Any]:
    """(terms, the gradient of their sum by log pi_theta)"""
    current = tokens.current.clone().requires_grad_()
    terms = objective(replace(tokens, current=current), config).terms
    (gradient,) = torch.autograd.grad(terms.sum(), current)
    return terms.tolist(), gradient.tolist()


def flags(tensor: Tensor) -> list[int]:
    return tensor.nonzero()[:, 0].tolist()


def test_decoupled_by_hand():
    terms, gradient = differentiated(decoupled, TOKENS, CONFIG)
    # 2 * 1.1; 1 * 1.2, as 1.5 is clipped; 1/2 * 0.8 * -2, as 1/2 is clipped and -1.6 is below 0.5 * -2
    assert terms == pytest.approx([2.2, 1.2, -0.8, 0])
    assert gradient == pytest.approx([2.2, 0, 0, 0])  # d u / d log pi_theta = u, and only token 0 is not clipped
    surrogate = decoupled(TOKENS, CONFIG)
    assert (flags(surrogate.clipped_low), flags(surrogate.clipped_high)) == ([2], [1])
    assert surrogate.log_weight.exp().tolist() == pytest.approx([2, 1, 0.5, 1])
    assert surrogate.log_ratio.exp().tolist() == pytest.approx([1.1, 1.5, 0.5, 1])
    assert not surrogate.capped.any()
    assert not surrogate.masked.any()


def test_naive_by_hand():
    # u = pi_theta / pi_behav = 2.2, 1.5, 0.25: all three are clipped
    terms, gradient = differentiated(naive, TOKENS, CONFIG)
    assert terms == pytest.approx([1.2, 1.2, -1.6, 0])
    assert gradient == [0, 0, 0, 0]
    surrogate = naive(TOKENS, CONFIG)
    assert (flags(surrogate.clipped_low), flags(surrogate.clipped_high)) == ([2], [0, 1])
    assert surrogate.log_weight.exp().tolist() == pytest.approx([2.2, 1.5, 0.25, 1])


def test_a3po_by_hand():
    # d = 2, 1, 4, so alpha = 1/2, 1, 1/4.
    # pi_prox = sqrt(0.25 * 0.55), 0.4, 0.2^(1/4) * 0.05^(3/4)
    # u = pi_theta / pi_prox = 2.2^(1/2), 1.5, 0.25^(1/4): 1.483, 1.5 and 0.707, all clipped
    # w = pi_prox / pi_behav = 2.2^(1/2), 1, 0.25^(3/4)
    terms, gradient = differentiated(a3po, TOKENS, CONFIG)
    assert terms == pytest.approx([2.2**0.5 * 1.2, 1.2, 0.25**0.75 * 0.8 * -2, 0])
    assert gradient == [0, 0, 0, 0]
    # With a wide clip nothing is clipped: w u A = pi_theta / pi_behav * A, and so is the gradient.
    terms, gradient = differentiated(a3po, TOKENS, replace(CONFIG, clip_eps=0.9))
    assert terms == pytest.approx([2.2, 1.5, -0.5, 0])
    assert gradient == pytest.approx([2.2, 1.5, -0.5, 0])


def test_reinforce_by_hand():
    terms, gradient = differentiated(reinforce, TOKENS, CONFIG)
    log_half, log_six, log_five = -0.5978370007556204, -0.5108256237659907, -2.995732273553991  # of 0.55, 0.6, 0.05
    assert terms == pytest.approx([2 * log_half, log_six, 0.5 * -2 * log_five, 0])
    assert gradient == pytest.approx([2, 1, -1, 0])  # w A
    unweighted = replace(TOKENS, proximal=None)
    assert differentiated(reinforce, unweighted, CONFIG)[1] == pytest.approx([1, 1, -2, 0])  # A
    assert reinforce(unweighted, CONFIG).log_ratio.exp().tolist() == pytest.approx([2.2, 1.5, 0.25, 1])


def test_the_upper_bound_of_the_clip_can_be_higher():
    terms, gradient = differentiated(decoupled, TOKENS, replace(CONFIG, clip_eps_high=0.28))
    assert terms == pytest.approx([2.2, 1.28, -0.8, 0])
    terms, gradient = differentiated(decoupled, TOKENS, replace(CONFIG, clip_eps_high=0.6))
    assert terms == pytest.approx([2.2, 1.5, -0.8, 0])
    assert gradient == pytest.approx([2.2, 1.5, 0, 0])  # 1.5 is within 1.6; the lower bound stays at 0.8


def test_the_clip_leaves_the_pessimistic_side_alone():
    # u = 1.5 with A < 0 and u = 0.5 with A > 0: the minimum is the ratio itself, and its gradient stays.
    tokens = Tokens(
        current=logs(0.6, 0.2),
        behaviour=logs(0.4, 0.4),
        advantages=of(-1, 1),
        mask=torch.tensor([True, True]),
        weights=of(1, 1),
        staleness=torch.zeros(2),
        sequence=torch.tensor([0, 1]),
        sequences=2,
    )
    terms, gradient = differentiated(naive, tokens, CONFIG)
    assert terms == pytest.approx([-1.5, 0.5])
    assert gradient == pytest.approx([-1.5, 0.5])
    assert not naive(tokens, CONFIG).clipped_low.any()
    assert not naive(tokens, CONFIG).clipped_high.any()


def test_the_cap_bounds_the_weight():
    # w = 2, 1, 1/2, of which the first is above 1.5
    config = replace(CONFIG, behaviour_cap=1.5)
    terms, gradient = differentiated(decoupled, TOKENS, config)
    assert terms == pytest.approx([1.5 * 1.1, 1.2, -0.8, 0])
    assert gradient == pytest.approx([1.5 * 1.1, 0, 0, 0])
    surrogate = decoupled(TOKENS, config)
    assert (flags(surrogate.capped), flags(surrogate.masked)) == ([0], [])
    assert surrogate.log_weight.exp().tolist() == pytest.approx([2, 1, 0.5, 1])  # as it was before the cap
    assert differentiated(reinforce, TOKENS, config)[1] == pytest.approx([1.5, 1, -1, 0])


@pytest.mark.parametrize(
    ("low", "high", "kept"), [(0.6, 1.5, [1]), (None, 1.5, [1, 2]), (0.6, None, [0, 1]), (0.5, 2.0, [0, 1, 2])]
)
def test_the_mask_takes_tokens_out_by_their_weight(low: float | None, high: float | None, kept: list[int]):
    exact = replace(TOKENS, proximal=logs(0.5, 0.5, 0.25, 1), behaviour=logs(0.25, 0.5, 0.5, 1))  # w = 2, 1, 1/2
    config = replace(CONFIG, behaviour_mask_low=low, behaviour_mask_high=high)
    whole = decoupled(exact, CONFIG).terms
    surrogate = decoupled(exact, config)
    assert flags(surrogate.masked) == [index for index in range(3) if index not in kept]
    for index in range(3):
        assert surrogate.terms[index] == (whole[index] if index in kept else 0)
    assert not surrogate.capped.any()


def sample(seed: int, count: int = 40) -> Tokens:
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


@pytest.mark.parametrize("name", OBJECTIVES)
def test_gradients_agree_with_finite_differences(name: str):
    tokens = sample(1, 12)
    # A-3PO's pi_prox follows pi_theta without a gradient: it is held at where it was.
    held = replace(tokens, proximal=None)
    anchored = (held.behaviour - held.current) / (held.staleness + 1) + held.current

    def terms(current: Tensor) -> Tensor:
        if name == "a3po":
            return decoupled(replace(tokens, current=current, proximal=anchored), CONFIG).terms
        return find_objective(name)(replace(tokens, current=current), CONFIG).terms

    assert torch.autograd.gradcheck(terms, tokens.current.clone().requires_grad_())
    mine = differentiated(find_objective(name), tokens, CONFIG)
    current = tokens.current.clone().requires_grad_()
    (same,) = torch.autograd.grad(terms(current).sum(), current)
    assert mine[1] == pytest.approx(same.tolist())


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
    assert differentiated(find_objective(name), replace(tokens, **poisoned), config) == differentiated(
        find_objective(name), tokens, config
    )


def test_decoupled_is_ppo_where_nothing_is_stale():
    tokens = sample(4)
    ppo = differentiated(naive, tokens, CONFIG)
    fresh = replace(tokens, proximal=tokens.behaviour)
    terms, gradient = differentiated(decoupled, fresh, CONFIG)
    assert terms == ppo[0]
    assert gradient == pytest.approx(ppo[1])
    assert differentiated(decoupled, replace(tokens, proximal=None), CONFIG) == ppo


def test_a3po_is_naive_ppo_for_tokens_of_the_version_trained_on():
    tokens = replace(sample(5), staleness=torch.zeros(40, dtype=torch.long))
    assert differentiated(a3po, tokens, CONFIG) == differentiated(naive, tokens, CONFIG)


@pytest.mark.parametrize("staleness", [1, 2, 5])
def test_a3po_has_the_gradient_of_naive_ppo_under_a_clip_that_widens_with_staleness(staleness: int):
    """w u = pi_theta / pi_behav = q, and u = q^(1/d) lies in [1 - eps, 1 + eps] where q lies between the d-th powers of
    the bounds."""
    tokens = replace(sample(6), staleness=torch.full((40,), staleness))
    d = staleness + 1
    wide = replace(CONFIG, clip_eps=1 - 0.8**d, clip_eps_high=1.2**d - 1)
    gradient = differentiated(a3po, tokens, CONFIG)[1]
    assert gradient == pytest.approx(differentiated(naive, tokens, wide)[1])
    assert gradient != pytest.approx(differentiated(naive, tokens, CONFIG)[1])


def test_a3po_reads_no_proximal_policy():
    tokens = sample(7)
    assert differentiated(a3po, tokens, CONFIG) == differentiated(a3po, replace(tokens, proximal=None), CONFIG)


def test_every_objective_can_be_chosen():
    for name in OBJECTIVES:
        assert load({"algorithm": {"objective": name}}).algorithm.objective == name
        assert find_objective(name).__name__ == name
    known = rf"^algorithm.objective: must be one of {', '.join(OBJECTIVES)}, or package.module:function, got"
    for name in ("none of them", "module.function", ":naive", "module:", "a module:function"):
        with pytest.raises(ConfigError, match=known):
            load({"algorithm": {"objective": name}})


def test_a_function_that_is_not_listed_is_no_objective():
    def unheard_of(tokens: Tokens, config: AlgorithmConfig) -> Surrogate:
        return naive(tokens, config)

    with pytest.raises(AssertionError, match=r"config.algorithm.OBJECTIVES has no unheard_of"):
        objective(unheard_of)


def doubled(tokens: Tokens, config: AlgorithmConfig) -> Surrogate:
    surrogate = decoupled(tokens, config)
    return replace(surrogate, terms=2 * surrogate.terms)


def test_an_objective_of_ones_own_is_named_by_where_it_is():
    config = load({"algorithm": {"objective": f"{__name__}:doubled", "behaviour_cap": 2.0}}).algorithm
    assert config.takes_proximal
    expected = policy_loss(TOKENS, replace(config, objective="decoupled"), denominator=1).loss
    assert policy_loss(TOKENS, config, denominator=1).loss == 2 * expected


@pytest.mark.parametrize("name", ["no.such.module:f", "areal_core.algorithm.objectives:nothing"])
def test_an_objective_that_can_not_be_imported_is_one_line(name: str):
    with pytest.raises(ConfigError, match=rf"^algorithm.objective: {name} can't be imported: ") as caught:
        find_objective(name)
    assert "\n" not in str(caught.value)
