"""The bodies of requests to the controller, beside the records that are sent as they are (`PolicyVersion`,
`Evaluation`)."""

from __future__ import annotations

from typing import Any

import msgspec


class Join(msgspec.Struct):
    """A generation server that is to join; within `timeout_s`, None: however long it takes. `stager` is the URL of what
    brings versions onto its machine, where that is not the controller's."""

    name: str
    url: str
    timeout_s: float | None = None
    stager: str | None = None


class Metrics(msgspec.Struct):
    """Points of curves: key, step, value, and when, in seconds since the epoch."""

    rows: list[tuple[str, int, float, float]]


class Document(msgspec.Struct):
    """What is recorded of a step beside numbers."""

    kind: str
    step: int
    data: dict[str, Any]


class Snapshot(msgspec.Struct):
    """A snapshot that is asked for: a job of this name, waited for so long."""

    job: str
    timeout_s: float


class Stop(msgspec.Struct):
    """That the run is to end after the step that it is at, and why."""

    reason: str
