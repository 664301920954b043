"""Report progress, artifacts and alerts to the flow run's page, as long as Prefect's server answers.

If the server is down or busy, only the view suffers; the run continues. Progress updates are tried once. Final results
are sent again until the server answers, for up to `PATIENCE_S`.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from typing import Any, TypeVar
from uuid import UUID

import httpx
from prefect import get_client, get_run_logger
from prefect.artifacts import create_table_artifact
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.client.schemas.objects import StateType
from prefect.events import emit_event
from prefect.runtime import deployment, flow_run
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from areal_core.launch.process import die_with_parent
from areal_core.types import Alert

PATIENCE_S = 3600.0  # patience with a server that is down at the end of a run; its processes have ended
_QUICK_S = 5.0  # timeout of progress calls
_RETRY_S = 5.0
_CANCEL_CHECK_S = 10.0  # interval of checks for a cancellation
_CANCEL_GRACE_S = 20.0  # a listening worker sends SIGTERM at once

_Response = TypeVar("_Response")


class FlowRunCancelled(Exception):  # noqa: N818 - an ending, not a failure
    """The flow run is to be cancelled, but its worker does not act."""


class Progress:
    """Progress of this flow run. Context manager with its own connection."""

    def __init__(self, key: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._key = key
        self._clock = clock
        self._artifact: UUID | None = None  # None: not created yet
        self._shown: tuple[float, str] | None = None
        self._client = get_client(sync_client=True, httpx_settings={"timeout": _QUICK_S})
        self._checked_at = clock()
        self._cancelling_since: float | None = None

    def __enter__(self) -> Progress:
        self._client.__enter__()
        return self

    def __exit__(self, *failure: object) -> None:
        self._client.__exit__(*failure)

    def show(self, percent: float, text: str) -> None:
        """Try once to show the progress, if it has changed; `percent` is 0 to 100."""
        if self._shown == (percent, text):
            return
        with best_effort():
            if self._artifact is None:
                made = ArtifactCreate(
                    key=self._key, type="progress", data=percent, description=text, flow_run_id=UUID(flow_run.id)
                )
                self._artifact = self._client.create_artifact(made).id
            else:
                self._client.update_artifact(self._artifact, ArtifactUpdate(data=percent, description=text))
            self._shown = percent, text

    def link(self, key: str, address: str, text: str) -> None:
        """Try once to show a link."""
        shown = ArtifactCreate(key=key, type="markdown", data=f"[{text}]({address})", flow_run_id=UUID(flow_run.id))
        with best_effort():
            self._client.create_artifact(shown)

    def cancel_ignored(self) -> bool:
        """Whether the flow run is in state Cancelling and its worker has not acted for 20 s.

        After an outage of the server, Prefect's worker stops listening for cancellations."""
        now = self._clock()
        if now - self._checked_at < _CANCEL_CHECK_S:
            return False
        self._checked_at = now
        with best_effort():
            state = self._client.read_flow_run(UUID(flow_run.id)).state
            if state is None or state.type is not StateType.CANCELLING:
                self._cancelling_since = None
            elif self._cancelling_since is None:
                self._cancelling_since = now
        return self._cancelling_since is not None and now - self._cancelling_since >= _CANCEL_GRACE_S


def tie_to_worker() -> None:
    """Have this process get SIGTERM if its worker dies, as nobody could cancel the flow run then."""
    if deployment.id is not None:
        die_with_parent(signal.SIGTERM)


@contextlib.contextmanager
def best_effort() -> Iterator[None]:
    """Context manager for API calls without retry. Ignores HTTP errors."""
    with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}), contextlib.suppress(httpx.HTTPError):
        yield


def retry(what: str, call: Callable[[], _Response], log: Callable[[str], None]) -> _Response | None:
    """Return the response of an API call; repeat the call while the server is down.

    If the server refuses or stays down, log the error, and return None.
    `what` completes "could not ...", as in "store the result"."""
    deadline = time.monotonic() + PATIENCE_S
    waiting = False
    with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}):
        while True:
            try:
                return call()
            except httpx.HTTPError as error:
                refused = isinstance(error, httpx.HTTPStatusError) and error.response.is_client_error
                if refused or time.monotonic() > deadline:
                    log(f"Prefect's server: could not {what}: {error}")
                    return None
                if not waiting:
                    log(f"Prefect's server does not respond; retrying to {what}: {error}")
                waiting = True
            time.sleep(_RETRY_S)


def show_table(what: str, rows: Sequence[Mapping[str, Any]], *, key: str, title: str | None = None) -> None:
    """Show a table on the page of this flow run, under the artifact key `key`.

    `what` names the table in the log if the server refuses it or stays down."""
    create = partial(create_table_artifact, [dict(row) for row in rows], key=key, description=title)
    retry(f"store {what}", create, get_run_logger().warning)


class Alerts:
    """Sends each new alert of the run as a Prefect event; automations act on the events.

        areal.alert.KIND    a new alert; KIND as in areal_core.controller.health

    The event's resource is `areal.run.RUN_ID`. The flow run and its deployment are related resources, so that
    automations find them. Prefect sends events in its own thread, so a server that is down blocks nothing."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._known: Set[str] = set()  # kinds of current alerts

    def show(self, alerts: Iterable[Alert]) -> None:
        now = {alert.kind: alert for alert in alerts}
        resource = {"prefect.resource.id": f"areal.run.{self._run_id}", "prefect.resource.name": self._run_id}
        for kind in now.keys() - self._known:
            payload = {"step": now[kind].step, "text": now[kind].text}
            emit_event(f"areal.alert.{kind}", resource, payload=payload)
        self._known = now.keys()
