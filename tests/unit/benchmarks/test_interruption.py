"""The arithmetic of the interruption benchmark: what is run, which steps count, what is made of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from areal_core.config.schema import RunConfig, load
from areal_core.errors import ArealError
from benchmarks.interruption import Measured, measure, report, table, window
from flows.comparison.design import Trial
from flows.comparison.trials import TrialResult
from tests.support.comparison import made_up


def run(generated: float, *, k3: float | None = None) -> Measured:
    return Measured(
        steps=9,
        generated_tokens_per_s=generated,
        effective_tokens_per_s=generated / 2,
        generation_idle=0.1,
        generation_paused=0.02,
        trainer_wait=0.5,
        staleness=1.5,
        swap_ms=1.0,
        recompute_ms=20.0,
        recomputed_tokens=4000.0,
        k3=k3,
        accuracy=None if k3 is None else 0.9,
    )


def result(config: RunConfig, **curves: Any) -> TrialResult:
    known = made_up(Trial(arm="wait", seed=1, run_id="t.wait.s1", config=config))
    return dataclasses.replace(known, curves={name.replace("__", "/"): points for name, points in curves.items()})


def emulated(interruption: str, **emulation: Any) -> RunConfig:
    """Two devices; one generates two groups of four completions a step, in eight slots."""
    return load(
        {
            "mode": "async",
            "task": {"max_operations": 1, "max_prompt_tokens": 8, "max_new_tokens": 32, "held_out": 16},
            "algorithm": {"group_size": 4},
            "generation": {"engine": "emulated", "slots": 8, "interruption": interruption},
            "rollout": {"batch_size": 8},
            "training": {"engine": "emulated", "minibatches": 1},
            "emulation": {"length_sigma": 0.8, "length_median": 1024.0} | emulation,
        }
    )


def test_a_run_counts_from_its_third_until_nothing_is_admitted() -> None:
    config = load({"training": {"steps": 10}, "rollout": {"max_staleness": 2}})
    ends = {step: float(step) for step in range(1, 11)}
    assert window(config, ends) == (4, 7)  # the version after which nothing is admitted: 7 + 2 + 1 = 10
    assert window(config, {step: ends[step] for step in range(1, 7)}) == (2, 6)
    assert window(config, {}) == (0, 0)


def test_a_run_is_measured_over_the_steps_that_count() -> None:
    config = emulated("recompute", speed=50.0, tokens_per_token=128)
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


def test_a_report_holds_ratios_seed_by_seed() -> None:
    runs = {
        "long-tail": {
            "wait": {1: run(100.0, k3=1e-12), 2: run(200.0, k3=1e-12)},
            "recompute": {1: run(110.0, k3=1e-12), 2: run(260.0, k3=3e-12)},
            "resubmit": {1: run(90.0, k3=0.0), 2: run(180.0, k3=0.0)},
            "keep": {1: run(120.0, k3=1e-4), 2: run(240.0, k3=3e-4)},
        },
        "emulated-1.5b": {"wait": {1: run(10.0)}, "recompute": {1: run(16.0)}},
    }
    found = report(runs)
    assert (found["long_tail_over_waiting"], found["long_tail_range"]) == (1.2, [1.1, 1.3])
    assert (found["resubmit_over_waiting"], found["keep_over_waiting"]) == (0.9, 1.2)
    assert found["emulated_1.5b_over_waiting"] == 1.6
    assert (found["k3_recompute"], found["k3_keep"]) == (2e-12, 2e-4)
    assert found["paper"] == {"1.5b": 1.12, "7b": 1.17}
    assert found["runs"]["emulated-1.5b"]["wait"][1]["k3"] is None
    lines = table(runs)
    assert len(lines) == 7
    assert lines[2].split()[:4] == ["long-tail", "recompute", "1.200", "1.100-1.300"]
