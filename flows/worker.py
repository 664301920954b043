"""The Prefect process workers of this machine.

They create the work pools, deployments, schedules and automations, then run scheduled flow runs. The pool `areal-local`
runs one flow run at a time, because a run uses the whole machine. The pool `areal-cloud` runs many, because its flow
runs only supervise nodes elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import runpy
import signal
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from uuid import UUID

import yaml
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas import filters
from prefect.client.schemas.actions import DeploymentScheduleCreate, WorkPoolCreate
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.client.schemas.responses import WorkerFlowRunResponse
from prefect.events.schemas.automations import AutomationCore
from prefect.exceptions import ObjectAlreadyExists
from prefect.states import Crashed
from prefect.workers.process import ProcessJobConfiguration, ProcessWorker

from areal_core.errors import ProcessError
from areal_core.launch import process
from flows.places import FILES, STATE, WORK
from flows.provision.nodes import control_outputs
from flows.shares import REAPER
from flows.stack import ONLY_WORKER, WORKER_READY

AUTOMATIONS = Path(__file__).with_name("automations.yaml")
PREFECT_FILE = FILES / "prefect.yaml"
POOL = "areal-local"
CLOUD_POOL = "areal-cloud"
NODES_POOL = "areal-nodes"  # served by the workers of the nodes
_LIMITS = {POOL: 1, CLOUD_POOL: 16}  # concurrent flow runs on this machine

_UNFINISHED = [StateType.PENDING, StateType.RUNNING, StateType.CANCELLING]
_API_TIMEOUT_S = 90.0  # patience with a server that is starting
_NAMED_TIMEOUT_S = 5.0  # patience with a server that the user names
_PROBE_INTERVAL_S = 0.1


class Worker(ProcessWorker):
    """Process worker that survives an immediate retry of a flow run.

    Prefect's own worker fails if it gets a flow run whose previous process it still counts, and then ends all others
    too."""

    @classmethod
    def __dispatch_key__(cls) -> str:
        """A key of its own: Prefect's worker of the same type stays registered."""
        return "areal"

    async def _submit_scheduled_flow_runs(self, flow_run_response: list[WorkerFlowRunResponse]) -> list[FlowRun]:
        counted = self._limiter.statistics().borrowers if self._limiter else ()
        free = [response for response in flow_run_response if response.flow_run.id not in counted]
        return await super()._submit_scheduled_flow_runs(free)  # the next poll returns the others again

    async def run(self, flow_run: FlowRun, configuration: ProcessJobConfiguration, task_status: Any = None) -> Any:
        """Set the module search path of the flow run: first that of its creator, then that of this worker."""
        paths = [configuration.env.get("PYTHONPATH"), os.environ.get("PYTHONPATH")]
        configuration.env["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, paths)))
        return await super().run(flow_run, configuration, task_status)


async def _prepare() -> list[UUID]:
    """Create work pools and automations; return the ids of paused deployments."""
    async with get_client() as client:
        await _until_healthy(client)
        template = ProcessWorker.get_default_base_job_template()
        for pool in (*_LIMITS, NODES_POOL):
            with contextlib.suppress(ObjectAlreadyExists):
                await client.create_work_pool(WorkPoolCreate(name=pool, type="process", base_job_template=template))
        await make_automations(client)
        if ONLY_WORKER in sys.argv:
            await _mark_crashed(client)
        return [deployment.id for deployment in await client.read_deployments() if deployment.paused]


async def _schedule(paused: Iterable[UUID]) -> None:
    """Create the schedules of deployments.
    Pause the deployments in `paused` again, which `prefect deploy` has resumed."""
    schedules = yaml.safe_load(PREFECT_FILE.read_text())["definitions"]["schedules"]
    if control_outputs(STATE):  # a cloud is known, so nodes without an owner may exist
        schedules[REAPER]["always"]["active"] = True
    async with get_client() as client:
        for deployment_id in paused:
            await client.pause_deployment(deployment_id)
        await make_schedules(client, schedules)


async def make_automations(client: PrefectClient) -> None:
    """Create missing automations. Existing ones keep the user's changes and pauses."""
    known = {automation.name for automation in await client.read_automations()}
    for wanted in map(AutomationCore.model_validate, yaml.safe_load(AUTOMATIONS.read_text())["automations"]):
        if wanted.name not in known:
            await client.create_automation(wanted)


async def make_schedules(client: PrefectClient, schedules: Mapping[str, Mapping[str, Any]]) -> None:
    """Create missing schedules, and resume those that must be active.

    New schedules are paused unless `active` is set. Existing schedules keep the user's changes otherwise."""
    for name, wanted in schedules.items():
        deployment = await client.read_deployment_by_name(name)
        known = {schedule.slug: schedule for schedule in deployment.schedules}
        for slug, fields in wanted.items():
            asked = DeploymentScheduleCreate(slug=slug, **{"active": False, **fields})
            if slug not in known:
                await client.create_deployment_schedules(deployment.id, [asked])
            elif asked.active and not known[slug].active:
                await client.update_deployment_schedule(deployment.id, known[slug].id, active=True)


async def _work() -> None:
    """Run workers until SIGTERM, which ends their flow runs first."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    process.announce_ready(WORKER_READY)
    workers = [
        Worker(work_pool_name=pool, name=f"{pool}-{os.getpid()}", limit=limit) for pool, limit in _LIMITS.items()
    ]
    with contextlib.suppress(asyncio.CancelledError):  # SIGTERM
        await asyncio.gather(*(worker.start() for worker in workers))


async def _until_healthy(client: PrefectClient) -> None:
    """Wait for the Prefect server, which may be starting too.
    Raises ProcessError if it does not respond in time."""
    patience_s = _API_TIMEOUT_S if ONLY_WORKER in sys.argv else _NAMED_TIMEOUT_S
    try:
        async with asyncio.timeout(patience_s):
            while await client.api_healthcheck() is not None:  # noqa: ASYNC110 - the server can only be polled
                await asyncio.sleep(_PROBE_INTERVAL_S)
    except TimeoutError:
        raise ProcessError(
            f"PREFECT_API_URL: no Prefect server responds at {client.api_url} within {patience_s:.0f} s; start it, "
            "set another address, or unset the variable to use a server of this command"
        ) from None


async def _mark_crashed(client: PrefectClient) -> None:
    """Mark flow runs as crashed whose worker or server has died."""
    unfinished = filters.FlowRunFilter(
        state=filters.FlowRunFilterState(type=filters.FlowRunFilterStateType(any_=_UNFINISHED))
    )
    pool = filters.WorkPoolFilter(name=filters.WorkPoolFilterName(any_=[*_LIMITS]))
    for left in await client.read_flow_runs(flow_run_filter=unfinished, work_pool_filter=pool):
        state = Crashed(message="Its worker or the Prefect server died; retry the flow run to resume it.")
        await client.set_flow_run_state(left.id, state, force=True)


def _deploy() -> None:
    """Run `prefect deploy` in this process, which saves a second import of Prefect."""
    os.chdir(WORK)  # the working directory of flow runs
    sys.argv = ["prefect", "--no-prompt", "deploy", "--all", "--prefect-file", str(PREFECT_FILE)]
    try:
        runpy.run_module("prefect", run_name="__main__")
    except SystemExit as ended:
        if ended.code:
            raise ProcessError(f"prefect deploy: exited with status {ended.code}; see its output above") from None


if __name__ == "__main__":
    process.tie_to_parent()
    try:
        paused = asyncio.run(_prepare())
        _deploy()
        asyncio.run(_schedule(paused))
        asyncio.run(_work())
    except ProcessError as error:
        sys.exit(str(error))
