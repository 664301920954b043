"""What the flows and the commands that watch them have in common."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from areal_core.errors import ConfigError, DivergenceError, ModelError, StorageError, TrackingError
from flows.compose import experiments

PROGRESS = "areal-progress"  # keys of artifacts
RESULT = "areal-result"
PLACES = "areal-places"

HOPELESS = (ConfigError, ModelError, StorageError, TrackingError, DivergenceError)  # the same again would end the same

# Parameters, as Prefect's form shows and bounds them.
Experiment = Annotated[str, Field(json_schema_extra={"enum": [*experiments()]})]
Mode = Literal["async", "sync"]
Natural = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Minutes = Annotated[float, Field(gt=0.0)]
