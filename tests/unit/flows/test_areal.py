"""The form of the flow's parameters as Prefect shows it, what they mean, and what flow runs are called."""

from typing import Any

import pytest
from prefect.utilities.callables import parameter_schema

from areal_core.errors import ConfigError
from flows.areal import areal
from flows.compose import configure, experiments
from flows.shared import run_title


def test_form_offers_choices_and_bounds_and_explains_every_field() -> None:
    schema = parameter_schema(areal)
    form = schema.model_dump()["properties"]

    def field(name: str) -> dict[str, Any]:
        return next(choice for choice in form[name]["anyOf"] if choice["type"] != "null")

    assert (form["experiment"]["enum"], form["experiment"]["default"]) == (experiments(), "cpu-async")
    assert field("mode")["enum"] == ["async", "sync"]
    assert field("provision")["enum"] == ["local", "static", "aws"]
    assert (field("seed")["minimum"], field("steps")["minimum"]) == (0, 1)
    assert (field("stop_at_score")["minimum"], field("stop_at_score")["maximum"]) == (0.0, 1.0)
    assert field("stop_after_minutes")["exclusiveMinimum"] == 0.0
    assert all(each["description"] for each in form.values())
    assert not schema.required


def test_parameters_reach_their_fields_and_win_over_overrides() -> None:
    overrides = ["model.layers=2", "training.steps=9", "mode=async"]
    limits = {"stop_at_score": 0.5, "stop_after_minutes": 2}
    config = configure("cpu-sync", seed=7, steps=3, mode="sync", overrides=overrides, **limits)
    assert (config.name, config.mode, config.seed, config.training.steps) == ("cpu", "sync", 7, 3)
    assert (config.stop.score, config.stop.minutes, config.model.layers) == (0.5, 2.0, 2)
    with pytest.raises(ConfigError, match=r"^training\.steps: must be at least 1, got 0$"):
        configure(steps=0)


def test_flow_run_is_named_after_what_was_chosen() -> None:
    chosen = {"experiment": "cpu-async", "mode": "sync", "seed": 0, "steps": None, "overrides": ["training.steps=2"]}
    assert run_title(chosen) == "cpu-async: mode sync, seed 0, training.steps=2"
    compared = {"experiment": "cpu-async", "arms": {"sync": ["mode=sync"], "async": []}, "seeds": [1, 2], "name": None}
    assert run_title(compared) == "cpu-async: arms sync async, seeds 1 2"
    evaluated = {"model": "/models/qwen", "benchmarks": ["gsm8k=test.jsonl", "needle"], "samples": 4}
    assert run_title(evaluated) == "qwen: benchmarks gsm8k=test.jsonl needle, samples 4"
