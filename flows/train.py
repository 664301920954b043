"""`make train`: the servers, the deployment, one flow run of `areal/train` watched to its end, and its result.

What is up already is used; what this command starts ends with it. Exit code 0 only if the flow run Completed, 2 for a
wrong setting, 1 for a failed run, 130 after Ctrl-C, which cancels the flow run.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any, cast
from uuid import UUID

import httpx
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from areal_core.errors import ArealError, ConfigError, ProcessError
from flows import stack
from flows.compose import configure

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import Artifact, FlowRun

_DEPLOYMENT = "areal/train"
_LOOK_INTERVAL_S = 1.0  # Prefect's API can only be asked
_CANCEL_TIMEOUT_S = 60.0
_NEWS_TIMEOUT_S = 2.0  # a supervisor sees at once what dies

News = Callable[[], list[str]]  # what the user was not told yet; raises ProcessError when the servers have ended


def main() -> int:
    parameters = _parameters()
    console = Console(highlight=False)
    for signum in (signal.SIGINT, signal.SIGTERM):  # a shell starts what it puts in the background deaf to SIGINT
        signal.signal(signum, _interrupt)
    launch = None
    try:
        configure(**parameters)  # what is wrong with it is wrong before anything starts
        up = stack.running()
        if up is not None and up.owner == "train":
            raise ConfigError(
                f"`make train` (pid {up.pid}) already runs in this checkout; `make up` first to run several"
            )
        if up is None:
            launch = stack.launch("train")
            up = launch.wait_ready()
        os.environ.update(up.environment)  # Prefect reads it when it is imported
        os.environ.setdefault("PREFECT_CLIENT_MAX_RETRIES", "1")  # a server on this machine is there or gone
        try:
            return _train(parameters, up, console, launch.news if launch else list)
        except httpx.HTTPError as error:
            if launch is not None:
                launch.news(_NEWS_TIMEOUT_S)  # knows better
            raise ProcessError(f"the Prefect server at {up.prefect_api} is gone: {error}") from error
    except ArealError as error:
        print(f"areal: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130
    finally:
        if launch is not None:
            launch.stop()


def _train(parameters: dict[str, Any], up: stack.Stack, console: Console, news: News) -> int:
    """Start the flow run, show how it goes, show what came of it."""
    from prefect import get_client
    from prefect.utilities.urls import url_for

    with get_client(sync_client=True) as client:
        deployment = client.read_deployment_by_name(_DEPLOYMENT)
        flow_run = client.create_flow_run_from_deployment(deployment.id, parameters=parameters)
        console.print(f"Flow run [bold]{flow_run.name}[/]  {url_for(flow_run) or ''}\n{up.pages}", soft_wrap=True)
        try:
            flow_run = _watch(client, flow_run.id, console, news)
        except KeyboardInterrupt:
            _cancel(client, flow_run.id, console)
            raise
        state = flow_run.state
        assert state is not None
        if not state.is_completed():
            console.print(f"[red]{state.name}[/]: {_plain(state.message)}", markup=True, soft_wrap=True)
            return 1
        _show_result(client, flow_run, console)
    if up.owner == "train":
        console.print("`make up` opens the pages again.")
    return 0


def _watch(client: SyncPrefectClient, flow_run_id: UUID, console: Console, news: News) -> FlowRun:
    """Show the progress artifact until the flow run has ended; on a terminal as a bar, elsewhere as lines."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        shown = bar.add_task("starting", total=100.0)
        said = None
        while True:
            for line in news():
                console.print(line, soft_wrap=True)
            flow_run = client.read_flow_run(flow_run_id)
            assert flow_run.state is not None
            artifact = _artifact(client, flow_run_id, "areal-progress")
            done = float(str(artifact.data)) if artifact else 0.0
            text = artifact.description if artifact and artifact.description else str(flow_run.state.name)
            bar.update(shown, description=text, completed=done)
            if not console.is_terminal and said != (said := (done, text.partition(" ")[0])):
                console.print(text, soft_wrap=True)
            if flow_run.state.is_final():
                return flow_run
            time.sleep(_LOOK_INTERVAL_S)


def _cancel(client: SyncPrefectClient, flow_run_id: UUID, console: Console) -> None:
    """Ask for the end of the flow run and see it through: its processes end before the servers that record it."""
    from prefect.states import Cancelling

    console.print("Cancelling the flow run; Ctrl-C again ends everything at once.")
    client.set_flow_run_state(flow_run_id, Cancelling())
    deadline = time.monotonic() + _CANCEL_TIMEOUT_S
    while time.monotonic() < deadline:
        state = client.read_flow_run(flow_run_id).state
        if state is not None and state.is_final():
            console.print(f"The flow run is {state.name}.")
            return
        time.sleep(_LOOK_INTERVAL_S)
    console.print(f"The flow run has not ended after {_CANCEL_TIMEOUT_S:.0f} s.")


def _artifact(client: SyncPrefectClient, flow_run_id: UUID, key: str) -> Artifact | None:
    from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId, ArtifactFilterKey
    from prefect.client.schemas.sorting import ArtifactSort

    chosen = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run_id]), key=ArtifactFilterKey(any_=[key]))
    found = client.read_artifacts(
        artifact_filter=chosen, sort=ArtifactSort.UPDATED_DESC, limit=1
    )  # a retry makes another
    return found[0] if found else None


def _show_result(client: SyncPrefectClient, flow_run: FlowRun, console: Console) -> None:
    artifact = _artifact(client, flow_run.id, "areal-result")
    assert artifact is not None, "a completed flow run has reported"
    rows = json.loads(cast(str, artifact.data))
    table = Table(title=artifact.description, show_header=False, title_justify="left")
    table.add_column()
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(row["what"], row["value"])
    console.print(table)


def _plain(message: str | None) -> str:
    """Without the words that Prefect puts before an exception."""
    return (message or "no reason given").removeprefix("Flow run encountered an exception: ")


def _interrupt(_signum: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _parameters() -> dict[str, Any]:
    """The flow's parameters from the command line; what isn't given is left to the flow's defaults."""
    parser = argparse.ArgumentParser(prog="make train", description=__doc__, argument_default=argparse.SUPPRESS)
    parser.add_argument("--experiment", default="cpu-async")
    parser.add_argument("--mode")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--stop-at-score", type=float)
    parser.add_argument("--stop-after-minutes", type=float)
    parser.add_argument("overrides", nargs="*", default=[], metavar="field=value")
    return vars(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
