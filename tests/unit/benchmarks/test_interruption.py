"""The arithmetic of the interruption benchmark: what is run, which steps count."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from areal_core.config.schema import RunConfig, load
from areal_core.errors import ArealError
from benchmarks.interruption import measure, window
from flows.comparison.design import Trial
from flows.comparison.trials import TrialResult
from tests.support.comparison import made_up


def result(config: RunConfig, **curves: Any) -> TrialResult:
    known = made_up(Trial(arm="wait", seed=1, run_id="t.wait.s1", config=config))
    return dataclasses.replace(known, curves={name.replace("__", "/"): points for name, points in curves.items()})


def test_a_run_counts_from_its_third_until_nothing_is_admitted() -> None:
    config = load({"training": {"steps": 10}, "rollout": {"max_staleness": 2}})
    ends = {step: float(step) for step in range(1, 11)}
    assert window(config, ends) == (4, 7)  # the version after which nothing is admitted: 7 + 2 + 1 = 10
    assert window(config, {step: ends[step] for step in range(1, 7)}) == (2, 6)
    assert window(config, {}) == (0, 0)


def test_a_run_is_measured_over_the_steps_that_count() -> None:
    config = load(
        {
            "generation": {"engine": "emulated", "interruption": "recompute"},
            "training": {"engine": "emulated"},
            "emulation": {"speed": 50.0, "tokens_per_token": 128},
        }
    )
    steps = range(1, 7)
    curves: dict[str, Any] = {
        "time__elapsed_s": [(step, 10.0 * step) for step in steps],
        "time__step_s": [(step, 10.0) for step in steps],
        "ledger__generated_tokens": [(step, 100.0 * step**2) for step in steps],
        "ledger__consumed_tokens": [(step, 50.0 * step) for step in steps],
        "bubble__generation_idle": [(step, 0.9 if step <= 2 else 0.1) for step in steps],
        "bubble__generation_paused": [(step, 0.02) for step in steps],
        "bubble__trainer_wait": [(step, 0.5) for step in steps],
        "staleness__token_mean": [(2, 9.0), (3, 1.0), (6, 2.0)],
        "weights__swap_ms": [(2, 9e9), (3, 20.0), (4, 40.0)],
        "weights__recompute_ms": [(3, 0.0)],
        "weights__recomputed_tokens": [(3, 10.0), (6, 30.0)],
    }
    found = measure(result(config, **curves))
    assert found.steps == 4  # 3 to 6
    assert found.generated_tokens_per_s == pytest.approx((3600 - 400) / 40 * 128 / 50)
    assert found.effective_tokens_per_s == pytest.approx(200 / 40 * 128 / 50)
    assert found.generation_idle == pytest.approx(0.1)
    assert (found.swap_ms, found.recomputed_tokens) == (1500.0, 20.0 * 128)
    assert (found.staleness, found.k3) == (1.5, None)
    with pytest.raises(ArealError, match=r"^t.wait.s1: too short for a step that counts"):
        measure(result(config, time__elapsed_s=[(1, 10.0)]))
    del curves["weights__swap_ms"]
    with pytest.raises(ArealError, match=r"^t.wait.s1: no point of weights/swap_ms"):
        measure(result(config, **curves))
