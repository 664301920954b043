"""Run the flow `areal` on nodes.

    provision -> the nodes' shares -> teardown -> bill

The head node's share trains, rolls out, evaluates and tracks. This process only supervises the nodes and their shares
(`flows.fleet`). It needs access to Prefect's API, and for a cloud to the cloud's API. If it dies, the run continues
until its lease is over. After a restart it adopts the existing nodes and shares.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any
from uuid import UUID

from prefect import get_client, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import ArtifactCreate
from prefect.exceptions import ObjectNotFound
from prefect.runtime import flow_run

from areal_core.config.schema import RunConfig
from areal_core.errors import ConfigError, ProvisionError, TrackingError
from areal_core.run.launcher import summary_of
from areal_core.storage.lease import LeaseLostError
from areal_core.storage.objects import Storage
from areal_core.storage.rundir import RunInfo
from areal_core.types import Alert, RunSummary
from flows.compose import configure
from flows.fleet import Fleet
from flows.page import Alerts, FlowRunCancelled, Progress, best_effort, retry, show_table
from flows.provision.cost import Meter, split
from flows.provision.leased import LeasedNodes
from flows.provision.nodes import Host, control_outputs
from flows.provision.request import by_role, overrides, variables
from flows.provision.terraform import Plan
from flows.shared import COST, PLAN, PROGRESS, RESULT, SUMMARY, TRACKING
from flows.shares import FINISH, REAPER, Shares, add_tag
from flows.stack import STATE
from flows.watch import newest_artifact

_POLL_S = 2.0
_NOTICE_END_S = 20.0  # time for nodes to notice the end of the run
_END_S = 90.0  # time for shares to end
_NAME = re.compile(r"[a-z0-9][a-z0-9.-]{0,26}")  # together with the flow run's part, valid for the cloud

Log = Callable[[str], None]


def run_on_nodes(config: RunConfig, parameters: Mapping[str, Any], progress: Progress, log: Log) -> RunSummary:
    """Provision nodes, run to the end, and destroy them.
    `parameters` are the flow's parameters. Raises FlowRunCancelled, LeaseLostError, and ArealErrors of all kinds."""
    run_id = _run_id(config)
    control = control_outputs(STATE)
    chosen = [*parameters.get("overrides", []), *overrides(config, control)]
    on_nodes = configure(**{**parameters, "overrides": chosen})
    shown = {name: value for name, value in parameters.items() if value is not None} | {"overrides": chosen}
    with (
        get_client(sync_client=True) as client,
        _reap_on_cancel(),
        _leased(on_nodes, run_id, control, log) as nodes,
    ):
        progress.show(0.0, "provisioning nodes")
        shares = partial(Shares, client, on_nodes, run_id, {"known_by": flow_run.id, "run": shown})
        try:
            hosts = provision(nodes, on_nodes, shares)
            with _assigned_shares(on_nodes, hosts, shares(), nodes, log) as fleet:
                _watch(fleet, nodes, progress, client, Alerts(run_id))
            _copy_artifacts(client, fleet.leading.id, log)
        except Exception:
            teardown(nodes)
            raise
        teardown(nodes)
        storage = on_nodes.storage
        store = Storage.open(f"{storage.url.rstrip('/')}/runs/{run_id}", storage.endpoint_url, storage.patience_s)
        summary = summary_of(store.get_bytes("summary.json").decode())
        if nodes is not None:
            bill(nodes.spent(), summary, store)
    return summary


# ---- tasks ----


@task(cache_policy=NO_CACHE)
def provision(nodes: LeasedNodes | None, config: RunConfig, shares: Callable[[], Shares]) -> list[Host]:
    """Create the nodes, and show the plan as an artifact; or find the given hosts."""
    hosts = _static_hosts(config, shares()) if nodes is None else nodes.make(_show_plan)
    get_run_logger().info("nodes: %s", ", ".join(f"{host.name} {host.id} {host.address}" for host in hosts))
    return hosts


@task(cache_policy=NO_CACHE)
def teardown(nodes: LeasedNodes | None) -> None:
    """Destroy the nodes. The reaper destroys any that are left."""
    if nodes is None:
        get_run_logger().info("provision=static: the given hosts are not destroyed")
    else:
        nodes.end(_show_plan)


@task(cache_policy=NO_CACHE)
def bill(spent: Meter, summary: RunSummary, store: Storage) -> None:
    """Report the cost of the nodes by use: an artifact of the flow run, and MLflow metrics of the run."""
    idle = {role: {"idle": share} for role, share in summary.idle.items()}
    if generated := summary.tokens.generated:  # stale: share of dropped tokens in the servers' busy time
        its = idle.setdefault("generation", {"idle": 0.0})
        its["stale"] = (1.0 - its["idle"]) * summary.tokens.dropped / generated
    parts = split(spent.by_role(), idle)
    rows = [
        row | {what: f"${cost:.2f}" for what, cost in (parts.get(row["role"]) or {}).items()} for row in spent.rows()
    ]
    columns = list(dict.fromkeys(column for row in rows for column in row))
    rows = [{column: row.get(column, "-") for column in columns} for row in rows]
    show_table("the cost of the nodes", rows, key=COST, title="Cost")
    info = RunInfo(**json.loads(store.get_bytes("run.json")))
    if info.tracking_uri is None or info.tracking_run_id is None:
        return
    from areal_core.tracking.mlflow_client import add_to_run  # slow import

    metrics = {f"cost/{role}_hours": hours for role, hours in spent.hours().items()}
    if (dollars := spent.dollars()) is not None:
        metrics["cost/dollars"] = dollars
        for what in ("idle", "stale"):
            metrics[f"cost/{what}_dollars"] = sum((each or {}).get(what, 0.0) for each in parts.values())
    try:
        add_to_run(info.tracking_uri, info.tracking_run_id, metrics=metrics, step=summary.steps)
    except TrackingError as error:
        get_run_logger().warning("MLflow: could not record the cost of the run: %s", error)


