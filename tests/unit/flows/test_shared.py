"""What flow runs are called."""

from __future__ import annotations

from typing import Any

import pytest

from flows.shared import run_title


@pytest.mark.parametrize(
    ("parameters", "title"),
    [
        ({"experiment": "cpu-async"}, "cpu-async"),
        ({"experiment": "cpu-async", "mode": None, "seed": None, "overrides": []}, "cpu-async"),
        (
            {"experiment": "cpu-async", "mode": "sync", "seed": 0, "overrides": ["training.minibatches=2"]},
            "cpu-async: mode sync, seed 0, training.minibatches=2",
        ),
        (
            {"experiment": "cpu-async", "arms": {"sync": ["mode=sync"], "async": []}, "seeds": [1, 2], "name": None},
            "cpu-async: arms sync async, seeds 1 2",
        ),
        (
            {"model": "/models/qwen", "benchmarks": ["gsm8k=test.jsonl", "needle"], "samples": 4},
            "qwen: benchmarks gsm8k=test.jsonl needle, samples 4",
        ),
    ],
)
def test_a_flow_run_is_called_by_what_was_chosen(parameters: dict[str, Any], title: str) -> None:
    assert run_title(parameters) == title


def test_a_title_fits_a_page() -> None:
    title = run_title({"experiment": "cpu-async", "overrides": [f"task.path={'x' * 500}"]})
    assert len(title) == 200
    assert title.endswith("...")
