"""The comparison with TRL: times a step, times to a score, speed-ups; what TRL is told to do, and how it is judged."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_core.config.schema import RunConfig
from benchmarks.trl import CASES, Case, Measurement, grpo_arguments, speedups
from flows.compose import compose


def measurement(step_s: float, *accuracy: float, steps: int = 4) -> Measurement:
    """`steps` steps of equal length; accuracy of the first ones."""
    return Measurement(
        elapsed_s=tuple(step_s * step for step in range(1, steps + 1)), accuracy=dict(enumerate(accuracy, 1))
    )


def test_speedup_is_the_median_of_paired_ratios() -> None:
    measured = {
        1: {"areal": measurement(1.0, 0.8), "trl": measurement(3.0, 0.1, 0.8)},
        2: {"areal": measurement(2.0, 0.8), "trl": measurement(10.0, 0.8)},
        3: {"areal": measurement(1.0, 0.1, 0.8), "trl": measurement(4.0, 0.8)},
    }
    found = speedups(measured, 0.75)
    assert found["speedup_per_step"] == 4.0  # of 3, 5, 4
    assert found["speedup_to_score"] == 5.0  # of 6, 5, 2
    assert (found["interval_to_score"]["low"], found["interval_to_score"]["high"]) == (2.0, 6.0)
    assert found["interval_per_step"]["coverage"] == 0.75


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_trl_makes_as_many_updates_of_as_many_completions(case: Case) -> None:
    config: RunConfig = compose(case.experiment, [f"training.steps={case.steps}"])
    told = grpo_arguments(config, 2, Path("output"))
    a_minibatch = told["per_device_train_batch_size"] * told["gradient_accumulation_steps"] * 2
    assert a_minibatch * config.training.minibatches == config.rollout.batch_size
    assert a_minibatch % told["num_generations"] == 0
    assert told["max_steps"] == case.steps * config.training.minibatches
