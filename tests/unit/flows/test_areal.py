"""The form of the flow's parameters as Prefect shows it, and what the parameters mean."""

from typing import Any

import pytest
from prefect.utilities.callables import parameter_schema

from areal_core.errors import ConfigError
from flows.areal import areal
from flows.compose import configure, experiments


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
