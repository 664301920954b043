"""The arithmetic of the emulation's benchmark: which steps count, and what is made of them."""

from __future__ import annotations

import pytest

from areal_core.config.schema import RunConfig, load
from areal_core.errors import ArealError
from benchmarks.emulated import measure


def config(mode: str) -> RunConfig:
    """Two groups of four completions a step."""
    engine = {"engine": "emulated"}
    return load(
        {
            "mode": mode,
            "algorithm": {"group_size": 4},
            "generation": engine,
            "rollout": {"batch_size": 8},
            "training": engine | {"minibatches": 1},
            "emulation": {"speed": 50.0, "tokens_per_token": 128},
        }
    )


def test_a_run_is_measured_in_emulated_seconds_and_real_tokens() -> None:
    history = {
        "time/elapsed_s": {1: 11.0, 2: 21.0, 3: 31.0},
        "completion/tokens_mean": {1: 100.0, 2: 150.0, 3: 100.0, 4: 900.0},  # of a batch of 8
        "bubble/trainer_wait": {1: 0.0, 2: 0.8, 3: 0.6},
        "bubble/generation_idle": {1: 1.0, 2: 0.2, 3: 0.4},
    }
    found = measure(config("sync"), history, 0.02, 0.03)
    assert (found.steps, found.step_s) == (2, 500.0)  # 10 s, at 50
    assert found.tokens_per_s == pytest.approx(2000 * 128 / (20 * 50))
    assert (found.trainer_wait, found.generation_idle) == (pytest.approx(0.7), pytest.approx(0.3))
    assert (found.server_cpu, found.controller_cpu) == (0.02, 0.03)
    short = {key: {1: values[1]} for key, values in history.items()}
    with pytest.raises(ArealError, match=r"^--minutes: too short for a step"):
        measure(config("async"), short, 0.0, 0.0)
