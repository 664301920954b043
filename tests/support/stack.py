"""A real Prefect server, worker and MLflow, as `make up` starts them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.sorting import FlowRunSort

from tests.support.control import environment, processes_of, run_python
from tests.support.processes import wait_for

T = TypeVar("T")

_TIMEOUT_S = 300.0  # for whatever a test waits for


@contextmanager
def brought_up(state: Path, **settings: str) -> Iterator[Up]:
    """`make up`, then `make down`; `settings` are variables of the environment."""
    started = run_python(state, "flows.cli", "up", **settings)
    assert started.returncode == 0, started.stderr
    try:
        with (stack := Up(state)).client:
            yield stack
    finally:
        ended = run_python(state, "flows.cli", "down")
        assert ended.returncode == 0, ended.stderr
        # what it has killed may be on its way out
        wait_for(lambda: not processes_of(state), lambda: processes_of(state), _TIMEOUT_S)


class ControlPlane:
    """Prefect's server, and the folder of the worker beside it."""

    def __init__(self, state: Path, client: SyncPrefectClient, settings: dict[str, str]) -> None:
        """`settings`: the environment of commands."""
        self.state, self.client = state, client
        self.settings = environment(state) | {"DO_NOT_TRACK": "1"} | settings

    def prefect(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "prefect", *arguments]
        return subprocess.run(command, env=self.settings, capture_output=True, text=True, timeout=240)

    def artifacts(self, flow_run_id: UUID) -> dict[str, Any]:
        chosen = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run_id]))
        return {str(found.key): found for found in self.client.read_artifacts(artifact_filter=chosen)}


class Up(ControlPlane):
    """A stack that `make up` has started."""

    def __init__(self, state: Path) -> None:
        self.told: dict[str, Any] = json.loads((state / "stack.json").read_text())
        api = self.told["prefect_api"]
        super().__init__(state, SyncPrefectClient(api), {"PREFECT_API_URL": api})

    def deployment(self, name: str) -> DeploymentResponse:
        return self.client.read_deployment_by_name(name)

    def call(self, method: str, path: str, body: Any) -> Any:
        """A bare call of Prefect's API, as the pages make it, tried again while its database is locked."""

        def served() -> httpx.Response | None:
            reply = httpx.request(method, self.told["prefect_api"] + path, json=body)
            return None if reply.status_code == httpx.codes.SERVICE_UNAVAILABLE else reply

        reply = self.until(f"{method} {path} is served", served)
        assert reply.is_success, reply.text
        return reply.json() if reply.content else None

    def start(self, deployment: str, **parameters: Any) -> UUID:
        return self.client.create_flow_run_from_deployment(self.deployment(deployment).id, parameters=parameters).id

    def newest(self) -> FlowRun:
        """The flow run that was started last, and by no schedule."""
        runs = self.client.read_flow_runs(sort=FlowRunSort.START_TIME_DESC)
        return next(run for run in runs if not run.auto_scheduled)

    def wait(self, flow_run_id: UUID, *until: str) -> FlowRun:
        """The flow run once its state has one of these names."""

        def there() -> FlowRun | None:
            flow_run = self.client.read_flow_run(flow_run_id)
            assert flow_run.state is not None
            if flow_run.state.name in until:
                return flow_run
            assert not flow_run.state.is_final(), f"{flow_run.state.name}: {flow_run.state.message}"
            return None

        return self.until(f"flow run is {' or '.join(until)}", there)

    def until(self, what: str, look: Callable[[], T | None]) -> T:
        """What `look` finds, once it finds something."""
        return wait_for(look, what, _TIMEOUT_S, pause_s=0.5)  # each look costs the server more than the one who looks

    def roles_of(self, run_id: str) -> list[int]:
        """The processes of a run, once its controller and its trainer are ready."""
        ready = self.state / "runs" / run_id / "ready"
        needed = {"controller-0.json", "trainer-0.json"}
        self.until("roles are ready", lambda: needed <= {path.name for path in ready.glob("*")})
        return [json.loads(path.read_text())["pid"] for path in ready.glob("[!.]*.json")]

    def result(self, flow_run: FlowRun) -> dict[str, str]:
        return {row["what"]: row["value"] for row in json.loads(self.artifacts(flow_run.id)["areal-result"].data)}
