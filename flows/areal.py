"""The flow `areal`: one run, from its configuration to its report.

    prepare -> [ generate | rollout | train | evaluate | track ] -> report          on this machine (`flows.roles`)
    provision -> the nodes' shares -> teardown -> bill                              on nodes (`flows.on_nodes`)

Prefect is not on the hot path: tasks are phases, not training steps, and a Prefect server that goes away
stops nothing that trains: `flows.page` says what becomes of the view. At the end the flow waits for it, with nothing
left to run, because Prefect's engine fails what it can't report.

Cancelling sends this process SIGTERM, which Prefect raises in the main thread; the run is told to stop and its
processes end in order. There are no on_cancellation or on_crashed hooks: the worker runs them after this process has
gone, and not at all when the machine dies, so nothing may depend on them. What ends the processes of a run however this
one goes is their own tie to it (`areal_core.launch.process`); what frees a run to go on is that `prepare` adopts its
folder.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from prefect import flow, get_run_logger
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from prefect.states import Cancelled, Failed

from areal_core.config.schema import RunConfig
from areal_core.errors import ArealError
from areal_core.types import RunSummary
from flows.compose import configure
from flows.on_nodes import run_on_nodes
from flows.page import CancelUnheard, Progress, tie_to_worker
from flows.roles import THREADS, opened, report, run_roles
from flows.shared import PROGRESS, Experiment, Minutes, Mode, Natural, Positive, Provision, Share, run_title


@flow(
    name="areal",
    flow_run_name=lambda: run_title(flow_run.parameters),
    task_runner=THREADS,
)
def areal(
    experiment: Experiment = "cpu-async",
    mode: Mode | None = None,
    seed: Natural | None = None,
    steps: Positive | None = None,
    stop_at_score: Share | None = None,
    stop_after_minutes: Minutes | None = None,
    provision: Provision | None = None,
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
        provision: Where it runs: on this machine (local), on given hosts (static), or on nodes that are made (aws).
        overrides: Any other setting, one a line, as training.learning_rate=1e-4.
    """
    tie_to_worker()
    log = get_run_logger()
    given = {
        "experiment": experiment,
        "mode": mode,
        "seed": seed,
        "steps": steps,
        "stop_at_score": stop_at_score,
        "stop_after_minutes": stop_after_minutes,
        "overrides": [*([f"provision={provision}"] if provision else []), *overrides],
    }
    try:
        config = configure(**given)
        return dataclasses.asdict(_run(config, given, log.info))
    except CancelUnheard:
        return Cancelled(message="The run was stopped; it can be resumed.")
    except ArealError as error:
        log.error("%s", error)
        return Failed(message=str(error))


def _run(config: RunConfig, given: Mapping[str, Any], log: Callable[[str], None]) -> RunSummary:
    with Progress(PROGRESS) as progress:
        if config.provision.kind != "local":
            return run_on_nodes(config, given, progress, log)
        # The same id in every attempt of this flow run, hence Prefect's "Retry" resumes.
        run_dir = opened(config, f"{config.label}-{flow_run.id[-12:]}", progress)
        summary = run_roles(run_dir, progress, log)
    report(summary, run_dir)
    return summary
