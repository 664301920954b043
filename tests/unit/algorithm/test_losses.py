"""Objective, divergence and entropy in one sum; k1, k2 and k3 by hand and against the divergence that they estimate."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from areal_core.algorithm.losses import _NUMBERS, LossStats, k2, k3, policy_loss
from areal_core.algorithm.objectives import Surrogate, Tokens, decoupled
from areal_core.config.algorithm import OBJECTIVES, AlgorithmConfig
from areal_core.errors import ConfigError
from areal_core.training.engines.engine import loss_weights
from tests.support.tokens import TOKENS, of

CONFIG = AlgorithmConfig(objective="standard", clip_eps=1.5)  # so wide that nothing below is clipped
LOG2 = 0.6931471805599453


# token               0        1        2, not a loss token
# pi_theta            1/2      1/4
# pi_behav            1/4      1/4
# pi_ref              1/4      1/2      log pi_ref / pi_theta = -log 2, log 2
# A                   1        -1
SAMPLE = Tokens(
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
    loss, gradient = loss_and_gradient(SAMPLE, CONFIG)
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
    loss, gradient = loss_and_gradient(SAMPLE, config)
    assert loss == pytest.approx(-(2 - 0.5 - 0.1 * (values[0] + values[1] / 2)) / 4)
    assert gradient == pytest.approx([(-2 + 0.1 * slopes[0]) / 4, (0.5 + 0.1 * slopes[1] / 2) / 4, 0])


def test_k1_is_a_penalty_in_the_advantage():
    # log pi_behav / pi_ref = 0 and -log 2: the advantages are 1 and -1 + 0.1 log 2
    loss, gradient = loss_and_gradient(SAMPLE, replace(CONFIG, kl_coef=0.1, kl_estimator="k1"))
    penalised = -1 + 0.1 * LOG2
    assert loss == pytest.approx(-(2 + penalised / 2) / 4)
    assert gradient == pytest.approx([-2 / 4, -penalised / 2 / 4, 0])
    # with a pi_prox, by which u is 1 and w is 2 and 1, it is log pi_prox / pi_ref = log 2 and -log 2
    proximal = replace(SAMPLE, proximal=SAMPLE.current)
    loss, _ = loss_and_gradient(proximal, replace(CONFIG, objective="decoupled", kl_coef=0.1, kl_estimator="k1"))
    assert loss == pytest.approx(-(2 * (1 - 0.1 * LOG2) + penalised / 2) / 4)


def test_entropy_is_a_bonus():
    entropy = SAMPLE.entropy.clone().requires_grad_()
    loss, stats = policy_loss(replace(SAMPLE, entropy=entropy), replace(CONFIG, entropy_coef=0.2), denominator=4)
    assert loss.item() == pytest.approx(-(2 - 0.5 + 0.2 * (0.3 + 0.7 / 2)) / 4)
    loss.backward()
    assert entropy.grad.tolist() == pytest.approx([-0.2 / 4, -0.1 / 4, 0])
    assert stats.sums["policy/entropy"] == pytest.approx(1.0)
    assert loss_and_gradient(SAMPLE, CONFIG)[0] != loss.item()


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
    for name in (*_NUMBERS, "weight_max", "sums", "histogram"):
        assert getattr(total, name) == pytest.approx(getattr(whole.stats, name))


REFERENCE = replace(TOKENS, reference=of(0.55, 0.3, 0.1, float("nan")).log(), entropy=of(0.5, 1.0, 0.25, float("nan")))


def test_statistics_by_hand():
    # u = 1.1, 1.5, 1/2; r = 2, 1, 1/2; pi_ref / pi_theta = 1, 1/2, 2; token 1 is of the version that is trained on
    stats = policy_loss(REFERENCE, AlgorithmConfig(behaviour_cap=1.5), denominator=4).stats
    assert {name: getattr(stats, name) for name in _NUMBERS} == pytest.approx(
        {"tokens": 3, "weight": 3.5, "weight_squared": 5.25, "matched": 1, "train_inference_kl": 0}
    )
    assert stats.weight_max == pytest.approx(2)
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


def test_weights_beyond_the_histogram_count_at_its_ends():
    stats = weighing(np.array([1e-30, 1.0, 1e30]))
    assert math.log(stats.weight_quantile(0.01)) == pytest.approx(-40, rel=0.02)
    assert math.log(stats.weight_quantile(0.99)) == pytest.approx(40, rel=0.02)


# Three completions of 2, 3 and 1 loss tokens with these terms, and one that is masked out; the limit is 5 tokens.
TERMS = [[1.0, 3.0], [6.0, 0.0, 3.0], [4.0]]
LOSS_TOKENS = np.array([2, 3, 1, 0])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("token", (4 + 9 + 4) / 6),
        ("sequence", (4 / 2 + 9 / 3 + 4 / 1) / 3),
        ("constant", (4 + 9 + 4) / (3 * 5)),
    ],
)
def test_means_by_hand(name: str, expected: float):
    weights, denominator_terms = loss_weights(name, LOSS_TOKENS, LOSS_TOKENS, 5)
    total = sum(weight * sum(terms) for weight, terms in zip(weights, TERMS, strict=False))
    assert total / denominator_terms.sum() == pytest.approx(expected)
    assert denominator_terms[3] == 0
    assert np.isfinite(weights).all()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("token", (4 + 9 + 4) / 6),
        ("sequence", ((4 + 9) / 5 + 4 / 1) / 2),
        ("constant", (4 + 9 + 4) / (2 * 5)),
    ],
)
def test_sequences_of_one_rollout_count_as_one(name: str, expected: float):
    """The first two of three are of the same rollout."""
    weights, denominator_terms = loss_weights(name, LOSS_TOKENS, np.array([5, 5, 1, 0]), 5)
    total = sum(weight * sum(terms) for weight, terms in zip(weights, TERMS, strict=False))
    assert total / denominator_terms.sum() == pytest.approx(expected)


def test_estimators_and_the_divergence_that_they_estimate():
    """Over all tokens of two small distributions rather than a sample: means are exact."""
    logits, other = torch.randn(2, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits.requires_grad_()
    theta, ref = logits.log_softmax(0), other.log_softmax(0)

    def mean(values: torch.Tensor) -> torch.Tensor:
        return (theta.detach().exp() * values).sum()

    def slope(value: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(value, logits, retain_graph=True)[0]

    divergence, backwards = (theta.exp() * (theta - ref)).sum(), (ref.exp() * (ref - theta)).sum()
    x = ref - theta
    assert [mean(-x).item(), mean(k3(x)).item()] == pytest.approx([divergence.item()] * 2)
    torch.testing.assert_close(slope(mean(k2(x))), slope(divergence))
    torch.testing.assert_close(slope(mean(k3(x))), slope(backwards))
    torch.testing.assert_close(slope(mean(theta * -x.detach())), slope(divergence))  # k1 as a penalty of advantages
    torch.testing.assert_close(slope(mean(-x)), torch.zeros_like(other))  # and as a term of the loss
