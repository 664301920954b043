"""The flow `areal-node`: one node's share of a run, started by the node's own Prefect worker.

    check the node -> lead the run, or join it -> end

The first trainer node is the head node: it runs the launcher and all roles without nodes of their own. Through a secret
block of Prefect it gives the other nodes its address and the run's token. The other nodes work on copies of its folder.
If the head node is lost, they wait for the next one, which resumes from the newest checkpoint. A node that is to be
reclaimed leaves the run. The flow that provisioned it gives its share to another node.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Literal

import httpx
from prefect import flow, get_client, get_run_logger
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from prefect.settings import PREFECT_API_URL
from prefect.states import Cancelled, Completed, Failed

from areal_core.api.controller_client import ControllerClient
from areal_core.config.schema import RunConfig
from areal_core.errors import ArealError, ProcessError, StorageError
from areal_core.run import launcher as core
from areal_core.run.remote_worker import Head, RemoteWorker, RunCopy, RunLostError, Share
from areal_core.storage.objects import Storage
from areal_core.storage.rundir import RunDir
from flows import shares
from flows.compose import configure
from flows.machine import ReclaimNotice, gpu_problem, identity, own_address
from flows.page import FlowRunCancelled, Progress, best_effort, tie_to_worker
from flows.provision.request import by_role, servers_per_node
from flows.roles import THREADS, opened, report, run_roles
from flows.shared import FATAL_ERRORS, PROGRESS

_PATIENCE_S = 1.0  # patience with the controller; the next poll asks again
_HEAD_TIMEOUT_S = 1800.0  # patience with the start of a head node, or of its replacement
_POLL_S = 2.0

Log = Callable[[str], None]


@flow(name="areal-node", task_runner=THREADS)
def areal_node(
    run_id: str, role: Literal["generation", "trainer"], index: int, known_by: str, run: dict[str, Any]
) -> State:
    """Run one node's share of a run.

    Args:
        run_id: Id of the run.
        role: Role of the node.
        index: Index of the node in its role; trainer 0 is the head node.
        known_by: Id of the flow run that provisioned the node. Users know the run by it.
        run: Parameters of the flow `areal`."""
    tie_to_worker()
    log, node = get_run_logger().info, identity()
    address = own_address(PREFECT_API_URL.value() or "")
    try:
        here: dict[str, Any] = {**run, "overrides": [*run["overrides"], f"launch.address={address}"]}
        config = configure(**here)
    except ArealError as error:
        return Failed(name=shares.REFUSED, message=str(error))
    with get_client(sync_client=True) as client:
        shares.add_tag(client, flow_run.id, f"{shares.NODE}{node}")
    if problem := gpu_problem(by_role(config)[role]) or _node_problem(config):
        return Failed(name=shares.BAD_NODE, message=f"node {node} ({address}) is unfit: {problem}")
    with ReclaimNotice(log) as notice:
        try:
            if role == "trainer" and index == 0:
                _lead(config, run_id, known_by, log, notice)
            else:
                _join(config, run_id, role, index, address, log, notice)
        except FlowRunCancelled:
            return Cancelled(message="The run was cancelled; retry the run's flow run to resume it.")
        except ArealError as error:
            if notice.text is None:
                return Failed(name=shares.REFUSED if isinstance(error, FATAL_ERRORS) else None, message=str(error))
    if notice.text is not None:
        return Completed(name=shares.RECLAIMED, message=f"the cloud reclaims node {node}: {notice.text}")
    return Completed()


def _node_problem(config: RunConfig) -> str | None:
    """Check disk space and access to the store, which also tests the clock; return the problem, or None."""
    try:
        Path(config.state_dir).mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(config.state_dir).free / 2**30
        if free < config.launch.disk_low_gib:
            return f"launch.disk_low_gib: the disk must have {config.launch.disk_low_gib:g} GiB free, has {free:.1f}"
        Storage.open(config.storage.url, config.storage.endpoint_url)
    except StorageError as error:
        return str(error)
    return None


# ---- the head node ----


def _lead(config: RunConfig, run_id: str, known_by: str, log: Log, notice: ReclaimNotice) -> None:
    """Run the launcher to the run's end, then keep summary and logs in the store, in every case.
    `known_by` is the flow run that users know the run by."""
    with Progress(PROGRESS) as progress:
        if known := shares.head_address(run_id):  # an earlier head node existed
            core.run_folder(config, run_id).keep_token(known.token)
        run_dir = opened(config, run_id, progress, known_by)
        try:
            summary = run_roles(run_dir, progress, log, on_poll=_SupervisionHook(run_dir, log, notice))
        finally:
            _store_results(run_dir, config, log)
    report(summary, run_dir)


class _SupervisionHook:
    """Extra work in the head node's supervision loop: reclaim notice, head address, requests to finish."""

    def __init__(self, run_dir: RunDir, log: Log, notice: ReclaimNotice) -> None:
        self._run_dir, self._log, self._notice = run_dir, log, notice
        self._published: shares.HeadAddress | None = None
        self._finish_reason: str | None = None

    def __call__(self, run: core.Run) -> None:
        if self._notice.text is not None:
            run.stop(f"the cloud reclaims the head node: {self._notice.text}")
            return
        with best_effort():
            if info := self._run_dir.ready_info("files"):
                now = shares.HeadAddress(url=info["url"], token=self._run_dir.token())
                if now != self._published:
                    shares.publish_head(self._run_dir.info().run_id, now)
                    self._published = now
            if not self._run_dir.summary.exists():
                self._finish_if_asked()

    def _finish_if_asked(self) -> None:
        with get_client(sync_client=True) as client:
            tags = shares.tags_of(client, flow_run.id)
        if asked := next((tag.removeprefix(shares.FINISH) for tag in tags if tag.startswith(shares.FINISH)), None):
            try:
                with closing(ControllerClient(self._run_dir, patience_s=_PATIENCE_S)) as controller:
                    controller.stop(asked)
            except ArealError as error:  # the controller restarts: the next poll asks again
                self._log(f"could not ask the controller to end the run ({asked}), will retry: {error}")
                return
            if asked != self._finish_reason:
                self._finish_reason = asked
                self._log(f"the run ends after this step: {asked}")


