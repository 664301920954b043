"""The flow `areal`: one run, from its configuration to its report.

    prepare -> [ generate | rollout | train | evaluate | track ] -> report

The five in the middle run at once, each in a thread of its own that supervises the processes of one role until the run
has ended. Prefect is not on the hot path: tasks are phases, not training steps, and a Prefect server that goes away
stops nothing that trains: `flows.page` says what becomes of the view. At the end the flow waits for it, with nothing
left to run, because Prefect's engine fails what it can't report.

Cancelling sends this process SIGTERM, which Prefect raises in the main thread; the run is told to stop and its
processes end in order. There are no on_cancellation or on_crashed hooks: the worker runs them after this process has
gone, and not at all when the machine dies, so nothing may depend on them. What ends the processes of a run however this
one goes is their own tie to it (`areal_core.launch.process`); what frees a run to go on is that `prepare` adopts its
folder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import signal
from collections.abc import Callable
from typing import Any
from uuid import UUID

from prefect import flow, get_client, get_run_logger, task
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import FlowRunPolicy, State
from prefect.futures import wait
from prefect.runtime import deployment, flow_run
from prefect.states import Cancelled, Failed
from prefect.task_runners import ThreadPoolTaskRunner
from prefect.utilities.urls import url_for

from areal_core.config.schema import RunConfig
from areal_core.errors import ArealError
from areal_core.launch.process import die_with_parent
from areal_core.run import launcher as core
from areal_core.run.progress import describe
from areal_core.storage.rundir import RunDir
from areal_core.tracking.outbox import Outbox
from areal_core.types import RunSummary
from flows.alerts import Alerts
from flows.compose import configure
from flows.page import CancelUnheard, Progress, told
from flows.run_result import result_markdown, result_rows, tracking_page
from flows.shared import (
    HOPELESS,
    PROGRESS,
    RESULT,
    TRACKING,
    Experiment,
    Minutes,
    Mode,
    Natural,
    Positive,
    Share,
    run_title,
)

SUMMARY = "areal-summary"  # key of an artifact

_RETRIES = 1  # of the flow, after the restarts of its processes are spent; it resumes the same run
_PROGRESS_INTERVAL_S = 2.0
_END_S = 60.0  # for the roles of a run that was stopped
_ROLE_THREADS: Any = ThreadPoolTaskRunner(max_workers=6)  # Prefect's own annotations do not admit it


@flow(
    name="areal",
    flow_run_name=lambda: run_title(flow_run.parameters),
    retries=_RETRIES,
    task_runner=_ROLE_THREADS,
)
def areal(
    experiment: Experiment = "cpu-async",
    mode: Mode | None = None,
    seed: Natural | None = None,
    steps: Positive | None = None,
    stop_at_score: Share | None = None,
    stop_after_minutes: Minutes | None = None,
    overrides: list[str] = [],  # noqa: B006 - Prefect shows the default in its form
) -> dict[str, Any] | State:
    """One training run of AReaL: generation, rollout and training side by side, or in turns.

    Args:
        experiment: A file of conf/experiment. What is left empty below is as the experiment says.
        mode: Generate beside training (async), or in turns with it (sync).
        seed: Of prompts, sampling and the order of batches.
        steps: Training steps; each makes one policy version.
        stop_at_score: Stop once the accuracy on held-out prompts has reached this share, 0 to 1.
        stop_after_minutes: Stop after so many minutes of training.
        overrides: Any other setting, one a line, as training.learning_rate=1e-4.
    """
    if deployment.id is not None:
        die_with_parent(signal.SIGTERM)  # the worker; without it nobody could cancel this run
    log = get_run_logger()
    try:
        config = configure(experiment, mode, seed, steps, stop_at_score, stop_after_minutes, overrides)
        return dataclasses.asdict(_run(config, log.info))
    except CancelUnheard:
        return Cancelled(message="The run was stopped; it can be resumed.")
    except ArealError as error:
        log.error("%s", error)
        if isinstance(error, HOPELESS):
            told("that the run is not to be tried again", _forbid_retry, log.warning)
        elif (told("how the run failed", _attempts, log.warning) or 0) <= _RETRIES:
            raise  # Prefect calls this function again
        return Failed(message=str(error))


def _run(config: RunConfig, log: Callable[[str], None]) -> RunSummary:
    with Progress(PROGRESS) as progress:
        progress.show(0.0, "preparing")
        # The same id in every attempt of this flow run, hence a retry resumes.
        run_dir = prepare(config, run_id=f"{config.label}-{flow_run.id[-12:]}")
        if page := tracking_page(run_dir.info()):
            progress.link(TRACKING, page, "The run in MLflow, while it goes on")
        summary = core.read_summary(run_dir) if run_dir.summary.exists() else _run_roles(run_dir, progress, log)
    report(summary, run_dir)
    return summary


def _run_roles(run_dir: RunDir, progress: Progress, log: Callable[[str], None]) -> RunSummary:
    run, alerts = core.Run(run_dir, log=log), Alerts(run_dir.info().run_id)
    try:
        roles = [role.submit(run) for role in (generate, rollout, train, evaluate, track)]
        while wait(roles, timeout=_PROGRESS_INTERVAL_S).not_done:
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


@task(cache_policy=NO_CACHE)
def prepare(config: RunConfig, run_id: str) -> RunDir:
    """Check all that the run needs from outside, make the base model, open the tracking run, write the run's folder."""
    page = url_for("flow-run", obj_id=flow_run.id)
    return core.prepare(config, run_id=run_id, flow_run_id=flow_run.id, flow_run_page=page, log=get_run_logger().info)


