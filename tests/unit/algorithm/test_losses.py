"""Objective, divergence and entropy in one sum; k1, k2 and k3 by hand and against the divergence that they estimate."""

from collections.abc import Collection
from dataclasses import replace

import numpy as np
import pytest
import torch

from areal_core.algorithm.advantages import ADVANTAGES
from areal_core.algorithm.divergences import KL_TERMS, k3
from areal_core.algorithm.losses import LOSS_MEANS, LossStats, policy_loss
from areal_core.algorithm.objectives import Tokens
from areal_core.config.algorithm import OBJECTIVES, AlgorithmConfig
from areal_core.config.schema import load
from areal_core.errors import ConfigError
from tests.support.tokens import of

CONFIG = AlgorithmConfig(objective="standard", clip_eps=1.5)  # so wide that nothing below is clipped
LOG2 = 0.6931471805599453


# token               0        1        2, not a loss token
# pi_theta            1/2      1/4
# pi_behav            1/4      1/4
# pi_ref              1/4      1/2      log pi_ref / pi_theta = -log 2, log 2
# A                   1        -1
TOKENS = Tokens(
    current=of(0.5, 0.25, float("nan")).log(),
    behaviour=of(0.25, 0.25, float("nan")).log(),
    reference=of(0.25, 0.5, float("nan")).log(),
    advantages=of(1, -1, float("nan")),
    mask=torch.tensor([True, True, False]),
    weights=of(1, 0.5, float("nan")),
    staleness=torch.zeros(3, dtype=torch.long),
    sequence=torch.zeros(3, dtype=torch.long),
    sequences=1,
    entropy=of(0.3, 0.7, float("nan")),
)


def loss_and_gradient(tokens: Tokens, config: AlgorithmConfig, denominator: float = 4.0) -> tuple[float, list[float]]:
    current = tokens.current.clone().requires_grad_()
    loss, _ = policy_loss(replace(tokens, current=current), config, denominator=denominator)
    (gradient,) = torch.autograd.grad(loss, current)
    return loss.item(), gradient.tolist()


def test_terms_are_weighted_and_divided():
    # u A = 2 and -1, weights 1 and 1/2
    loss, gradient = loss_and_gradient(TOKENS, CONFIG)
    assert loss == pytest.approx(-(2 - 0.5) / 4)
    assert gradient == pytest.approx([-2 / 4, 0.5 / 4, 0])


@pytest.mark.parametrize(
    ("estimator", "values", "slopes"),
    [
        # x = log pi_ref / pi_theta = -log 2, log 2; d x / d log pi_theta = -1
        ("k2", [LOG2**2 / 2, LOG2**2 / 2], [LOG2, -LOG2]),  # x^2 / 2; slope -x
        ("k3", [0.5 - 1 + LOG2, 2 - 1 - LOG2], [1 - 0.5, 1 - 2]),  # e^x - 1 - x; slope 1 - e^x
    ],
)
def test_a_divergence_as_a_term_of_the_loss(estimator: str, values: list[float], slopes: list[float]):
    config = replace(CONFIG, kl_coef=0.1, kl_estimator=estimator)
    loss, gradient = loss_and_gradient(TOKENS, config)
    assert loss == pytest.approx(-(2 - 0.5 - 0.1 * (values[0] + values[1] / 2)) / 4)
    assert gradient == pytest.approx([(-2 + 0.1 * slopes[0]) / 4, (0.5 + 0.1 * slopes[1] / 2) / 4, 0])


def test_k1_is_a_penalty_in_the_advantage():
    # log pi_behav / pi_ref = 0 and -log 2: the advantages are 1 and -1 + 0.1 log 2
    loss, gradient = loss_and_gradient(TOKENS, replace(CONFIG, kl_coef=0.1, kl_estimator="k1"))
    penalised = -1 + 0.1 * LOG2
    assert loss == pytest.approx(-(2 + penalised / 2) / 4)
    assert gradient == pytest.approx([-2 / 4, -penalised / 2 / 4, 0])
    # with a pi_prox, by which u is 1 and w is 2 and 1, it is log pi_prox / pi_ref = log 2 and -log 2
    proximal = replace(TOKENS, proximal=TOKENS.current)
    loss, _ = loss_and_gradient(proximal, replace(CONFIG, objective="decoupled", kl_coef=0.1, kl_estimator="k1"))
    assert loss == pytest.approx(-(2 * (1 - 0.1 * LOG2) + penalised / 2) / 4)


