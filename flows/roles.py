"""Roles of a run on this machine, as tasks of the flow `areal`, or of `areal-node` on a head node.

    prepare -> [ generate | rollout | train | evaluate | track ] -> report

The five roles run concurrently. One thread per role supervises its processes until the run has ended.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from prefect import get_run_logger, task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.futures import wait
from prefect.runtime import flow_run
from prefect.states import Failed
from prefect.task_runners import ThreadPoolTaskRunner
from prefect.utilities.urls import url_for

from areal_core.config.schema import RunConfig
from areal_core.errors import ArealError
from areal_core.run import launcher as core
from areal_core.run.progress import describe, number, significant
from areal_core.storage.rundir import RunDir, RunInfo
from areal_core.tracking.outbox import Outbox
from areal_core.tracking.pages import run_page, table_page
from areal_core.types import RunSummary
from flows.page import Alerts, FlowRunCancelled, Progress, retry, show_table
from flows.shared import RESULT, SUMMARY, TRACKING

THREADS: Any = ThreadPoolTaskRunner(max_workers=6)  # Any: Prefect's annotations reject this runner

_ROLES = ("generate", "rollout", "train", "evaluate", "track")  # methods of `core.Run`, and task names
_INTERVAL_S = 2.0  # interval of progress updates
_END_S = 60.0  # time for the roles of a stopped run to end


def run_roles(
    run_dir: RunDir,
    progress: Progress,
    log: Callable[[str], None],
    *,
    on_poll: Callable[[core.Run], None] = lambda _: None,
) -> RunSummary:
    """Run all roles of a prepared run to its end, and return its summary.

    `on_poll` is called with the run every two seconds. A run that has ended before returns its stored summary. Raises
    FlowRunCancelled, or the run's first failure."""
    if run_dir.summary.exists():
        return core.read_summary(run_dir)
    run, alerts = core.Run(run_dir, log=log), Alerts(run_dir.info().run_id)
    try:
        roles = [supervise.with_options(name=role).submit(run, role) for role in _ROLES]
        while wait(roles, timeout=_INTERVAL_S).not_done:
            on_poll(run)
            if status := run.status():
                progress.show(100.0 * status.step / status.steps, describe(status))
                alerts.show(status.alerts)
            if progress.cancel_ignored():
                run.stop("the flow run was cancelled")
                wait(roles, timeout=_END_S)
                raise FlowRunCancelled
    finally:
        run.stop("the flow run has ended")  # no effect if the run has ended by itself
    return run.report()  # raises the failure, if there was one


def opened(config: RunConfig, run_id: str, progress: Progress, flow_run_id: str | None = None) -> RunDir:
    """Prepare a run, and show its MLflow page as a link."""
    progress.show(0.0, "preparing")
    run_dir = prepare(config, run_id, flow_run_id)
    if page := tracking_page(run_dir.info()):
        progress.link(TRACKING, page, "The run in MLflow")
    return run_dir


@task(cache_policy=NO_CACHE)
def prepare(config: RunConfig, run_id: str, flow_run_id: str | None = None) -> RunDir:
    """Check all requirements, make the base model, open the tracking run, and write the run's folder.

    `flow_run_id` is the flow run that users know the run by; None means this flow run."""
    known_by = flow_run_id or flow_run.id
    page = url_for("flow-run", obj_id=known_by)
    return core.prepare(config, run_id=run_id, flow_run_id=known_by, flow_run_page=page, log=get_run_logger().info)


@task(cache_policy=NO_CACHE)
def supervise(run: core.Run, role: str) -> State | None:
    """Run a role to its end. An ArealError becomes a Failed task without a stack trace."""
    try:
        getattr(run, role)()
    except ArealError as error:
        return Failed(message=str(error))
    return None


@task(cache_policy=NO_CACHE)
def report(summary: RunSummary, run_dir: RunDir) -> None:
    """Show the result as artifacts of the flow run: a table, and a page with links.
    The run's folder has it too."""
    rows = result_rows(summary, run_dir.info(), _untracked(run_dir))
    page, name = result_markdown(summary.run_id, rows), summary.run_id
    show_table(f"the result, which is in {run_dir.summary}", rows, key=RESULT, title=f"Result of {name}")
    retry(f"store the page of {name}", lambda: create_markdown_artifact(page, key=SUMMARY), get_run_logger().warning)


def _untracked(run_dir: RunDir) -> str | None:
    """Number of items not yet sent to MLflow, and the command that sends them; None if all are sent."""
    info = run_dir.info()
    if info.tracking_uri is None:
        return None
    with contextlib.closing(Outbox(run_dir.outbox, info.run_id)) as outbox:
        waiting = outbox.unsent()
    sends = f"send them with `python -m areal_core.tracking --run-dir {run_dir.root}`"
    return f"{waiting} items; {sends}" if waiting else None


# ---- the result of a run ----


def result_rows(summary: RunSummary, info: RunInfo, untracked: str | None = None) -> list[dict[str, str]]:
    """Names and values of the run's result. `untracked` names the items that MLflow lacks."""
    rows = {
        "mode": summary.mode,
        "seed": str(summary.seed),
        "steps": f"{summary.steps} (stop reason: {summary.reason})",
        "held-out accuracy": f"{number(summary.accuracy_before, '.3f')} -> {number(summary.accuracy_after, '.3f')}"
        f" (best {number(summary.best_accuracy, '.3f')})",
        "wall time": f"{summary.rl_wall_s:.1f} s",
        "time to score": number(summary.time_to_score_s, ".1f", " s"),
        "effective throughput": f"{significant(summary.effective_tokens_per_s)} tokens/s",
        "generated throughput": f"{significant(summary.generated_tokens_per_s)} tokens/s",
        "staleness": f"mean {summary.staleness_mean:.2f}, max {summary.staleness_max}",
        "truncated completions": number(summary.truncated, ".1%"),
        "zero-variance groups": number(summary.zero_variance, ".1%"),
        "alerts": "; ".join(summary.alerts) or "-",
        "tokens": str(summary.tokens),
        "bottleneck": summary.bound or "-",
        "model": summary.model_url,
        "checkpoints": info.checkpoint_url,
        "tracking": tracking_page(info) or info.tracking_uri or "off",
    }
    uri, experiment = info.tracking_uri, info.tracking_experiment_id
    if uri and experiment and (table := table_page(uri, experiment)):
        rows["table of runs"] = table
    if summary.emulated is not None:
        rows = {"emulated": summary.emulated, **rows}
    if untracked:
        rows["not in MLflow yet"] = untracked
    return [{"what": name, "value": value} for name, value in rows.items()]


def result_markdown(run_id: str, rows: list[dict[str, str]]) -> str:
    """Page of a finished run, with links to its model, checkpoints and tracking."""
    lines = "\n".join(f"| {row['what']} | {row['value']} |" for row in rows)
    return f"# {run_id}\n\n| | |\n|---|---|\n{lines}\n"


def tracking_page(info: RunInfo) -> str | None:
    """Address of the run's page in MLflow; None without an MLflow server."""
    if info.tracking_uri is None or info.tracking_experiment_id is None or info.tracking_run_id is None:
        return None
    return run_page(info.tracking_uri, info.tracking_experiment_id, info.tracking_run_id)