@task(cache_policy=NO_CACHE)
def generate(run: core.Run) -> State | None:
    """Generation servers: sample completions, load every new policy version."""
    return _supervised(run.generate)


@task(cache_policy=NO_CACHE)
def rollout(run: core.Run) -> State | None:
    """The controller: admits prompts within the staleness bound, has completions scored, serves batches."""
    return _supervised(run.rollout)


@task(cache_policy=NO_CACHE)
def train(run: core.Run) -> State | None:
    """The trainer: one policy version a batch, and checkpoints."""
    return _supervised(run.train)


@task(cache_policy=NO_CACHE)
def evaluate(run: core.Run) -> State | None:
    """The evaluator: scores published versions on held-out prompts."""
    return _supervised(run.evaluate)


@task(cache_policy=NO_CACHE)
def track(run: core.Run) -> State | None:
    """The tracker: forwards metrics to MLflow."""
    return _supervised(run.track)


@task(cache_policy=NO_CACHE)
def report(summary: RunSummary, run_dir: RunDir) -> None:
    """The result of the run, as artifacts of the flow run: a table, and a page with links. The run's folder has it in
    any case."""
    rows = result_rows(summary, run_dir.info(), _untracked(run_dir))
    page, title, log = result_markdown(summary.run_id, rows), f"Result of {summary.run_id}", get_run_logger().warning
    told(f"the result in {run_dir.summary}", lambda: create_table_artifact(rows, key=RESULT, description=title), log)
    told(f"the page of {summary.run_id}", lambda: create_markdown_artifact(page, key=SUMMARY), log)


def _untracked(run_dir: RunDir) -> str | None:
    """What MLflow has not got: items that wait, with the command that sends them, and items that it refuses; None when
    it has all."""
    info = run_dir.info()
    if info.tracking_uri is None:
        return None
    with contextlib.closing(Outbox(run_dir.outbox, info.run_id)) as outbox:
        waiting, refused = outbox.unsent(), outbox.refusals()
    missing: list[str] = []
    if waiting:
        missing.append(f"{waiting} items; python -m areal_core.tracking --run-dir {run_dir.root} sends them")
    if refused:
        missing.append(f"{len(refused)} items that MLflow refuses, as {refused[0]}")
    return "; ".join(missing) or None


def _supervised(role: Callable[[], None]) -> State | None:
    """Run a role to its end; a failure of the run becomes a Failed task, without a stack that would explain nothing."""
    try:
        role()
    except ArealError as error:
        return Failed(message=str(error))
    return None


def _attempts() -> int:
    """How often this flow run was started; the runtime context only has the number of its first start."""
    with get_client(sync_client=True) as client:
        return client.read_flow_run(UUID(flow_run.id)).run_count


def _forbid_retry() -> None:
    with get_client(sync_client=True) as client:
        policy = FlowRunPolicy(retries=0, retry_delay=0)
        client.update_flow_run(UUID(flow_run.id), empirical_policy=policy)
