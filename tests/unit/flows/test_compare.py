"""The form of the flow's parameters as Prefect shows it, which failures are tried again, and what is said of them."""

from pathlib import Path
from typing import Any

import pytest
from prefect.client.schemas.objects import TaskRun
from prefect.states import Failed
from prefect.utilities.callables import parameter_schema

from areal_core.errors import ConfigError, DivergenceError, ProcessError
from flows.compare import _what_failed, _with_pictures, _worth_another_try, areal_compare
from flows.comparison.plan import DEFAULT_ARMS, plan
from flows.compose import experiments


@pytest.fixture(scope="module")
def form() -> dict[str, Any]:
    return parameter_schema(areal_compare).model_dump()["properties"]


def test_form_offers_experiments_and_shows_what_an_arm_is(form: dict[str, Any]) -> None:
    assert form["experiment"]["enum"] == experiments()
    assert form["arms"]["default"] == DEFAULT_ARMS
    assert (form["seeds"]["items"]["minimum"], form["seeds"]["minItems"], form["seeds"]["default"]) == (0, 1, [1, 2, 3])


def test_every_parameter_is_explained_and_none_is_required(form: dict[str, Any]) -> None:
    assert set(form) == {"experiment", "arms", "seeds", "overrides", "name"}
    assert all(field["description"] for field in form.values())
    assert not parameter_schema(areal_compare).required


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (ProcessError("trainer-0 was killed"), True),
        (DivergenceError("loss nan"), False),
        (ConfigError("seed: no"), False),
        (KeyError("a bug"), False),
    ],
)
def test_only_what_may_end_otherwise_is_tried_again(error: Exception, again: bool) -> None:
    task_run = TaskRun.model_construct()
    returned = Failed(data=Failed(message=str(error), data=error))  # as Prefect wraps what a task returns
    raised = Failed(data=error)
    assert _worth_another_try(None, task_run, returned) is again  # type: ignore[arg-type]
    assert _worth_another_try(None, task_run, raised) is again  # type: ignore[arg-type]


def test_failures_are_counted_and_the_first_ones_named() -> None:
    trials = plan("study", "cpu-async", DEFAULT_ARMS, [1, 2])
    failures = {trial.run_id: f"reason {number}" for number, trial in enumerate(trials) if number != 1}
    assert _what_failed(trials, failures) == (
        "7 of 8 trials failed: sync seed 1: reason 0; async-2 seed 1: reason 2; async-4 seed 1: reason 3; "
        "and 4 more; the report tells the rest"
    )


def test_pictures_travel_in_the_page(tmp_path: Path) -> None:
    (tmp_path / "bars.png").write_bytes(b"png")
    page = _with_pictures("![Bars](bars.png) and [a file](plan.json)", tmp_path)
    assert page == "![Bars](data:image/png;base64,cG5n) and [a file](plan.json)"
