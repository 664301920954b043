"""A real Prefect server, worker and MLflow: the deployment; runs that complete, fail, are cancelled; and their end."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID

import httpx
import pytest
from mlflow import MlflowClient
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.sorting import FlowRunSort
from prefect.states import Cancelling

from tests.support.control import environment, run_python, tiny

T = TypeVar("T")

pytestmark = pytest.mark.slow

_TIMEOUT_S = 120.0  # for whatever a test waits for
_DUE_S = 6.0  # until the first run of a schedule; the server looks for new schedules every 2 s here


class Up:
    """A stack that `make up` has started."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self.told: dict[str, Any] = json.loads((state / "stack.json").read_text())
        self.client = SyncPrefectClient(self.told["prefect_api"])

    def prefect(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        settings = environment(self.state) | {"PREFECT_API_URL": self.told["prefect_api"], "DO_NOT_TRACK": "1"}
        command = [sys.executable, "-m", "prefect", *arguments]
        return subprocess.run(command, env=settings, capture_output=True, text=True, timeout=240)

    @cached_property
    def deployment_id(self) -> UUID:
        return self.client.read_deployment_by_name("areal/train").id

    def call(self, method: str, path: str, body: Any) -> Any:
        """What the pages do: a bare call of Prefect's API, tried again while its database is locked."""

        def served() -> httpx.Response | None:
            answer = httpx.request(method, self.told["prefect_api"] + path, json=body)
            return None if answer.status_code == httpx.codes.SERVICE_UNAVAILABLE else answer

        answer = self.until(f"{method} {path} is served", served)
        assert answer.is_success, answer.text
        return answer.json() if answer.content else None

    def start(self, **parameters: Any) -> UUID:
        return self.client.create_flow_run_from_deployment(self.deployment_id, parameters=parameters).id

    def scheduled(self) -> list[FlowRun]:
        """Runs that a schedule has made, by the time at which they are due."""
        runs = self.client.read_flow_runs(sort=FlowRunSort.EXPECTED_START_TIME_ASC)
        return [run for run in runs if run.auto_scheduled]

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
        deadline = time.monotonic() + _TIMEOUT_S
        while time.monotonic() < deadline:
            if found := look():
                return found
            time.sleep(0.2)
        raise AssertionError(f"not within {_TIMEOUT_S:g} s: {what}")

    def artifacts(self, flow_run_id: UUID) -> dict[str, Any]:
        chosen = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run_id]))
        return {str(found.key): found for found in self.client.read_artifacts(artifact_filter=chosen)}

    def result(self, flow_run: FlowRun) -> dict[str, str]:
        return {row["what"]: row["value"] for row in json.loads(self.artifacts(flow_run.id)["areal-result"].data)}


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    state = tmp_path_factory.mktemp("state")
    started = run_python(state, "flows.stack", "up", PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS="2")
    assert started.returncode == 0, started.stderr
    try:
        with (stack := Up(state)).client:
            yield stack
    finally:
        ended = run_python(state, "flows.stack", "down")
        assert ended.returncode == 0, ended.stderr


def test_deployment_has_a_form_a_pool_and_a_schedule_that_sleeps(up: Up) -> None:
    deployment = up.client.read_deployment_by_name("areal/train")
    assert deployment.entrypoint == "flows/areal.py:areal"
    assert deployment.work_pool_name == "areal-local"
    assert [schedule.active for schedule in deployment.schedules] == [False]
    assert set(deployment.parameter_openapi_schema["properties"]) >= {"experiment", "mode", "seed", "steps"}


def test_up_again_finds_what_is_there(up: Up) -> None:
    assert up.told["prefect_api"].removesuffix("/api") in run_python(up.state, "flows.stack", "up").stdout
    assert json.loads((up.state / "stack.json").read_text()) == up.told


