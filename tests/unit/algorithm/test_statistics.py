import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from areal_core.algorithm.losses import _NUMBERS, LossStats, policy_loss
from areal_core.algorithm.objectives import Surrogate, Tokens, decoupled
from areal_core.config.algorithm import AlgorithmConfig
from areal_core.errors import ConfigError
from tests.support.tokens import TOKENS, of

REFERENCE = replace(TOKENS, reference=of(0.55, 0.3, 0.1, float("nan")).log(), entropy=of(0.5, 1.0, 0.25, float("nan")))


def test_statistics_by_hand():
    # u = 1.1, 1.5, 1/2; r = 2, 1, 1/2; pi_ref / pi_theta = 1, 1/2, 2; token 1 is of the version that is trained on
    stats = policy_loss(REFERENCE, AlgorithmConfig(behaviour_cap=1.5), denominator=4).stats
    assert {name: getattr(stats, name) for name in _NUMBERS} == pytest.approx(
        {"tokens": 3, "weight": 3.5, "weight_squared": 5.25, "weight_max": 2, "matched": 1, "train_inference_kl": 0}
    )
    assert stats.sums == pytest.approx(
        {
            "loss/clip_fraction": 2,
            "loss/clip_low_fraction": 1,
            "loss/clip_high_fraction": 1,
            "loss/cap_fraction": 1,
            "loss/mask_fraction": 0,
            "policy/entropy": 1.75,
            "loss/approx_kl": (0.1 - 0.0953101798) + (0.5 - 0.4054651081) + (-0.5 + 0.6931471806),
            "loss/reference_kl": (-0.5 + 0.6931471806) + (1 - 0.6931471806),
        }
    )
    assert stats.ess == pytest.approx(3.5**2 / (3 * 5.25))
    assert stats.histogram.sum() == 3


def measured(tokens: Tokens, config: AlgorithmConfig) -> Surrogate:
    """An objective with numbers of its own: of each token, a flag, of all, and a plain one."""
    metrics = {
        "mine/advantage": tokens.advantages,
        "mine/stale": tokens.staleness > 0,
        "mine/tokens": tokens.mask.sum(),
        "mine/eps": config.clip_eps,
        "mine/scale": tokens.coefficients.get("scale", -1.0),
    }
    return replace(decoupled(tokens, config), metrics=metrics)


def test_metrics_of_an_objective_are_means_over_loss_tokens():
    """A scalar counts for each loss token of its micro-batch. NaN outside the mask doesn't matter."""
    config = AlgorithmConfig(objective=f"{__name__}:measured")
    one = replace(TOKENS, mask=torch.tensor([True, False, False, False]))
    stats = policy_loss(TOKENS, config, denominator=1).stats + policy_loss(one, config, denominator=1).stats
    found = {name: value for name, value in stats.metrics().items() if name.startswith("mine/")}
    expected = {"advantage": (1 + 1 - 2 + 1) / 4, "stale": 3 / 4, "tokens": (3 * 3 + 1) / 4, "eps": 0.2, "scale": -1}
    assert found == pytest.approx({f"mine/{name}": value for name, value in expected.items()})


def per_completion(tokens: Tokens, config: AlgorithmConfig) -> Surrogate:
    return replace(decoupled(tokens, config), metrics={"mine/lengths": torch.ones(tokens.sequences)})


def test_a_metric_of_another_shape_is_refused():
    config = AlgorithmConfig(objective=f"{__name__}:per_completion")
    with pytest.raises(ConfigError, match=r"^algorithm.objective: metric mine/lengths must be a number.*shape \[2\]$"):
        policy_loss(TOKENS, config, denominator=1)


@pytest.mark.parametrize("objective", ["standard", "a3po"])
def test_without_a_proximal_policy_the_train_inference_kl_is_that_of_the_untouched_policy(objective: str):
    """pi_theta / pi_behav of token 1 is 1.5, and A-3PO's pi_prox would be pi_behav itself."""
    tokens, config = replace(TOKENS, proximal=None), AlgorithmConfig(objective=objective)
    stats = policy_loss(tokens, config, denominator=1, untouched=True).stats
    assert (stats.matched, stats.train_inference_kl) == (1, pytest.approx(0.5 - 0.4054651081))
    stats = policy_loss(tokens, config, denominator=1, untouched=False).stats
    assert (stats.matched, stats.train_inference_kl) == (0, 0)


def weighing(weights: np.ndarray) -> LossStats:
    """Statistics of tokens with these importance weights."""
    count = len(weights)
    tokens = replace(
        TOKENS,
        current=torch.zeros(count).double(),
        proximal=torch.from_numpy(np.log(weights)),
        behaviour=torch.zeros(count).double(),
        advantages=torch.ones(count).double(),
        mask=torch.ones(count, dtype=torch.bool),
        weights=torch.ones(count).double(),
        staleness=torch.zeros(count),
    )
    return policy_loss(tokens, AlgorithmConfig(), denominator=1).stats


@pytest.mark.parametrize("spread", [1e-6, 1e-4, 1e-2, 1.0])
@pytest.mark.parametrize("share", [0.01, 0.5, 0.99])
def test_quantiles_are_as_exact_as_stated(spread: float, share: float):
    logs = np.random.default_rng(0).normal(0.3 * spread, spread, 1000)
    expected = np.sort(logs)[math.ceil(share * 1000) - 1]
    quantile = math.log(weighing(np.exp(logs)).weight_quantile(share))
    assert quantile == pytest.approx(expected, rel=0.0111, abs=1.11e-5)


def test_equal_weights_have_the_quantile_one_exactly():
    stats = weighing(np.ones(7))
    assert [stats.weight_quantile(share) for share in (0.01, 0.5, 0.99)] == [1, 1, 1]
    assert [LossStats().weight_quantile(share) for share in (0.01, 0.99)] == [1, 1]
    assert LossStats().ess == 1


def test_weights_beyond_the_histogram_count_at_its_ends():
    stats = weighing(np.array([1e-30, 1.0, 1e30]))
    assert math.log(stats.weight_quantile(0.01)) == pytest.approx(-40, rel=0.02)
    assert math.log(stats.weight_quantile(0.99)) == pytest.approx(40, rel=0.02)
