"""The flow `areal-compare`: train arms times seeds of one experiment in turns, and report.

    plan -> track -> trial, trial, trial, ... -> report

`plan` finds all errors in the settings first. A trial is an ordinary run in this process, and a task. A failed trial is
retried once, unless its error is permanent; the comparison continues without it. Finished trials are not run again, and
interrupted ones resume. So a comparison with an existing name continues.

On cancellation Prefect sends SIGTERM to this process and raises it in the main thread, where trials run. The
comparison's MLflow run is marked as killed, and the run's processes end in order. flows.areal explains why there are
no hooks.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from prefect import Task, flow, get_run_logger, task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.runtime import flow_run
from prefect.states import Completed, Failed
from pydantic import Field

from areal_core.errors import ArealError, TrackingError, one_line
from areal_core.run import launcher as core
from areal_core.run.progress import describe
from areal_core.types import RunStatus
from flows.comparison.design import DEFAULT_ARMS, Comparison, Trial, generated_name, read_comparison
from flows.comparison.report import metrics, report_page, result_table, result_title, trial_table
from flows.comparison.trials import load_result, run_trial
from flows.page import Progress, retry, show_table, tie_to_worker
from flows.shared import FATAL_ERRORS, PLACES, PROGRESS, RESULT, Experiment, Natural, run_title

if TYPE_CHECKING:
    from areal_core.tracking.outbox import EndStatus
    from flows.comparison.parent import Parent

COMPARISON = "areal-comparison"  # artifact key

_RETRIES = 1  # retries of a trial whose restart budget is spent; a retry resumes the run
_DELAY_S = 30.0  # delay of a retry: MLflow, which a trial needs to start, may be back
_PROGRESS_INTERVAL_S = 2.0


@flow(name="areal-compare", flow_run_name=lambda: run_title(flow_run.parameters))
def areal_compare(
    experiment: Experiment = "cpu-async",
    arms: dict[str, list[str]] = DEFAULT_ARMS,
    seeds: Annotated[list[Natural], Field(min_length=1)] = [1, 2, 3],  # noqa: B006 - Prefect shows the default in its form
    overrides: list[str] = [],  # noqa: B006
    name: str | None = None,
    matched: bool = True,
) -> State:
    """Compare settings: train every arm with every seed, in turns, and report the differences.

    Args:
        experiment: File of conf/experiment, for all arms that name none.
        arms: Settings of each arm by its name, such as {"sync": ["mode=sync"]}. experiment=NAME selects another file of
            conf/experiment. The first arm is the reference.
        seeds: Every arm runs with each seed. Six or more seeds give intervals of 95 %.
        overrides: Any other settings of all arms, one a line, such as training.steps=50.
        name: Name of the comparison: letters, digits and dashes. An existing name continues that comparison: same
            settings, and the arms and seeds of this form, defaults included, are added. Empty: a new comparison.
        matched: True: arms must have the same prompts, model and evaluation. False: arms may differ in anything."""
    tie_to_worker()
    # Every attempt of this flow run has the same name, so Prefect's "Retry" resumes the comparison.
    name = name or generated_name(experiment, flow_run.id[-12:])
    try:
        asked = Comparison(
            name=name, experiment=experiment, arms=arms, seeds=seeds, overrides=overrides, matched=matched
        )
        with Progress(PROGRESS) as shown:
            return _run_trials(asked, _Progress(name, shown))
    except ArealError as error:
        get_run_logger().error("%s", error)
        return Failed(message=str(error))


def _run_trials(asked: Comparison, progress: _Progress) -> State:
    comparison, trials = plan(asked)
    parent = track(comparison, trials)
    status: EndStatus = "KILLED"
    try:
        failures = _run_all(comparison, trials, parent, progress)
        report(comparison, trials, failures, parent)
        status = "FAILED" if failures else "FINISHED"
    except Exception:  # a request to end is no Exception, so the status stays KILLED
        status = "FAILED"
        raise
    finally:
        _end(parent, status)
    if failures:
        failed = [each for each in trials if each.run_id in failures]
        named = "; ".join(f"{each.arm} seed {each.seed}: {failures[each.run_id]}" for each in failed)
        said = f"{len(failed)} of {len(trials)} trials failed: {named}; the report compares the others"
        return Failed(message=said)
    return Completed(message=f"{len(trials)} trials")


def _run_all(comparison: Comparison, trials: list[Trial], parent: Parent | None, progress: _Progress) -> dict[str, str]:
    """Run all trials; return the reasons of failed trials by run id."""
    tags = {"comparison": comparison.name, **({"mlflow.parentRunId": parent.run_id} if parent else {})}
    on_stop = partial(_end, parent, "KILLED")  # at once: Prefect kills this process 30 s after a cancellation
    failures: dict[str, str] = {}
    for before, planned in enumerate(trials):
        progress.begin(planned, before, len(trials), len(failures))
        state = trial(planned, tags, progress, on_stop, return_state=True)
        if not state.is_completed():
            failures[planned.run_id] = one_line(state.message)
    progress.show_text(100.0, "reporting")
    return failures


def _end(parent: Parent | None, status: EndStatus) -> None:
    if parent is not None:
        with _log_tracking_errors():
            parent.end(status)


@task(cache_policy=NO_CACHE)
def plan(asked: Comparison) -> tuple[Comparison, list[Trial]]:
    """Find all errors before any trial starts, and merge with an existing comparison of this name."""
    known = read_comparison(asked.folder())
    comparison = asked.continuing(known) if known else asked
    trials = comparison.trials()
    to_run = {planned.arm: planned.config for planned in trials if not _has_ended(planned)}
    for config in to_run.values():  # one per arm: the seed changes no requirement
        core.preflight(config)
    comparison.write()
    done = sum(map(_has_ended, trials))
    get_run_logger().info("comparison %s: %d trials, %d of them finished before", asked.name, len(trials), done)
    return comparison, trials


@task(cache_policy=NO_CACHE)
def track(comparison: Comparison, trials: list[Trial]) -> Parent | None:
    """Open or resume the comparison's MLflow run; the runs of the trials become its children."""
    from flows.comparison.parent import open_parent  # slow import

    return open_parent(comparison, trials, {"areal.flow_run_id": flow_run.id})


