"""Step controls: coefficients of the loss that change from one training step to the next.

Every rank has its own control. All controls see the same metrics, so all ranks train with the same coefficients.
Checkpoints include the control's state, so a resumed run continues with the same coefficients.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

from areal_core.config.algorithm import STEP_COEFFICIENTS, AlgorithmConfig
from areal_core.config.fields import build
from areal_core.config.groups import TrainingConfig
from areal_core.config.plugins import find
from areal_core.errors import ConfigError

LEARNING_RATE = "learning_rate"


class StepControl:
    """Keep all coefficients constant; the base class of controls.

    `state` must hold everything that later values depend on. Checkpoints save it as JSON, and a resume restores it.
    """

    def __init__(self, algorithm: AlgorithmConfig, training: TrainingConfig) -> None:
        self.algorithm, self.training = algorithm, training
        self.state: dict[str, int | float | str] = {}

    def values(self, step: int) -> Mapping[str, float]:
        """Return the coefficients of training step `step`, counted from 1.

        Fields in `config.algorithm.STEP_COEFFICIENTS` replace those of the configuration. `learning_rate` replaces
        training.learning_rate. All other names go to the objective in `Tokens.coefficients`.
        """
        return {}

    def observe(self, metrics: Mapping[str, float]) -> None:
        """Receive the metrics of the finished step, by curve name.

        Loss metrics are missing if no completion of the step had a gradient.
        """


class AdaptiveKl(StepControl):
    """Proportional controller of `kl_coef` (Ziegler et al., 2019, arXiv 1909.08593, section 2.2).

    Each step multiplies kl_coef by 1 + e / kl_horizon. The error e is KL / kl_target - 1, clipped to [-0.2, 0.2]. KL is
    loss/reference_kl in nats a token.
    """

    def __init__(self, algorithm: AlgorithmConfig, training: TrainingConfig) -> None:
        super().__init__(algorithm, training)
        self.state["kl_coef"] = algorithm.kl_coef

    def values(self, step: int) -> Mapping[str, float]:
        return {"kl_coef": float(self.state["kl_coef"])}

    def observe(self, metrics: Mapping[str, float]) -> None:
        if (divergence := metrics.get("loss/reference_kl")) is not None:
            error = min(max(divergence / self.algorithm.kl_target - 1, -0.2), 0.2)
            self.state["kl_coef"] = float(self.state["kl_coef"]) * (1 + error / self.algorithm.kl_horizon)


_CONTROLS: dict[str, Callable[[AlgorithmConfig, TrainingConfig], StepControl]] = {
    "constant": StepControl,
    "adaptive_kl": AdaptiveKl,
}


def make_control(algorithm: AlgorithmConfig, training: TrainingConfig) -> StepControl:
    """Make the control that `algorithm.control` names. Raises ConfigError if its import path can't be imported."""
    return find("algorithm.control", algorithm.control, _CONTROLS)(algorithm, training)


@dataclasses.dataclass(frozen=True, slots=True)
class StepCoefficients:
    """The coefficients of one training step."""

    algorithm: AlgorithmConfig  # the control's values replace the configuration's
    learning_rate: float  # at full rate, before the warm-up
    others: dict[str, float]  # for the objective: Tokens.coefficients
    given: dict[str, float]  # every value that the control returned


def step_coefficients(control: StepControl, step: int) -> StepCoefficients:
    """Ask the control for the coefficients of `step`.

    Raises ConfigError for a coefficient that is not finite or that its field doesn't allow.
    """
    algorithm, where = control.algorithm, f"algorithm.control: {control.algorithm.control} at step {step}"
    given = {name: float(value) for name, value in control.values(step).items()}
    for name, value in given.items():
        if not math.isfinite(value):
            raise ConfigError(f"{where}: {name} must be finite, got {value}")
        if name in ("kl_coef", "entropy_coef") and value and not getattr(algorithm, name):
            raise ConfigError(f"{where}: algorithm.{name} must be above 0 for a control to change it, got 0")
    fields = {name: value for name, value in given.items() if name in STEP_COEFFICIENTS}
    try:
        changed = build(AlgorithmConfig, dataclasses.asdict(algorithm) | fields, "algorithm.") if fields else algorithm
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    others = {name: value for name, value in given.items() if name not in (*STEP_COEFFICIENTS, LEARNING_RATE)}
    rate = given.get(LEARNING_RATE, control.training.learning_rate)
    return StepCoefficients(algorithm=changed, learning_rate=rate, others=others, given=given)