def test_run_from_the_command_line_completes_with_artifacts_and_a_tracked_run(up: Up) -> None:
    parameters = ["--param", "steps=2", "--param", f"overrides={json.dumps(tiny(up.state))}"]
    ran = up.prefect("deployment", "run", "areal/train", "--watch", *parameters)
    assert ran.returncode == 0, ran.stdout
    (flow_run,) = [run for run in up.client.read_flow_runs() if run.state_name == "Completed"]
    artifacts = up.artifacts(flow_run.id)
    assert up.result(flow_run)["steps"] == "2 (ended by steps)"
    run_id = f"cpu-async-{str(flow_run.id)[-12:]}"
    assert artifacts["areal-summary"].data.startswith(f"# {run_id}")
    info = json.loads((up.state / "runs" / run_id / "run.json").read_text())
    assert info["tracking_uri"] == up.told["mlflow_uri"]
    tracked = MlflowClient(info["tracking_uri"]).get_run(info["tracking_run_id"])
    assert tracked.info.status == "FINISHED"
    assert tracked.data.tags["areal.flow_run_id"] == str(flow_run.id)


def test_run_started_on_the_page_completes(up: Up) -> None:
    asked = {
        "parameters": {"experiment": "cpu-async", "mode": "sync", "steps": 1, "overrides": tiny(up.state)},
        "state": {"type": "SCHEDULED", "message": "Run from the Prefect UI", "state_details": {}},
        "enforce_parameter_schema": True,
    }
    made = up.call("POST", f"/deployments/{up.deployment_id}/create_flow_run", asked)
    flow_run = up.wait(UUID(made["id"]), "Completed")
    assert not flow_run.auto_scheduled
    assert up.result(flow_run)["mode"] == "sync"


def test_schedule_that_is_resumed_starts_a_run_by_itself_and_sleeps_again(up: Up) -> None:
    due = datetime.now(UTC) + timedelta(seconds=_DUE_S)
    hourly = {"interval": 3600, "anchor_date": due.isoformat(), "timezone": "UTC"}
    parameters = {"steps": 1, "overrides": tiny(up.state)}
    paused = {"schedule": hourly, "active": False, "parameters": parameters}
    (schedule,) = up.call("POST", f"/deployments/{up.deployment_id}/schedules", [paused])
    path = f"/deployments/{up.deployment_id}/schedules/{schedule['id']}"
    assert up.scheduled() == []
    up.call("PATCH", path, {"active": True, "parameters": parameters})  # what isn't named is emptied
    first = up.until("runs are scheduled", up.scheduled)[0]
    assert first.auto_scheduled
    assert first.created_by is not None
    assert (first.created_by.type, first.created_by.id) == ("SCHEDULE", UUID(schedule["id"]))
    flow_run = up.wait(first.id, "Completed")
    assert up.result(flow_run)["steps"] == "1 (ended by steps)"
    assert flow_run.expected_start_time == due
    up.call("PATCH", path, {"active": False})
    assert [run.id for run in up.scheduled()] == [first.id]  # those to come are gone
    assert [schedule.active for schedule in up.client.read_deployment(up.deployment_id).schedules] == [False, False]


def test_wrong_setting_fails_at_once_with_one_line(up: Up) -> None:
    flow_run = up.wait(up.start(overrides=["training.stepz=3"]), "Failed")
    assert flow_run.state is not None
    assert flow_run.state.message == "training.stepz: no such field; did you mean training.steps?"
    assert flow_run.run_count == 1


def test_unknown_experiment_is_refused_with_the_known_ones(up: Up) -> None:
    refused = up.prefect("deployment", "run", "areal/train", "--param", "experiment=nope")
    assert refused.returncode != 0
    assert "cpu-async" in refused.stdout + refused.stderr


def test_cancelled_run_is_cancelled_and_leaves_no_process(up: Up) -> None:
    flow_run_id = up.start(steps=10_000, overrides=tiny(up.state))
    up.wait(flow_run_id, "Running")
    ready = up.state / "runs" / f"cpu-async-{str(flow_run_id)[-12:]}" / "ready"
    up.until("roles are ready", lambda: {"controller-0.json", "trainer-0.json"} <= {p.name for p in ready.glob("*")})
    pids = [json.loads(path.read_text())["pid"] for path in ready.glob("[!.]*.json")]
    up.client.set_flow_run_state(flow_run_id, Cancelling())
    up.wait(flow_run_id, "Cancelled")
    assert pids
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
