from dataclasses import asdict

import pytest
import torch
from torch import Tensor

from areal_core.algorithm.losses import LossStats, decoupled_ppo, k3, naive_ppo


def logs(*probabilities: float) -> Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log()


# token            0          1          2          3, not a loss token
# pi_prox/behav    2          1          1/2        NaN
# u                1.1        1.5        1/2        NaN
# A                1          1          -2         NaN
# Eq. 5            2 * 1.1    1.2        -2 * 0.8 / 2
BEHAVIOUR = logs(0.25, 0.4, 0.2, float("nan"))
PROXIMAL = logs(0.5, 0.4, 0.1, float("nan"))
CURRENT = logs(0.55, 0.6, 0.05, float("nan"))
ADVANTAGES = torch.tensor([1, 1, -2, float("nan")], dtype=torch.float64)
MASK = torch.tensor([True, True, True, False])


def test_decoupled_golden_values():
    current = CURRENT.clone().requires_grad_()
    matched = torch.tensor([True, True, False, True])
    entropy = torch.tensor([0.5, 1.0, 0.25, float("nan")], dtype=torch.float64)
    loss, stats = decoupled_ppo(
        current,
        PROXIMAL,
        BEHAVIOUR,
        ADVANTAGES,
        MASK,
        denominator=4,
        clip_eps=0.2,
        matched=matched,
        entropy=entropy,
    )
    assert loss.item() == pytest.approx(-(2.2 + 1.2 - 0.8) / 4)
    (gradient,) = torch.autograd.grad(loss, current)
    # Only token 0 is not clipped: d(2 u) / d log pi_theta = 2 u.
    torch.testing.assert_close(gradient, torch.tensor([-2.2 / 4, 0, 0, 0], dtype=torch.float64))
    assert asdict(stats) == pytest.approx(
        {
            "tokens": 3,
            "clipped": 2,
            "capped": 0,
            "entropy": 1.75,
            "kl": (0.1 - 0.0953101798) + (0.5 - 0.4054651081) + (-0.5 + 0.6931471806),
            "weight": 3.5,
            "weight_squared": 5.25,
            "weight_max": 2,
            "matched": 2,
            "mismatch": 1 - 0.6931471806,
        }
    )
    assert stats.ess == pytest.approx(3.5**2 / (3 * 5.25))


def test_naive_golden_values():
    # u = pi_theta / pi_behav = 2.2, 1.5, 0.25: all three are clipped.
    current = CURRENT.clone().requires_grad_()
    loss, stats = naive_ppo(current, BEHAVIOUR, ADVANTAGES, MASK, denominator=4, clip_eps=0.2)
    assert loss.item() == pytest.approx(-(1.2 + 1.2 - 2 * 0.8) / 4)
    assert not torch.autograd.grad(loss, current)[0].any()
    assert (stats.tokens, stats.clipped, stats.capped) == (3, 3, 0)
    assert stats.weight == pytest.approx(2.2 + 1.5 + 0.25)
    assert stats.weight_max == pytest.approx(2.2)


def test_clip_leaves_the_pessimistic_side_alone():
    # u = 1.5 with A < 0 and u = 0.5 with A > 0: the minimum is the ratio itself, and its gradient stays.
    current = logs(0.6, 0.2).requires_grad_()
    behaviour, mask = logs(0.4, 0.4), torch.tensor([True, True])
    loss, stats = naive_ppo(
        current, behaviour, torch.tensor([-1.0, 1.0], dtype=torch.float64), mask, denominator=1, clip_eps=0.2
    )
    assert loss.item() == pytest.approx(1.5 - 0.5)
    torch.testing.assert_close(torch.autograd.grad(loss, current)[0], torch.tensor([1.5, -0.5], dtype=torch.float64))
    assert stats.clipped == 0


def test_cap_bounds_the_behaviour_factor_only_when_asked():
    def of(cap: float | None):
        return decoupled_ppo(
            CURRENT, PROXIMAL, BEHAVIOUR, ADVANTAGES, MASK, denominator=1, clip_eps=0.2, behaviour_cap=cap
        )

    assert of(1.5).loss.item() == pytest.approx(-(1.5 * 1.1 + 1.2 - 0.8))
    assert of(1.5).stats.capped == 1
    assert of(1.5).stats.weight_max == pytest.approx(2)  # reported as it was before the cap
    assert of(100.0).loss.item() == of(None).loss.item()


def test_equal_behaviour_and_proximal_reduce_eq5_to_ppo():
    generator = torch.Generator().manual_seed(0)
    behaviour, noise, advantages = torch.randn(3, 50, generator=generator, dtype=torch.float64)
    current = (behaviour + 0.3 * noise).requires_grad_()
    mask = torch.rand(50, generator=generator) < 0.7
    decoupled = decoupled_ppo(current, behaviour, behaviour, advantages, mask, denominator=7, clip_eps=0.2)
    naive = naive_ppo(current, behaviour, advantages, mask, denominator=7, clip_eps=0.2)
    assert decoupled.loss.item() == naive.loss.item()
    for one, other in zip(
        torch.autograd.grad(decoupled.loss, current), torch.autograd.grad(naive.loss, current), strict=True
    ):
        torch.testing.assert_close(one, other)
    assert decoupled.stats.weight_max == 1
    assert decoupled.stats.ess == pytest.approx(1)


@pytest.mark.parametrize("decoupled", [True, False])
def test_gradient_matches_finite_differences(decoupled: bool):
    generator = torch.Generator().manual_seed(1)
    behaviour, noise, drift, advantages = torch.randn(4, 12, generator=generator, dtype=torch.float64)
    proximal = behaviour + 0.4 * drift
    mask = torch.arange(12) % 4 != 0

    def loss(current: Tensor) -> Tensor:
        if decoupled:
            return decoupled_ppo(current, proximal, behaviour, advantages, mask, denominator=5, clip_eps=0.2).loss
        return naive_ppo(current, behaviour, advantages, mask, denominator=5, clip_eps=0.2).loss

    assert torch.autograd.gradcheck(loss, (proximal + 0.2 * noise).requires_grad_())


def test_only_the_current_policy_gets_a_gradient():
    inputs = [logs(0.55, 0.6), logs(0.5, 0.4), logs(0.25, 0.4), torch.ones(2, dtype=torch.float64)]
    current, proximal, behaviour, advantages = (tensor.requires_grad_() for tensor in inputs)
    mask = torch.tensor([True, True])
    decoupled_ppo(current, proximal, behaviour, advantages, mask, denominator=1, clip_eps=0.2).loss.backward()
    assert current.grad is not None
    assert proximal.grad is behaviour.grad is advantages.grad is None


def test_loss_adds_up_over_any_cut():
    def of(part: slice):
        return decoupled_ppo(
            CURRENT[part], PROXIMAL[part], BEHAVIOUR[part], ADVANTAGES[part], MASK[part], denominator=3, clip_eps=0.2
        )

    whole, parts = of(slice(None)), [of(slice(0, 1)), of(slice(1, 3)), of(slice(3, 4)), of(slice(4, 4))]
    assert sum(part.loss.item() for part in parts) == pytest.approx(whole.loss.item())
    assert asdict(sum((part.stats for part in parts), LossStats())) == pytest.approx(asdict(whole.stats))


def test_k3_is_accurate_for_engines_that_almost_agree():
    difference = 1e-6
    assert k3(torch.tensor(difference, dtype=torch.float64)).item() == pytest.approx(difference**2 / 2, rel=1e-3)
