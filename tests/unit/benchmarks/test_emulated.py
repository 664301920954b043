"""The arithmetic of the emulation's benchmark: which steps count, and what is made of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from areal_core.config.schema import RunConfig, load
from areal_core.errors import ArealError
from benchmarks.emulated import Measured, first_end, measure, report

LENGTH = 1024  # real tokens of every completion


def config(mode: str, **emulation: Any) -> RunConfig:
    """Two devices, two groups of four completions a step, all of one length."""
    return load(
        {
            "mode": mode,
            "task": {"max_operations": 1, "max_prompt_tokens": 8, "max_new_tokens": 32, "held_out": 16},
            "algorithm": {"group_size": 4},
            "generation": {"engine": "emulated", "slots": 8},
            "rollout": {"batch_size": 8},
            "training": {"engine": "emulated", "minibatches": 1},
            "emulation": {"length_sigma": 0.0, "length_median": float(LENGTH)} | emulation,
        }
    )


def run(tokens_per_s: float, *, step_s: float = 100.0, steps: int = 5) -> Measured:
    return Measured(
        steps=steps,
        step_s=step_s,
        tokens_per_s=tokens_per_s,
        trainer_wait=0.5,
        generation_idle=0.1,
        server_cpu=0.04,
        controller_cpu=0.05,
    )


@pytest.mark.parametrize(
    ("mode", "ends", "first"),
    [
        ("sync", {1: 10.0, 2: 20.0, 3: 30.0}, 1),
        ("async", {1: 10.0, 2: 12.0, 3: 20.0, 4: 30.0}, 1),  # that ended at a third exactly
        ("async", {1: 4.0, 2: 9.0, 3: 13.0, 4: 30.0}, 3),
        ("async", {}, 0),
    ],
)
def test_counting_begins_after_the_first_step_or_a_third(mode: str, ends: Mapping[int, float], first: int) -> None:
    assert first_end(mode, ends) == first


def test_a_run_is_measured_in_emulated_seconds_and_real_tokens() -> None:
    history = {
        "time/elapsed_s": {1: 11.0, 2: 21.0, 3: 31.0},
        "completion/tokens_mean": {1: 100.0, 2: 150.0, 3: 100.0, 4: 900.0},  # of a batch of 8
        "bubble/trainer_wait": {1: 0.0, 2: 0.8, 3: 0.6},
        "bubble/generation_idle": {1: 1.0, 2: 0.2, 3: 0.4},
    }
    found = measure(config("sync", speed=50.0, tokens_per_token=128), history, 0.02, 0.03)
    assert (found.steps, found.step_s) == (2, 500.0)  # 10 s, at 50
    assert found.tokens_per_s == pytest.approx(2000 * 128 / (20 * 50))
    assert (found.trainer_wait, found.generation_idle) == (pytest.approx(0.7), pytest.approx(0.3))
    assert (found.server_cpu, found.controller_cpu) == (0.02, 0.03)
    short = {key: {1: values[1]} for key, values in history.items()}
    with pytest.raises(ArealError, match=r"^--minutes: too short for a step"):
        measure(config("async"), short, 0.0, 0.0)


def test_a_report_holds_measurements_beside_the_paper() -> None:
    pairs = [
        {"sync": run(100.0, step_s=600.0), "async": run(270.123, step_s=200.0, steps=9)},
        {"sync": run(100.0, step_s=610.0), "async": run(290.0, step_s=210.0, steps=8)},
    ]
    found = report({"1.5b": pairs})
    assert found["each_ratio"] == {"1.5b": [3.0, 2.9]}  # 600 / 200, 610 / 210
    assert found["ratios"] == {"1.5b": 2.95}
    assert found["token_ratios"] == {"1.5b": [2.7, 2.9]}
    assert found["step_s"]["1.5b"] == {
        "sync": {"measured": 605, "paper": 590, "steps": [5, 5]},
        "async": {"measured": 205, "paper": 213, "steps": [9, 8]},
    }
    assert found["runs"]["1.5b"][0]["async"]["tokens_per_s"] == 270.0
