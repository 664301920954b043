"""What flow runs are called."""

from __future__ import annotations

from flows.shared import run_title


def test_flow_run_is_named_after_what_was_chosen() -> None:
    chosen = {"experiment": "cpu-async", "mode": "sync", "seed": 0, "steps": None, "overrides": ["training.steps=2"]}
    assert run_title(chosen) == "cpu-async: mode sync, seed 0, training.steps=2"
    compared = {"experiment": "cpu-async", "arms": {"sync": ["mode=sync"], "async": []}, "seeds": [1, 2], "name": None}
    assert run_title(compared) == "cpu-async: arms sync async, seeds 1 2"
    evaluated = {"model": "/models/qwen", "benchmarks": ["gsm8k=test.jsonl", "needle"], "samples": 4}
    assert run_title(evaluated) == "qwen: benchmarks gsm8k=test.jsonl needle, samples 4"
