"""A run on hosts that are given: two workers on this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from flows.places import FILES
from tests.support.control import emulated, environment
from tests.support.stack import Up

pytestmark = pytest.mark.nightly

_NODES = ("provision.generation.count=1", "provision.trainer.count=1", f"provision.software={FILES}")

_THREE = ("provision.generation.count=3", "launch.devices=4")


@contextmanager
def host(up: Up, folder: Path, role: str) -> Iterator[None]:
    """`python -m flows.node`, on a host of a role."""
    folder.mkdir()
    prefect = {"api_url": up.told["prefect_api"], "work_pool": "areal-nodes", "work_queue": role}
    told = {"run": "static", "role": role, "prefect": prefect, "environment": {"PREFECT_WORKER_QUERY_SECONDS": "1"}}
    (folder / "node.json").write_text(json.dumps(told))
    settings = environment(up.state) | {"PREFECT_HOME": str(folder / "prefect")}
    command = [sys.executable, "-m", "flows.node", str(folder / "node.json")]
    with (
        (folder / "log").open("wb") as log,
        subprocess.Popen(command, cwd=FILES, env=settings, stdout=log, stderr=log, start_new_session=True) as worker,
    ):
        try:
            yield
        finally:
            os.killpg(worker.pid, signal.SIGTERM)


@pytest.fixture(scope="module")
def hosts(up: Up, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("hosts")
    with ExitStack() as running:
        for role in ("generation", "trainer"):
            running.enter_context(host(up, folder / role, role))

        def there() -> bool:
            workers = up.call("POST", "/work_pools/areal-nodes/workers/filter", {})
            return len([worker for worker in workers if worker["name"].startswith("static-")]) == 2

        up.until("both hosts have workers", there)
        yield


def overrides(up: Up, *more: str) -> list[str]:
    return [*emulated(up.state), *_NODES, *more]


@pytest.mark.usefixtures("hosts")
def test_a_run_on_given_hosts(up: Up) -> None:
    run = up.wait(up.start("areal/train", provision="static", steps=4, overrides=overrides(up)), "Completed")
    assert up.result(run)["steps"] == "4 (stop reason: steps)"
    assert {"areal-result", "areal-summary"} <= up.artifacts(run.id).keys()
    run_id = f"emulated-cpu-async-{str(run.id)[-12:]}"
    kept = up.state / "storage" / "runs" / run_id
    assert {file.name for file in (kept / "logs").iterdir()} >= {"controller-0.log", "host-generation-0.log"}
    copy = up.state / "copies" / "generation-0" / "runs" / run_id
    assert (copy / "run.json").exists()  # what it had of the run was a copy
    queues = up.call("POST", "/work_pools/areal-nodes/queues/filter", {})
    assert {queue["name"] for queue in queues} == {"default", "generation", "trainer"}


@pytest.mark.usefixtures("hosts")
def test_more_hosts_than_there_are(up: Up) -> None:
    run = up.wait(up.start("areal/train", provision="static", overrides=overrides(up, *_THREE)), "Failed")
    assert run.state is not None
    assert run.state.message == (
        "provision.generation.count: must be at most 1, the hosts that serve the queue generation of the work pool "
        "areal-nodes, got 3; start workers on more hosts"
    )
