"""The form of the flow's parameters as Prefect shows it, and what the parameters mean."""

from typing import Any

import pytest
from prefect.utilities.callables import parameter_schema

from areal_core.errors import ConfigError
from flows.areal import areal
from flows.compose import configure, experiments


@pytest.fixture(scope="module")
def form() -> dict[str, Any]:
    return parameter_schema(areal).model_dump()["properties"]


def _number(field: dict[str, Any]) -> dict[str, Any]:
    return next(choice for choice in field["anyOf"] if choice["type"] != "null")


def test_form_offers_the_known_experiments(form: dict[str, Any]) -> None:
    assert form["experiment"]["enum"] == experiments()
    assert form["experiment"]["default"] == "cpu-async"


def test_form_offers_the_modes_and_bounds_the_numbers(form: dict[str, Any]) -> None:
    assert _number(form["mode"])["enum"] == ["async", "sync"]
    assert _number(form["provision"])["enum"] == ["local", "static", "aws"]
    assert _number(form["seed"])["minimum"] == 0
    assert _number(form["steps"])["minimum"] == 1
    assert (_number(form["stop_at_score"])["minimum"], _number(form["stop_at_score"])["maximum"]) == (0.0, 1.0)
    assert _number(form["stop_after_minutes"])["exclusiveMinimum"] == 0.0


def test_every_parameter_is_explained_and_none_is_required(form: dict[str, Any]) -> None:
    assert all(field["description"] for field in form.values())
    assert not parameter_schema(areal).required


def test_parameters_reach_their_fields() -> None:
    config = configure(
        "cpu-sync", seed=7, steps=3, stop_at_score=0.5, stop_after_minutes=2, overrides=["model.layers=2"]
    )
    assert (config.name, config.mode, config.seed, config.training.steps) == ("cpu", "sync", 7, 3)
    assert (config.stop.score, config.stop.minutes, config.model.layers) == (0.5, 2.0, 2)


def test_named_parameters_win_over_overrides() -> None:
    assert configure(steps=3, mode="sync", overrides=["training.steps=9", "mode=async"]).training.steps == 3
    assert configure(mode="sync", overrides=["mode=async"]).mode == "sync"


def test_wrong_parameter_is_named_by_its_field() -> None:
    with pytest.raises(ConfigError, match=r"^training\.steps: must be at least 1, got 0$"):
        configure(steps=0)
