"""Run the trials of a comparison, and read their results from their folders."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from areal_core.errors import ArealError, one_line
from areal_core.run import launcher as core
from areal_core.run.folders import Log
from areal_core.storage.rundir import RunDir
from areal_core.tracking.outbox import curves_of
from areal_core.types import RunStatus, RunSummary
from flows.comparison.design import Trial, differences

Execute = Callable[..., RunSummary]  # `areal_core.run.launcher.execute`
Curves = dict[str, list[tuple[int, float]]]  # metric key -> (step, value), by step

_MAY_DIFFER = r"state_dir|(storage|tracking)\..*"  # fields that may differ from the plan: locations


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """Result of a trial. Exactly one of `summary` and `failure` is None."""

    trial: Trial
    summary: RunSummary | None
    failure: str | None  # one line
    curves: Curves  # up to the failure, if it failed
    error: ArealError | None = None  # error that has just ended the run; its type decides about a retry


def run_trial(
    trial: Trial,
    *,
    tags: Mapping[str, str] | None = None,
    log: Log,
    on_status: Callable[[RunStatus], None] | None = None,
    on_stop: Callable[[], object] = list,
    execute: Execute = core.execute,
) -> TrialResult:
    """Run a trial to its end, and return its result. `tags` go to its tracking run, beside its arm.

    A failed run becomes a failed result, not an error. A trial that has ended is not run again. An interrupted or
    failed trial resumes."""
    try:
        labels = {"arm": trial.arm, **(tags or {})}
        execute(trial.config, run_id=trial.run_id, tags=labels, log=log, on_status=on_status, on_stop=on_stop)
    except ArealError as error:
        return replace(load_result(trial, str(error)), error=error)
    return load_result(trial)


def load_result(trial: Trial, failure: str | None = None) -> TrialResult:
    """Read the result of a trial from its folder; `failure` is the reason of its failure, if known.

    A run whose configuration differs from the plan counts as failed, because its numbers belong to another experiment.
    """
    run = core.run_folder(trial.config, trial.run_id)
    failure = _not_as_planned(trial, run) if failure is None else one_line(failure)
    summary = core.read_summary(run) if failure is None else None
    return TrialResult(trial=trial, summary=summary, failure=failure, curves=curves_of(run.outbox, trial.run_id))


def _not_as_planned(trial: Trial, run: RunDir) -> str | None:
    if not run.summary.exists():
        return "the run has not finished: it has no summary"
    try:
        made = run.config()
    except ArealError as error:  # written by another version of this program
        return f"can't read the configuration of the finished run {trial.run_id}: {error}"
    for name, planned, known in differences(trial.config, made):
        if not re.fullmatch(_MAY_DIFFER, name):
            return f"{name}: must be {planned!r} as planned, but the finished run {trial.run_id} has {known!r}"
    return None
