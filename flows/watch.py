"""Body of `areal train`, `compare` and `evaluate`: start servers, watch one flow run to its end.

Running servers are reused; servers that the command starts end with it. Exit code: 0 if the flow run Completed, 1 for a
failed run, 2 for a wrong setting, 130 after Ctrl-C. Ctrl-C cancels the flow run: its trainer completes the step and
writes a checkpoint. A second Ctrl-C kills the command's own servers; servers of `areal up` continue the cancellation.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar, cast
from uuid import UUID, uuid4

import httpx
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from areal_core.errors import ArealError, ConfigError, ProcessError, printable_lines
from flows import stack
from flows.shared import PLACES, PROGRESS, RESULT, run_title

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import Artifact, FlowRun

_POLL_INTERVAL_S = 1.0  # Prefect's API has to be polled
_CANCEL_TIMEOUT_S = 60.0
_SERVER_DOWN = "Prefect's server does not respond. Flow runs continue; progress returns when the server does."
_CANCELLING = "Cancelling the flow run. A run that trains ends its step and writes a checkpoint."
_RESUME = "Retry on its page resumes it; `areal up` opens the pages."
_MESSAGE_TIMEOUT_S = 2.0  # the supervisor notices a dead server at once

_Response = TypeVar("_Response")
Messages = Callable[[], list[str]]  # returns new messages for the user; raises ProcessError once the servers have ended


def run_command(owner: stack.CommandOwner, deployment: str, parameters: Callable[[], dict[str, Any]]) -> int:
    """Body of the command `areal OWNER`: one flow run of `deployment`. Returns the exit code.

    `parameters` returns the flow's parameters. It raises ConfigError for wrong settings before any server starts."""
    console = Console(highlight=False)
    for signum in (signal.SIGINT, signal.SIGTERM):  # a shell starts background jobs with SIGINT ignored
        signal.signal(signum, _interrupt)
    launch, at_once = None, False
    try:
        chosen = parameters()
        up = stack.running()
        if up is not None and up.owner != "up":
            raise ConfigError(
                f"`areal {up.owner}` (pid {up.pid}) already runs here; to run several at a time, start `areal up` first"
            )
        if up is None:
            launch = stack.Launch(owner)
            up = launch.wait_ready()
        os.environ.update(up.environment)  # Prefect reads it when it is imported
        try:
            return _run(deployment, chosen, up, console, launch.new_messages if launch else list)
        except httpx.HTTPError as error:
            if launch is not None:
                launch.new_messages(_MESSAGE_TIMEOUT_S)  # raises ProcessError with the reason, if known
            api = os.environ.get("PREFECT_API_URL")  # set by the user or by the stack
            raise ProcessError(
                f"PREFECT_API_URL: no Prefect server responds at {api}: {error}; start it, or unset the variable"
            ) from error
    except ArealError as error:
        print(f"areal: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt as interrupt:
        at_once = isinstance(interrupt.__context__, KeyboardInterrupt)  # the second one
        return 130
    finally:
        if launch is not None:
            launch.stop(at_once=at_once)


def _run(deployment: str, parameters: dict[str, Any], up: stack.Stack, console: Console, messages: Messages) -> int:
    """Start the flow run, show its progress, then its result. Returns the exit code."""
    from prefect import get_client
    from prefect.utilities.urls import url_for

    with get_client(sync_client=True) as client:
        deployed = client.read_deployment_by_name(deployment)
        # Idempotent: every call returns the same flow run.
        create = partial(
            client.create_flow_run_from_deployment,
            deployed.id,
            name=run_title(parameters),
            parameters=parameters,
            job_variables={"env": {"PYTHONPATH": _python_path()}},
            idempotency_key=uuid4().hex,
        )
        try:
            flow_run = create()
            console.print(
                f"Flow run [bold]{_safe(flow_run.name)}[/]  {url_for(flow_run) or ''}\n{up.pages}", soft_wrap=True
            )
            flow_run = _watch(client, flow_run.id, console, messages)
        except KeyboardInterrupt:
            again = "stop waiting" if up.owner == "up" else "kill all processes at once"
            console.print(f"{_CANCELLING} Press Ctrl-C again to {again}.", soft_wrap=True)
            _cancel(client, create().id, console)  # Ctrl-C may have come after the creation and before its response
            raise
        state = flow_run.state
        assert state is not None
        if result := newest_artifact(client, flow_run.id, RESULT):  # a failed comparison has a result too
            console.print(_table(result))
        if places := newest_artifact(client, flow_run.id, PLACES):
            for place in _rows(places):
                console.print(_safe(f"{place['what']}: {place['value']}"), soft_wrap=True)
        if not state.is_completed():
            why = (state.message or "Prefect gives no reason").removeprefix("Flow run encountered an exception: ")
            console.print(f"[red]{state.name}[/]: {_safe(why)}", soft_wrap=True)
            return 1
    if up.owner != "up":
        console.print("Run `areal up` to open these pages again.")
    return 0


def _python_path() -> str:
    """This command's module search path, for the flow run: a worker started elsewhere has another path."""
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join(map(os.path.abspath, ["", *filter(None, given)]))  # working directory first


def _watch(client: SyncPrefectClient, flow_run_id: UUID, console: Console, messages: Messages) -> FlowRun:
    """Show the progress artifact until the flow run ends: as a bar on a terminal, elsewhere as lines."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        shown = bar.add_task("starting", total=100.0)
        said, silent = None, False
        while True:
            for line in messages():
                console.print(_safe(line), soft_wrap=True)
            polled = _query(lambda: (client.read_flow_run(flow_run_id), newest_artifact(client, flow_run_id, PROGRESS)))
            if (polled is None) != silent:
                silent = polled is None
                console.print(_SERVER_DOWN if silent else "Prefect's server responds again.", soft_wrap=True)
            if polled is None:
                time.sleep(_POLL_INTERVAL_S)
                continue
            flow_run, artifact = polled
            assert flow_run.state is not None
            done = float(str(artifact.data)) if artifact else 0.0
            late = _query(lambda: _late(client)) if flow_run.state.name == "Late" else None
            text = _safe((artifact and artifact.description) or late or str(flow_run.state.name))
            bar.update(shown, description=text, completed=done)
            what = re.split(" · |  ", text, maxsplit=1)[0]  # without figures, which change all the time
            if not console.is_terminal and said != (said := (done, what)):
                console.print(text, soft_wrap=True)
            if flow_run.state.is_final():
                return flow_run
            time.sleep(_POLL_INTERVAL_S)


def _late(client: SyncPrefectClient) -> str:
    """The state of a flow run that is due, with the flow runs that the worker executes before it."""
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterState, FlowRunFilterStateName

    running = FlowRunFilter(state=FlowRunFilterState(name=FlowRunFilterStateName(any_=["Running"])))
    names = ", ".join(each.name for each in client.read_flow_runs(flow_run_filter=running))
    return f"Late: waits until the worker has ended {names or 'other flow runs'}"


def _cancel(client: SyncPrefectClient, flow_run_id: UUID, console: Console) -> None:
    """Cancel the flow run and wait for its end: its processes must end before the servers do."""
    from prefect.states import Cancelling

    client.set_flow_run_state(flow_run_id, Cancelling())
    deadline = time.monotonic() + _CANCEL_TIMEOUT_S
    while time.monotonic() < deadline:
        flow_run = _query(lambda: client.read_flow_run(flow_run_id))
        if flow_run is not None and flow_run.state is not None and flow_run.state.is_final():
            console.print(f"The flow run is {flow_run.state.name}. {_RESUME}", soft_wrap=True)
            return
        time.sleep(_POLL_INTERVAL_S)
    console.print(f"The flow run has not ended after {_CANCEL_TIMEOUT_S:.0f} s.")


def _query(call: Callable[[], _Response]) -> _Response | None:
    """Response of the server, without retry; None if it is down, late or responds with an error."""
    from flows.page import best_effort  # imports Prefect

    with best_effort():
        return call()
    return None


def newest_artifact(client: SyncPrefectClient, flow_run_id: UUID, key: str) -> Artifact | None:
    """Newest artifact of a flow run with this key: every retry creates another one."""
    from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId, ArtifactFilterKey
    from prefect.client.schemas.sorting import ArtifactSort

    chosen = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run_id]), key=ArtifactFilterKey(any_=[key]))
    found = client.read_artifacts(artifact_filter=chosen, sort=ArtifactSort.UPDATED_DESC, limit=1)
    return found[0] if found else None


def _table(artifact: Artifact) -> Table:
    """Show a table artifact. A table of names and values has no header."""
    rows = _rows(artifact)
    columns = list(rows[0])
    table = Table(
        title=_safe(artifact.description or ""), show_header=columns != ["what", "value"], title_justify="left"
    )
    for column in columns:
        table.add_column(_safe(column), overflow="fold")
    for row in rows:
        table.add_row(*(_safe(row[column]) for column in columns))
    return table


def _rows(artifact: Artifact) -> list[dict[str, str]]:
    return json.loads(cast(str, artifact.data))


def _safe(text: str) -> str:
    """Text of unknown origin, escaped for the console: no control characters, no markup."""
    return escape(printable_lines(text))


def _interrupt(_signum: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
