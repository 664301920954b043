"""Coefficients that change from step to step."""

from dataclasses import replace

import pytest

from areal_core.algorithm.control import StepControl, make_control, step_coefficients
from areal_core.config.algorithm import AlgorithmConfig
from areal_core.config.groups import TrainingConfig
from areal_core.errors import ConfigError

ADAPTIVE = AlgorithmConfig(control="adaptive_kl", kl_coef=0.1, kl_target=0.02, kl_horizon=10)


def test_adaptive_kl_follows_its_target():
    """Ziegler et al., 2019, section 2.2, with K_beta = 0.1: the error is clipped to a fifth."""
    control = make_control(ADAPTIVE, TrainingConfig())
    for divergence, coefficient in (
        (None, 0.1),  # a step without a gradient
        (0.02, 0.1),
        (0.022, 0.1 * 1.01),
        (0.9, 0.1 * 1.01 * 1.02),
        (0.0, 0.1 * 1.01 * 1.02 * 0.98),
    ):
        control.observe({} if divergence is None else {"loss/reference_kl": divergence})
        found = step_coefficients(control, step=2)
        assert found.given == {"kl_coef": pytest.approx(coefficient)}
        assert found.algorithm == replace(ADAPTIVE, kl_coef=found.given["kl_coef"])


class Schedule(StepControl):
    def values(self, step: int) -> dict[str, float]:
        return {
            "learning_rate": self.training.learning_rate / step,
            "entropy_coef": self.algorithm.entropy_coef / step,
            "clip_eps_high": 0.2 + 0.1 * step,
            "scale": 3,
        }


def test_a_control_of_ones_own_sets_fields_the_learning_rate_and_numbers_for_the_objective():
    algorithm = AlgorithmConfig(control=f"{__name__}:Schedule", entropy_coef=0.01)
    found = step_coefficients(make_control(algorithm, TrainingConfig(learning_rate=1e-3)), 2)
    assert found.algorithm == replace(algorithm, entropy_coef=0.005, clip_eps_high=0.4)
    assert (found.learning_rate, found.others) == (5e-4, {"scale": 3.0})


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"kl_coef": -0.1}, r"algorithm.kl_coef: must be at least 0.0, got -0.1$"),
        ({"scale": float("nan")}, "scale must be finite, got nan$"),
        ({"entropy_coef": 0.1}, "algorithm.entropy_coef must be above 0 for a control to change it, got 0$"),
    ],
)
def test_a_coefficient_that_can_not_be_is_refused(values: dict[str, float], said: str):
    control = StepControl(AlgorithmConfig(kl_coef=0.1), TrainingConfig())
    control.values = lambda step: values
    with pytest.raises(ConfigError, match=f"^algorithm.control: constant at step 3: {said}"):
        step_coefficients(control, 3)
