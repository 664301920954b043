"""The roles of a run on this machine, as tasks of the flow run that runs here: `areal`, or on a head node `areal-node`.

    prepare -> [ generate | rollout | train | evaluate | track ] -> report

The five run at once, each in a thread of its own that supervises the processes of one role until the run has ended.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from prefect import get_run_logger, task
from prefect.artifacts import create_markdown_artifact, create_table_artifact
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
from flows.page import Alerts, CancelUnheard, Progress, told
from flows.shared import RESULT, SUMMARY, TRACKING

THREADS: Any = ThreadPoolTaskRunner(max_workers=6)  # Prefect's own annotations do not admit it

_ROLES = ("generate", "rollout", "train", "evaluate", "track")  # methods of `core.Run`, and names of tasks
_INTERVAL_S = 2.0  # between two looks
_END_S = 60.0  # for the roles of a run that was stopped


def run_roles(
    run_dir: RunDir,
    progress: Progress,
    log: Callable[[str], None],
    *,
    on_look: Callable[[core.Run], None] = lambda _: None,
) -> RunSummary:
    """All roles of a prepared run, to its end; `on_look` is called with it every two seconds. Raises CancelUnheard, and
    the run's first failure. A run that has ended before says what it said then."""
    if run_dir.summary.exists():
        return core.read_summary(run_dir)
    run, alerts = core.Run(run_dir, log=log), Alerts(run_dir.info().run_id)
    try:
        roles = [supervise.with_options(name=role).submit(run, role) for role in _ROLES]
        while wait(roles, timeout=_INTERVAL_S).not_done:
            on_look(run)
            if status := run.status():
                progress.show(100.0 * status.step / status.steps, describe(status))
                alerts.show(status.alerts)
            if progress.cancelled_unheard():
                run.stop("the flow run was cancelled")
                wait(roles, timeout=_END_S)
                raise CancelUnheard
    finally:
        run.stop("the flow run has ended")  # changes nothing where the run has ended by itself
    return run.report()  # raises the failure, if there was one


def opened(config: RunConfig, run_id: str, progress: Progress, flow_run_id: str | None = None) -> RunDir:
    """`prepare` a run, and show what people see of it from then on."""
    progress.show(0.0, "preparing")
    run_dir = prepare(config, run_id, flow_run_id)
    if page := tracking_page(run_dir.info()):
        progress.link(TRACKING, page, "The run in MLflow, while it goes on")
    return run_dir


@task(cache_policy=NO_CACHE)
def prepare(config: RunConfig, run_id: str, flow_run_id: str | None = None) -> RunDir:
    """Check all that the run needs from outside, make the base model, open the tracking run, write the run's folder.
    `flow_run_id` is the flow run that people know the run by; this one, unless it is said."""
    known_by = flow_run_id or flow_run.id
    page = url_for("flow-run", obj_id=known_by)
    return core.prepare(config, run_id=run_id, flow_run_id=known_by, flow_run_page=page, log=get_run_logger().info)


@task(cache_policy=NO_CACHE)
def supervise(run: core.Run, role: str) -> State | None:
    """Run a role to its end; a failure of the run becomes a Failed task, without a stack that would explain nothing."""
    try:
        getattr(run, role)()
    except ArealError as error:
        return Failed(message=str(error))
    return None


@task(cache_policy=NO_CACHE)
def report(summary: RunSummary, run_dir: RunDir) -> None:
    """The result of the run, as artifacts of the flow run: a table, and a page with links. The run's folder has it in
    any case."""
    rows = result_rows(summary, run_dir.info(), _untracked(run_dir))
    page, title, log = result_markdown(summary.run_id, rows), f"Result of {summary.run_id}", get_run_logger().warning
    told(f"the result in {run_dir.summary}", lambda: create_table_artifact(rows, key=RESULT, description=title), log)
    told(f"the page of {summary.run_id}", lambda: create_markdown_artifact(page, key=SUMMARY), log)


def _untracked(run_dir: RunDir) -> str | None:
    """The items that MLflow has not got, and the command that sends them; None when it has all."""
    info = run_dir.info()
    if info.tracking_uri is None:
        return None
    with contextlib.closing(Outbox(run_dir.outbox, info.run_id)) as outbox:
        waiting = outbox.unsent()
    sends = f"python -m areal_core.tracking --run-dir {run_dir.root} sends them"
    return f"{waiting} items; {sends}" if waiting else None


# ---- the result of a run ----


def result_rows(summary: RunSummary, info: RunInfo, untracked: str | None = None) -> list[dict[str, str]]:
    """Name and value of everything worth knowing at the end; `untracked` is what MLflow has missed."""
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
        rows["not yet tracked"] = untracked
    return [{"what": name, "value": value} for name, value in rows.items()]


def result_markdown(run_id: str, rows: list[dict[str, str]]) -> str:
    """The page of a finished run, with the ways to what it left."""
    lines = "\n".join(f"| {row['what']} | {row['value']} |" for row in rows)
    return f"# {run_id}\n\n| | |\n|---|---|\n{lines}\n"


def tracking_page(info: RunInfo) -> str | None:
    """The address of the run's page in MLflow; None without a server to show it."""
    if info.tracking_uri is None or info.tracking_experiment_id is None or info.tracking_run_id is None:
        return None
    return run_page(info.tracking_uri, info.tracking_experiment_id, info.tracking_run_id)
