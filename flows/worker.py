"""The process workers of this machine: they make their pools, the deployments and schedules of prefect.yaml and the
automations known to the API, then run what is scheduled. In the pool `areal-local` one run at a time, because it uses
the whole machine; in `areal-cloud` many, which only look after nodes elsewhere."""

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
from prefect.client.schemas.actions import DeploymentScheduleCreate, WorkPoolCreate
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
    WorkPoolFilter,
    WorkPoolFilterName,
)
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
from flows.stack import SOLE, WORKER_READY

AUTOMATIONS = Path(__file__).with_name("automations.yaml")
PREFECT_FILE = FILES / "prefect.yaml"
POOL = "areal-local"
CLOUD_POOL = "areal-cloud"
NODES_POOL = "areal-nodes"  # nodes have workers of their own
_LIMITS = {POOL: 1, CLOUD_POOL: 16}  # flow runs of this machine at once

_UNFINISHED = [StateType.PENDING, StateType.RUNNING, StateType.CANCELLING]
_API_TIMEOUT_S, _NAMED_TIMEOUT_S = 90.0, 5.0  # with a server that is just being started; with one that is said to run
_PROBE_INTERVAL_S = 0.1


class Worker(ProcessWorker):
    """One that outlives a retry that comes at once: Prefect's own fails when it is given a flow run whose earlier
    process it still counts, and would end all others with it."""

    @classmethod
    def __dispatch_key__(cls) -> str:
        """Not in the place of Prefect's own, whose type it has."""
        return "areal"

    async def _submit_scheduled_flow_runs(self, flow_run_response: list[WorkerFlowRunResponse]) -> list[FlowRun]:
        counted = self._limiter.statistics().borrowers if self._limiter else ()
        free = [response for response in flow_run_response if response.flow_run.id not in counted]
        return await super()._submit_scheduled_flow_runs(free)  # the others come again with the next look

    async def run(self, flow_run: FlowRun, configuration: ProcessJobConfiguration, task_status: Any = None) -> Any:
        """Find modules where the command finds them that made the flow run, then where this worker does."""
        paths = [configuration.env.get("PYTHONPATH"), os.environ.get("PYTHONPATH")]
        configuration.env["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, paths)))
        return await super().run(flow_run, configuration, task_status)


async def _prepare() -> list[UUID]:
    """Make all that deployments need known; returns the deployments that are paused."""
    async with get_client() as client:
        await _until_healthy(client)
        for pool in (*_LIMITS, NODES_POOL):
            await _make_pool(client, pool)
        await make_automations(client)
        if SOLE in sys.argv:
            await _mark_crashed(client)
        return [deployment.id for deployment in await client.read_deployments() if deployment.paused]


async def _schedule(paused: Iterable[UUID]) -> None:
    """Make the schedules of deployments known, and pause those that were `paused`: `prefect deploy` resumes them."""
    schedules = yaml.safe_load(PREFECT_FILE.read_text())["definitions"]["schedules"]
    if control_outputs(STATE):  # there may be nodes that nobody has any more
        schedules[REAPER]["always"]["active"] = True
    async with get_client() as client:
        for deployment_id in paused:
            await client.pause_deployment(deployment_id)
        await make_schedules(client, schedules)


async def make_automations(client: PrefectClient) -> None:
    """Make those automations known that are not; what somebody has paused or changed stays so."""
    known = {automation.name for automation in await client.read_automations()}
    for wanted in map(AutomationCore.model_validate, yaml.safe_load(AUTOMATIONS.read_text())["automations"]):
        if wanted.name not in known:
            await client.create_automation(wanted)


async def make_schedules(client: PrefectClient, schedules: Mapping[str, Mapping[str, Any]]) -> None:
    """Make the schedules that a deployment lacks, paused unless they are to be active, and resume those. Otherwise what
    is there stays as users of Prefect's page left it."""
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
    """Runs until SIGTERM, which ends the flow run first."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    process.announce_ready(WORKER_READY)
    workers = [
        Worker(work_pool_name=pool, name=f"{pool}-{os.getpid()}", limit=limit) for pool, limit in _LIMITS.items()
    ]
    with contextlib.suppress(asyncio.CancelledError):  # SIGTERM, and all is ended
        await asyncio.gather(*(worker.start() for worker in workers))


async def _until_healthy(client: PrefectClient) -> None:
    """Wait for the server, which may be started at the same moment as this process and doesn't say when it is ready."""
    patience_s = _API_TIMEOUT_S if SOLE in sys.argv else _NAMED_TIMEOUT_S
    try:
        async with asyncio.timeout(patience_s):
            while await client.api_healthcheck() is not None:  # noqa: ASYNC110 - nothing else tells
                await asyncio.sleep(_PROBE_INTERVAL_S)
    except TimeoutError:
        raise ProcessError(
            f"PREFECT_API_URL: no Prefect server responds at {client.api_url} within {patience_s:.0f} s; start it, "
            "name another, or unset it to have one started here"
        ) from None


async def _make_pool(client: PrefectClient, name: str) -> None:
    template = ProcessWorker.get_default_base_job_template()
    with contextlib.suppress(ObjectAlreadyExists):
        await client.create_work_pool(WorkPoolCreate(name=name, type="process", base_job_template=template))


async def _mark_crashed(client: PrefectClient) -> None:
    """Mark flow runs as crashed that died together with their worker or their server."""
    unfinished = FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=_UNFINISHED)))
    pool = WorkPoolFilter(name=WorkPoolFilterName(any_=[*_LIMITS]))
    for left in await client.read_flow_runs(flow_run_filter=unfinished, work_pool_filter=pool):
        state = Crashed(message="Its worker or the Prefect server died; the run can be resumed.")
        await client.set_flow_run_state(left.id, state, force=True)


def _deploy() -> None:
    """`prefect deploy` itself, so that prefect.yaml means here what it means to everybody; in this process, which has
    Prefect imported."""
    os.chdir(WORK)  # the working directory of flow runs
    sys.argv = ["prefect", "--no-prompt", "deploy", "--all", "--prefect-file", str(PREFECT_FILE)]
    try:
        runpy.run_module("prefect", run_name="__main__")
    except SystemExit as ended:
        if ended.code:
            raise ProcessError(f"prefect deploy: ended with code {ended.code}; its output is above") from None


if __name__ == "__main__":
    process.adopt()
    try:
        paused = asyncio.run(_prepare())
        _deploy()
        asyncio.run(_schedule(paused))
        asyncio.run(_work())
    except ProcessError as error:
        sys.exit(str(error))