def test_entropy_is_a_bonus():
    entropy = TOKENS.entropy.clone().requires_grad_()
    loss, stats = policy_loss(replace(TOKENS, entropy=entropy), replace(CONFIG, entropy_coef=0.2), denominator=4)
    assert loss.item() == pytest.approx(-(2 - 0.5 + 0.2 * (0.3 + 0.7 / 2)) / 4)
    loss.backward()
    assert entropy.grad.tolist() == pytest.approx([-0.2 / 4, -0.1 / 4, 0])
    assert stats.sums["policy/entropy"] == pytest.approx(1.0)
    assert loss_and_gradient(TOKENS, CONFIG)[0] != loss.item()


def test_without_coefficients_neither_reference_nor_entropy_is_needed():
    bare = replace(TOKENS, reference=None, entropy=None)
    assert loss_and_gradient(bare, CONFIG) == loss_and_gradient(TOKENS, CONFIG)


def test_k3_is_accurate_for_engines_that_almost_agree():
    difference = 1e-6
    assert k3(of(difference)).item() == pytest.approx(difference**2 / 2, rel=1e-3)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_losses_and_statistics_add_up_over_any_partition(objective: str, estimator: str):
    """Of whole completions, in any order. One has no loss tokens, one share has no completions."""
    generator = torch.Generator().manual_seed(0)
    behaviour, drift, noise, advantages, reference = torch.randn(5, 20, generator=generator, dtype=torch.float64)
    known = {
        "current": behaviour + 0.3 * drift + 0.2 * noise,
        "proximal": behaviour + 0.3 * drift,
        "behaviour": behaviour,
        "advantages": advantages,
        "mask": torch.rand(20, generator=generator) < 0.8,
        "weights": torch.rand(20, generator=generator, dtype=torch.float64),
        "staleness": torch.randint(0, 3, (20,), generator=generator),
        "reference": behaviour + 0.1 * reference,
        "entropy": torch.rand(20, generator=generator, dtype=torch.float64),
    }
    completions = torch.arange(20).split([1, 3, 4, 5, 1, 6])
    known["mask"][completions[4]] = False
    config = AlgorithmConfig(objective=objective, clip_eps=0.05, kl_coef=0.1, kl_estimator=estimator, entropy_coef=0.1)

    def share(*members: int):
        numbers = [torch.full_like(completions[member], number) for number, member in enumerate(members)]
        laid = torch.cat([torch.zeros(0).long(), *(completions[member] for member in members)])
        sequence = torch.cat([torch.zeros(0).long(), *numbers])
        of_share = {name: values[laid] for name, values in known.items()}
        return policy_loss(
            Tokens(sequence=sequence, sequences=len(members), **of_share), config, denominator=3, untouched=True
        )

    whole = share(0, 1, 2, 3, 4, 5)
    parts = [share(3), share(5, 0), share(), share(2, 4, 1)]
    assert sum(part.loss.item() for part in parts) == pytest.approx(whole.loss.item())
    total = sum((part.stats for part in parts), LossStats())
    assert total.sums.keys() == whole.stats.sums.keys()
    np.testing.assert_allclose(total.values(total.sums), whole.stats.values(total.sums))


@pytest.mark.parametrize(
    ("field", "functions"),
    [
        ("objective", OBJECTIVES),
        ("advantage", [*ADVANTAGES, "batch_tokens"]),
        ("loss_mean", LOSS_MEANS),
        ("kl_estimator", ["k1", *KL_TERMS]),
    ],
)
def test_every_choice_of_the_configuration_has_a_function(field: str, functions: Collection[str]):
    for name in functions:
        assert getattr(load({"algorithm": {field: name}}).algorithm, field) == name
    with pytest.raises(ConfigError, match=rf"^algorithm.{field}: must be one of ") as caught:
        load({"algorithm": {field: "none"}})
    assert all(name in str(caught.value) for name in functions)
