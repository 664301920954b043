"""The worker of flows, without a server; and Prefect's server, whose garbage may wait while nobody else does."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from uuid import UUID, uuid4

import anyio
import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.responses import WorkerFlowRunResponse
from prefect.settings import PREFECT_LOGGING_TO_API_ENABLED, temporary_settings

from flows.places import FILES
from flows.worker import Worker


class _Counting(Worker):
    """One that starts nothing."""

    def __init__(self) -> None:
        super().__init__(work_pool_name="a-pool", limit=2)
        self._limiter = anyio.CapacityLimiter(2)
        self.started: list[UUID] = []

    async def _submit_run(self, flow_run: FlowRun, *_: object) -> None:
        self.started.append(flow_run.id)

    async def look(self, *runs: FlowRun) -> None:
        async with anyio.create_task_group() as self._runs_task_group:
            found = [WorkerFlowRunResponse(work_pool_id=uuid4(), work_queue_id=uuid4(), flow_run=run) for run in runs]
            await self._submit_scheduled_flow_runs(found)
        for run in runs:
            self._submitting_flow_run_ids.discard(run.id)


def test_a_retry_that_comes_before_the_end_of_the_earlier_process_waits_for_it_and_others_do_not() -> None:
    async def tried() -> None:
        worker, again, other = _Counting(), FlowRun(flow_id=uuid4()), FlowRun(flow_id=uuid4())
        await worker.look(again)
        await worker.look(again, other)
        assert worker.started == [again.id, other.id]
        worker._release_limit_slot(again.id)
        await worker.look(again)
        assert worker.started == [again.id, other.id, again.id]

    with temporary_settings({PREFECT_LOGGING_TO_API_ENABLED: False}):
        asyncio.run(tried())


@pytest.mark.slow
def test_a_server_that_is_named_and_does_not_listen_is_reported_by_its_variable() -> None:
    environment = {**os.environ, "PREFECT_API_URL": "http://127.0.0.1:9/api", "DO_NOT_TRACK": "1"}
    ran = subprocess.run(
        [sys.executable, "-m", "flows.worker"], cwd=FILES, env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 1
    said = r"PREFECT_API_URL: no Prefect server responds at http://127\.0\.0\.1:9/api/ within 5 s; .* unset the .*\n"
    assert re.fullmatch(said, ran.stderr)


_SCRIPT = """
import threading, weakref
from flows import prefect_server

prefect_server.collect_beside(every_s=0.05)
class Cycle: ...

gone, by = threading.Event(), []
cycle = Cycle()
cycle.itself = cycle
there = weakref.ref(cycle, lambda _: (by.append(threading.current_thread().name), gone.set()))
del cycle
kept = [[] for _ in range(100_000)]  # this thread would collect, if it might
assert gone.wait(60.0)
print(*by)
"""


def test_garbage_is_collected_by_a_thread_of_its_own() -> None:
    """A cursor in it may wait for a lock that the event loop's thread is to release."""
    done = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "garbage"
