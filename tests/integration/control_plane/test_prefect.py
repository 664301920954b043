"""Runs on a real Prefect server and a real MLflow: the deployment; runs that complete, fail and are cancelled."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import pytest
from mlflow import MlflowClient
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, temporary_settings

from areal_core.storage import checkpoint, weights
from areal_core.storage.objects import Storage
from areal_core.storage.rundir import RunDir
from flows.places import FILES
from flows.worker import make_schedules
from tests.support.control import emulated, environment, processes_of, run_python
from tests.support.stack import Up, brought_up

pytestmark = pytest.mark.slow

DEPLOYMENT = "areal/train"


def test_up_again_finds_what_is_there(up: Up) -> None:
    assert up.told["prefect_api"].removesuffix("/api") in run_python(up.state, "flows.cli", "up").stdout
    assert json.loads((up.state / "stack.json").read_text()) == up.told


def test_a_page_of_another_site_has_nothing_done(up: Up) -> None:
    """What a browser on this machine sends for it: with a body of JSON it asks first."""
    site, body = {"Origin": "https://example.org"}, json.dumps({"name": "x", "type": "process"})
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    pools = f"{up.told['prefect_api']}/work_pools/"
    answer = httpx.options(pools, headers=site | asked)
    assert answer.status_code == 400
    assert "access-control-allow-origin" not in answer.headers
    assert httpx.post(pools, headers=site | {"Content-Type": "text/plain"}, content=body).status_code == 422
    experiments = f"{up.told['mlflow_uri']}/api/2.0/mlflow/experiments/create"
    for content_type in ("application/json", "text/plain"):
        assert httpx.post(experiments, headers=site | {"Content-Type": content_type}, content=body).status_code == 403
    assert "x" not in [pool.name for pool in up.client.read_work_pools()]


def test_run_from_the_command_line_completes_with_artifacts_and_a_tracked_run(up: Up) -> None:
    overrides = json.dumps(emulated(up.state, tracked=True))
    parameters = ["--param", "steps=2", "--param", f"overrides={overrides}"]
    ran = up.prefect("deployment", "run", DEPLOYMENT, "--watch", *parameters)
    assert ran.returncode == 0, ran.stdout
    flow_run = up.newest()
    assert flow_run.state_name == "Completed"
    artifacts = up.artifacts(flow_run.id)
    assert up.result(flow_run)["steps"] == "2 (stop reason: steps)"
    run_id = f"emulated-cpu-async-{str(flow_run.id)[-12:]}"
    assert artifacts["areal-summary"].data.startswith(f"# {run_id}")
    info = json.loads((up.state / "runs" / run_id / "run.json").read_text())
    assert info["tracking_uri"] == up.told["mlflow_uri"]
    tracked = MlflowClient(info["tracking_uri"]).get_run(info["tracking_run_id"])
    assert tracked.info.status == "FINISHED"
    assert tracked.data.tags["areal.flow_run_id"] == str(flow_run.id)
    its_page = f"{info['tracking_uri']}/#/experiments/{tracked.info.experiment_id}/runs/{info['tracking_run_id']}"
    assert artifacts["areal-tracking"].data.endswith(f"({its_page}?workflowType=machine_learning)")
    page = f"{up.told['prefect_api'].removesuffix('/api')}/runs/flow-run/{flow_run.id}"
    assert (
        f"Checkpoints: `{info['checkpoint_url']}`; [its flow run]({page})" in tracked.data.tags["mlflow.note.content"]
    )


def test_run_imports_modules_of_the_directory_and_pythonpath_of_its_command(up: Up, tmp_path: Path) -> None:
    """One is in its working directory, one on its PYTHONPATH; the worker was started elsewhere."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "my_verifier.py").write_text("from my_lib import exact_match\n")
    (tmp_path / "lib" / "my_lib.py").write_text("from areal_core.environments.registry import exact_match\n")
    verifier = "environment.verifier=my_verifier:exact_match"
    ran = subprocess.run(
        [sys.executable, "-m", "flows.cli", "train", "training.steps=1", verifier, *emulated(up.state)],
        cwd=tmp_path,
        env=environment(up.state) | {"PYTHONPATH": f"lib:{FILES}"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


class Train:
    """`areal train` of a run without end, which has made a step."""

    def __init__(self, state: Path, **settings: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "flows.cli", "train", "training.steps=10000", *emulated(state)],
            cwd=FILES,
            env=environment(state) | settings,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        next(line for line in self._process.stdout if line.startswith("step") and not line.startswith("step 0/"))

    def interrupt(self) -> None:
        self._process.send_signal(signal.SIGINT)
        rest, _ = self._process.communicate(timeout=240)
        assert self._process.returncode == 130
        assert "The flow run is Cancelled." in rest


@pytest.mark.recovery
def test_interrupted_train_cancels_its_run_and_leaves_the_servers_that_were_up(up: Up) -> None:
    train, flow_run = Train(up.state), up.newest()
    pids = up.roles_of(f"emulated-cpu-async-{str(flow_run.id)[-12:]}")
    train.interrupt()
    assert up.client.read_flow_run(flow_run.id).state_name == "Cancelled"
    up.until("its processes end", lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    assert json.loads((up.state / "stack.json").read_text()) == up.told


@pytest.mark.recovery
def test_interrupted_train_saves_its_step_and_ends_the_servers_that_it_started(tmp_path: Path) -> None:
    Train(tmp_path, MLFLOW_TRACKING_URI=f"sqlite:///{tmp_path}/unused.db").interrupt()  # no server is needed
    assert processes_of(tmp_path) == {}
    (run,) = map(RunDir, (tmp_path / "runs").iterdir())
    saved, published = checkpoint.newest(Storage.open(run.info().checkpoint_url)), weights.newest(run.weights)
    assert published
    assert saved
    assert saved.step == published.version


def test_run_started_on_the_page_with_a_wrong_setting_fails_at_once_with_one_line(up: Up) -> None:
    asked = {
        "parameters": {"experiment": "cpu-async", "overrides": ["training.stepz=3"]},
        "state": {"type": "SCHEDULED", "message": "Run from the Prefect UI", "state_details": {}},
        "enforce_parameter_schema": True,
    }
    made = up.call("POST", f"/deployments/{up.deployment(DEPLOYMENT).id}/create_flow_run", asked)
    flow_run = up.wait(UUID(made["id"]), "Failed")
    assert flow_run.state is not None
    assert flow_run.state.message == "training.stepz: no such field; did you mean training.steps?"
    assert (flow_run.run_count, flow_run.auto_scheduled) == (1, False)


@pytest.mark.nightly
def test_a_run_that_is_unwell_is_cancelled_by_an_automation(up: Up) -> None:
    overrides = ["training.steps=10000", "health.max_step_s=0.001", *emulated(up.state)]
    flow_run_id = up.start(DEPLOYMENT, overrides=overrides)
    up.wait(flow_run_id, "Cancelled")
    told = up.client.request("POST", "/events/filter", json={"filter": {"event": {"prefix": ["areal."]}}}).json()[
        "events"
    ]
    (event,) = [one for one in told if one["event"] == "areal.alert.stall"]
    assert event["payload"]["text"].endswith("more than 0.001 (health.max_step_s)")
    assert f"prefect.flow-run.{flow_run_id}" in [one["prefect.resource.id"] for one in event["related"]]


def test_schedules_stay_as_users_left_them(up: Up) -> None:
    name, daily = "areal-reap/reap", {"cron": "0 4 * * *", "timezone": "UTC"}
    schedules = f"/deployments/{up.deployment(name).id}/schedules"
    own = {"schedule": {"interval": 3600}, "active": False}
    up.call("POST", schedules, [own, own | {"slug": "mine"}])

    def made(**always: Any) -> dict[str, tuple[bool, Any]]:
        """With this schedule in prefect.yaml: whether each one is active, and its cron."""

        async def make() -> None:
            async with get_client() as client:
                await make_schedules(client, {name: {"always": always}})

        with temporary_settings({PREFECT_API_URL: up.told["prefect_api"]}):
            asyncio.run(make())
        found = up.deployment(name).schedules
        return {str(one.slug): (one.active, getattr(one.schedule, "cron", None)) for one in found}

    others, often = {"None": (False, None), "mine": (False, None)}, {"interval": 600}
    assert made(schedule=often) == {"always": (False, None), **others}
    assert made(schedule=often, active=True) == {"always": (True, None), **others}
    assert made(schedule=daily) == {"always": (True, None), **others}  # by a worker that knows of no cloud


@pytest.mark.nightly
def test_down_and_up_keep_what_users_changed_in_deployments(tmp_path: Path) -> None:
    with brought_up(tmp_path) as up:
        deployment = up.deployment(DEPLOYMENT)
        schedules = f"/deployments/{deployment.id}/schedules"
        up.call("POST", schedules, [{"schedule": {"interval": 3600}, "active": False}])
        up.call("PATCH", f"{schedules}/{deployment.schedules[0].id}", {"active": True})
        up.call("PATCH", f"/deployments/{up.deployment('areal-compare/compare').id}", {"paused": True})
    with brought_up(tmp_path) as up:
        found = {schedule.slug: schedule.active for schedule in up.deployment(DEPLOYMENT).schedules}
        assert found == {"nightly": True, None: False}
        assert up.deployment("areal-compare/compare").paused
