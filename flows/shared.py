"""Artifact keys, parameter types and run titles shared by flows and commands."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Annotated, Any, Literal

from pydantic import Field

from areal_core import errors
from flows.compose import experiments

PROGRESS = "areal-progress"  # artifact keys
RESULT = "areal-result"
SUMMARY = "areal-summary"
PLAN = "areal-plan"
COST = "areal-cost"
PLACES = "areal-places"
TRACKING = "areal-tracking"

FATAL_ERRORS = (  # permanent errors: a retry would fail too
    errors.ConfigError,
    errors.DivergenceError,
    errors.ModelError,
    errors.StorageError,
    errors.TrackingError,
    errors.UserCodeError,
)

# Parameter types; Prefect's form shows their choices and bounds.
Experiment = Annotated[str, Field(json_schema_extra={"enum": [*experiments()]})]
Mode = Literal["async", "sync"]
Provision = Literal["local", "static", "aws"]
Natural = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Minutes = Annotated[float, Field(gt=0.0)]

_TITLE_LENGTH = 200  # characters


def run_title(parameters: Mapping[str, Any]) -> str:
    """Title of a flow run: its `name`, experiment or model, then all other given parameters."""
    given = {name: value for name, value in parameters.items() if value not in (None, [], {})}
    overrides = given.pop("overrides", [])
    named = [override for override in overrides if override.startswith("name=")]
    overrides = [override for override in overrides if override not in named]
    subject = given.pop("experiment", None) or PurePath(given.pop("model", "")).name
    if named:
        subject = named[-1].removeprefix("name=").strip("'\"")
    chosen = [f"{name.replace('_', ' ')} {_listed(value)}" for name, value in given.items()]
    title = ": ".join(part for part in (subject, ", ".join([*chosen, *overrides])) if part)
    return title if len(title) <= _TITLE_LENGTH else f"{title[: _TITLE_LENGTH - 3]}..."


def _listed(value: Any) -> str:
    return " ".join(str(each) for each in value) if isinstance(value, list | dict) else str(value)