def _store_results(run_dir: RunDir, config: RunConfig, log: Log) -> None:
    """Store summary, logs and evaluations in the run's folder of the store."""
    store = Storage.open(run_dir.info().checkpoint_url, config.storage.endpoint_url, config.storage.patience_s)
    files = [run_dir.summary, run_dir.root / "config.json", run_dir.root / "run.json"]
    files += [*run_dir.logs.glob("*"), *run_dir.evaluations.rglob("*")]
    try:
        for file in (file for file in files if file.is_file()):
            store.put_file(file, str(file.relative_to(run_dir.root)))
    except StorageError as error:
        log(f"could not store the summary, logs and evaluations; they are lost with this node: {error}")
    else:
        log(f"summary, logs and evaluations are in {store.url}")


# ---- the other nodes ----


def _join(config: RunConfig, run_id: str, role: str, index: int, address: str, log: Log, notice: ReclaimNotice) -> None:
    """Join the run as a remote worker until it ends in order or this node leaves.
    Raises ProcessError and others."""
    log("waiting for the head node")
    known = _head_of(run_id)

    def where() -> str:
        """The head node's address from Prefect; the last known one while Prefect is down."""
        nonlocal known
        with suppress(httpx.HTTPError):
            known = shares.head_address(run_id) or known
        return known.url

    head = Head(where, known.token)  # every head node of the run has the same token
    count = servers_per_node(config) if role == "generation" else 1
    share = Share(role=role, first=index * count, count=count)
    folder = Path(config.state_dir).absolute() / "copies" / f"{role}-{index}"
    while notice.text is None:
        worker = RemoteWorker(share, RunCopy(head, folder), address, log=log)
        notice.on_arrival(worker.leave)
        try:
            worker.work(_HEAD_TIMEOUT_S)
            return
        except RunLostError as error:
            log(f"lost the head node; waiting for another one: {error}")


def _head_of(run_id: str) -> shares.HeadAddress:
    """Wait for a head node, and return its address. Raises ProcessError if none starts in time."""
    deadline = time.monotonic() + _HEAD_TIMEOUT_S
    while time.monotonic() < deadline:
        with suppress(httpx.HTTPError):
            if found := shares.head_address(run_id):
                return found
        time.sleep(_POLL_S)
    raise ProcessError(f"no head node started within {_HEAD_TIMEOUT_S:.0f} s")
