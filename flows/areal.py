"""The flow `areal`: one run, from its configuration to its report.

    prepare -> [ generate | rollout | train | evaluate | track ] -> report          on this machine (`flows.roles`)
    provision -> the nodes' shares -> teardown -> bill                              on nodes (`flows.on_nodes`)

Prefect is not on the hot path: tasks are phases, not training steps. Training continues while the Prefect server is
down (`flows.page`). At its end the flow waits for the server, because Prefect's engine fails a flow run that it can't
report.

On cancellation Prefect sends SIGTERM to this process and raises it in the main thread. The flow then stops the run, and
the run's processes end in order. The flow uses no on_cancellation or on_crashed hooks: the worker calls them after this
process has ended, and never if the machine dies. The launcher's ties end the run's processes in every case
(`areal_core.launch.process`). A later attempt can resume the run, because `prepare` adopts its folder.
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
from flows.page import FlowRunCancelled, Progress, tie_to_worker
from flows.roles import THREADS, opened, report, run_roles
from flows.shared import PROGRESS, Experiment, Minutes, Mode, Natural, Positive, Provision, Share, run_title


@flow(name="areal", flow_run_name=lambda: run_title(flow_run.parameters), task_runner=THREADS)
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
    """Train one run: generation, rollout and training run concurrently (async) or in turns (sync).

    Args:
        experiment: File of conf/experiment. It supplies all settings left empty below.
        mode: Generate during training (async), or in turns with it (sync).
        seed: Random seed of prompts, sampling and batch order.
        steps: Training steps; each produces one policy version.
        stop_at_score: Stop once held-out accuracy reaches this value, 0 to 1.
        stop_after_minutes: Stop after this many minutes of training.
        provision: Where to run: this machine (local), given hosts (static), or nodes created on AWS (aws).
        overrides: Any other settings, one a line, such as training.learning_rate=1e-4."""
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
    except FlowRunCancelled:
        return Cancelled(message="The run was cancelled; retry the flow run to resume it.")
    except ArealError as error:
        log.error("%s", error)
        return Failed(message=str(error))


def _run(config: RunConfig, given: Mapping[str, Any], log: Callable[[str], None]) -> RunSummary:
    with Progress(PROGRESS) as progress:
        if config.provision.kind != "local":
            return run_on_nodes(config, given, progress, log)
        # Every attempt of this flow run has the same run id, so Prefect's "Retry" resumes the run.
        run_dir = opened(config, f"{config.label}-{flow_run.id[-12:]}", progress)
        summary = run_roles(run_dir, progress, log)
    report(summary, run_dir)
    return summary