def _should_retry(_task: Task[..., Any], _task_run: TaskRun, state: State[Any]) -> bool:
    """Whether Prefect should retry a failed trial.
    `state` contains the state that the trial returned, with its error."""
    error = state.data.data if isinstance(state.data, State) else state.data  # a bare error comes from a bug
    return isinstance(error, TrackingError) or (isinstance(error, ArealError) and not isinstance(error, FATAL_ERRORS))


@task(
    cache_policy=NO_CACHE,
    task_run_name="{planned.arm} seed {planned.seed}",
    retries=_RETRIES,
    retry_delay_seconds=_DELAY_S,
    retry_condition_fn=_should_retry,
)
def trial(planned: Trial, tags: Mapping[str, str], progress: _Progress, on_stop: Callable[[], None]) -> State:
    """Run one trial, from its base model to its summary."""
    ended_before = _has_ended(planned)
    result = run_trial(planned, tags=tags, log=get_run_logger().info, on_status=progress.show, on_stop=on_stop)
    if result.failure is not None:
        return Failed(message=result.failure, data=result.error)
    return Completed(message="finished before, not repeated" if ended_before else None)


@task(cache_policy=NO_CACHE)
def report(comparison: Comparison, trials: list[Trial], failures: dict[str, str], parent: Parent | None) -> None:
    """Write the results to the comparison's folder, to MLflow, and to artifacts of the flow run."""
    results = [load_result(planned, failures.get(planned.run_id)) for planned in trials]
    folder = comparison.folder()
    page = report_page(comparison.name, comparison.arms, results)
    (folder / "report.md").write_text(page, encoding="utf-8")
    places = {"report": str(folder / "report.md")}
    if parent is not None:
        places |= parent.places(trials)
        done = len(trials) - len(failures)
        with _log_tracking_errors():
            parent.add(metrics(comparison.arms, results), done, [folder / "plan.json", folder / "report.md"])
    table = result_table(comparison.arms, results) if comparison.matched else trial_table(results)
    title = result_title(comparison.name, comparison.arms, results)
    rows = [{"what": what, "value": value} for what, value in places.items()]
    show_table(f"the table of {folder / 'report.md'}", table, key=RESULT, title=title)
    show_table(f"the links of {comparison.name}", rows, key=PLACES)
    create_page = partial(create_markdown_artifact, page, key=COMPARISON)
    retry(f"store the page of {comparison.name}", create_page, get_run_logger().warning)


class _Progress:
    """Progress of all trials, shown on the flow run's page."""

    def __init__(self, comparison: str, shown: Progress) -> None:
        self._comparison = comparison
        self._shown = shown
        self._shown_at = 0.0
        self.show_text(0.0, "planning")

    def begin(self, planned: Trial, before: int, trials: int, failed: int) -> None:
        """Show that a trial begins, after `before` finished trials."""
        failures = f", {failed} failed" if failed else ""
        self._before, self._trials = before, trials
        self._trial = f"trial {before + 1} of {trials}{failures}: {planned.arm} seed {planned.seed}"
        self.show_text(100.0 * before / trials, f"{self._trial} · starting")

    def show(self, status: RunStatus) -> None:
        """Show the progress of the current trial, at most every two seconds."""
        if time.monotonic() - self._shown_at >= _PROGRESS_INTERVAL_S:
            done = self._before + status.step / status.steps
            self.show_text(100.0 * done / self._trials, f"{self._trial} · {describe(status)}")

    def show_text(self, percent: float, text: str) -> None:
        self._shown.show(percent, f"{self._comparison}: {text}")
        self._shown_at = time.monotonic()


@contextlib.contextmanager
def _log_tracking_errors() -> Iterator[None]:
    """Log a TrackingError: if MLflow is down, the comparison continues untracked."""
    try:
        yield
    except TrackingError as error:
        get_run_logger().warning("MLflow: could not record the comparison: %s", error)


def _has_ended(planned: Trial) -> bool:
    return core.run_folder(planned.config, planned.run_id).summary.exists()