def _show_plan(plan: Plan) -> None:
    rows = [{"what": change.action, "resource": change.address} for change in plan.changes]
    get_run_logger().info("plan: %s", plan)
    show_table("the plan", rows, key=PLAN, title=str(plan))


# ---- inside ----


def _leased(
    config: RunConfig, run_id: str, control: Mapping[str, Any], log: Log
) -> AbstractContextManager[LeasedNodes | None]:
    """The run's nodes; None for given hosts, which are never created, replaced or destroyed."""
    settings = config.provision
    if settings.kind == "static":
        return nullcontext()
    request = variables(config, run_id, control, datetime.now(UTC))
    prices = {role: settings.dollars(nodes) for role, nodes in by_role(config).items()}
    return LeasedNodes(request, STATE, length_s=settings.lease_s, prices=prices, log=log)


def _static_hosts(config: RunConfig, shares: Shares) -> list[Host]:
    """The given hosts, by role.
    Raises ProvisionError if fewer hosts serve a role's queue than the run needs."""
    hosts: list[Host] = []
    for role, nodes in by_role(config).items():
        there = shares.hosts(role)
        if len(there) < nodes.count:
            raise ProvisionError(
                f"provision.{role}.count: must be at most {len(there)}, the hosts that serve the queue {role} of the "
                f"work pool {config.provision.work_pool}, got {nodes.count}; start workers on more hosts"
            )
        hosts += there[: nodes.count]
    return hosts


@contextmanager
def _reap_on_cancel() -> Iterator[None]:
    """Start the reaper at once if this process is asked to end, which leaves it only half a minute.

    By then the nodes have been handed over to the reaper."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception):
            # Without a reaper, the nodes shut themselves down at their expiry.
            with best_effort(), get_client(sync_client=True) as client, suppress(ObjectNotFound):
                client.create_flow_run_from_deployment(client.read_deployment_by_name(REAPER).id)
        raise


@contextmanager
def _assigned_shares(
    config: RunConfig, hosts: list[Host], shares: Shares, nodes: LeasedNodes | None, log: Log
) -> Iterator[Fleet]:
    """Give out the shares of the run; on exit, end them all."""
    with Fleet(config.provision, hosts, shares, nodes, restarts=config.launch.restarts, log=log) as fleet:
        try:
            yield fleet
        except BaseException as error:
            if isinstance(error, Exception):
                if not isinstance(error, LeaseLostError):  # if the lease is lost, another process owns shares and nodes
                    _end(shares, log)
            else:
                if nodes is not None:
                    nodes.hand_over()  # first, as Prefect may be down
                with best_effort():
                    shares.stop()
            raise
        _end(shares, log)


def _end(shares: Shares, log: Log) -> None:
    """End all shares, then give out no more."""
    deadline = time.monotonic() + _END_S
    while not retry("cancel the run's shares", shares.stop, log):
        if time.monotonic() > deadline:
            log(f"some nodes are still running their shares after {_END_S:g} s")
            break
        time.sleep(_POLL_S)
    retry("delete the run's work queues", shares.close, log)


def _watch(
    fleet: Fleet, nodes: LeasedNodes | None, progress: Progress, client: SyncPrefectClient, alerts: Alerts
) -> None:
    """Supervise nodes and shares until the run has ended in order."""
    while not fleet.over:
        time.sleep(_POLL_S)
        if nodes is not None:
            nodes.check()
        with best_effort():
            fleet.reconcile()
            _show_progress(fleet, progress, client)
            if nodes is not None and (spent := nodes.spent()).is_over(fleet.config.budget):
                add_tag(client, fleet.leading.id, f"{FINISH}budget")
                text = f"the nodes have cost ${spent.dollars():.2f}, more than provision.budget"
                alerts.show([Alert(kind="budget", step=0, text=text)])
        if fleet.cancelled or progress.cancel_ignored():
            raise FlowRunCancelled
    deadline = time.monotonic() + _NOTICE_END_S  # the other nodes notice the end by themselves
    while time.monotonic() < deadline and not fleet.ended:
        time.sleep(_POLL_S)
        with best_effort():
            fleet.reconcile()


def _show_progress(fleet: Fleet, progress: Progress, client: SyncPrefectClient) -> None:
    """Show the head node's progress; before it has any, the shares that wait for a node."""
    if shown := newest_artifact(client, UUID(fleet.leading.id), PROGRESS):
        progress.show(float(str(shown.data)), shown.description or "")
        return
    waits = [share.name for share in fleet.shares if share.state.node is None]
    progress.show(0.0, f"waiting for {', '.join(waits)}" if waits else "starting")


def _copy_artifacts(client: SyncPrefectClient, share: str, log: Log) -> None:
    """Copy the head node's artifacts to this flow run."""
    for key in (TRACKING, SUMMARY, RESULT):
        if found := retry(f"read the artifact {key}", partial(newest_artifact, client, UUID(share), key), log):
            its = found.model_dump(include={"key", "type", "data", "description"})
            again = ArtifactCreate(**its, flow_run_id=UUID(flow_run.id))
            retry(f"store the artifact {key}", partial(client.create_artifact, again), log)


def _run_id(config: RunConfig) -> str:
    """The run's id: equal in every attempt of this flow run, so that a retry resumes with its nodes."""
    if not _NAME.fullmatch(config.label):
        raise ConfigError(
            f"name: with provision={config.provision.kind} must be up to 21 lowercase letters, digits, dots and "
            f"hyphens, the first one a letter or digit, got {config.name!r}"
        )
    return f"{config.label}-{flow_run.id[-12:]}"
