"""The flow `areal-evaluate`: score a model on one or more benchmarks, and report.

    benchmarks -> completions and verdicts -> report

An interrupted evaluation resumes if it is started again: see areal_core.run.evaluation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from prefect import flow, get_run_logger
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from prefect.states import Completed, Failed
from pydantic import Field

from areal_core.config.schema import RunConfig
from areal_core.errors import ArealError
from areal_core.evaluation.scores import problem_row
from areal_core.run import evaluation
from areal_core.run.evaluation import Result
from areal_core.run.folders import tracking_uri
from areal_core.tracking.pages import NOTE, run_page
from flows.compose import benchmark_configs
from flows.page import Progress, show_table, tie_to_worker
from flows.shared import PLACES, PROGRESS, RESULT, Natural, Positive, run_title


@flow(name="areal-evaluate", flow_run_name=lambda: run_title(flow_run.parameters))
def areal_evaluate(
    model: str,
    benchmarks: Annotated[list[str], Field(min_length=1)],
    samples: Positive | None = None,
    seed: Natural | None = None,
    name: str | None = None,
    reference: str | None = None,
    overrides: list[str] = [],  # noqa: B006 - Prefect shows the default in its form
) -> State:
    """Score a model on benchmarks: greedy and sampled completions of every problem, verdicts, and scores.

    Args:
        model: A model folder, a GGUF file, or the name of a run, for its final model.
        benchmarks: Files of conf/task, for their held-out prompts; name=path for prompts in a file.
        samples: Sampled completions per problem, beside the greedy one. Empty: none; the paper uses 32.
        seed: Random seed of the samples.
        name: Name of the evaluation. An existing one resumes. Empty: derived from the model and the settings.
        reference: Name of an earlier evaluation to compare with, problem by problem.
        overrides: Any other settings, one a line, such as generation=vllm or task.chat.enabled=true."""
    tie_to_worker()
    log = get_run_logger()
    try:
        configs = benchmark_configs(model, benchmarks, samples=samples, seed=seed, overrides=overrides)
        with Progress(PROGRESS) as progress:
            progress.show(0.0, "preparing")

            def show(benchmark: str, done: int, problems: int) -> None:
                share = ([*configs].index(benchmark) + done / problems) / len(configs)
                progress.show(100.0 * share, f"{benchmark}  {done} of {problems} problems")

            results = evaluation.evaluate(configs, name=name, reference=reference, log=log.info, on_progress=show)
        _report(model, results, reference, next(iter(configs.values())))
    except ArealError as error:
        log.error("%s", error)
        return Failed(message=str(error))
    return Completed(message=f"{sum(len(result.records) for result in results)} problems")


def _report(model: str, results: Sequence[Result], reference: str | None, config: RunConfig) -> None:
    rows = [
        {"benchmark": result.benchmark, "figure": figure, "value": value}
        for result in results
        for figure, value in [*result.scores.rows(), *_compared(result, reference)]
    ]
    show_table("the table of scores", rows, key=RESULT, title=f"Scores of {model}")
    places = [{"what": f"{result.benchmark}, page", "value": str(result.page)} for result in results]
    if uri := tracking_uri(config):
        places.append({"what": "tracking", "value": _track(uri, model, results, config)})
    show_table("the links of the evaluation", places, key=PLACES, title="Links")


def _compared(result: Result, reference: str | None) -> list[tuple[str, str]]:
    return [
        (f"{figure} above {reference}", f"{it.value:+.3f} [{it.low:+.3f}, {it.high:+.3f}], p = {it.p_value:.3g}")
        for figure, it in result.differences.items()
    ]


def _track(uri: str, model: str, results: Sequence[Result], config: RunConfig) -> str:
    """Track the evaluation as a run in MLflow; return the address of its page."""
    from areal_core.tracking import mlflow_client  # slow import

    name = results[0].records_file.parent.name
    tags = {
        "mlflow.source.name": "areal-evaluate",
        NOTE: f"`{model}` on {', '.join(result.benchmark for result in results)}",
        "evaluation": name,
        "areal.flow_run_id": flow_run.id,
    }
    about = {result.benchmark: result.about["benchmark"] for result in results}
    inputs = [
        {"name": benchmark, "digest": its["sha256"], "source": str(its["source"]), "context": "evaluation"}
        for benchmark, its in about.items()
    ]
    params = {"model": model, **config.to_dict()}
    run_id = mlflow_client.start_run(uri, config.tracking.experiment, name, tags, params, inputs)
    for result in results:
        metrics = {f"eval/{result.benchmark}/{key}": value for key, value in result.scores.metrics().items()}
        tables = {result.benchmark: [problem_row(record) for record in result.records]}
        files = [result.page, result.records_file]
        mlflow_client.add_to_run(uri, run_id, metrics=metrics, step=0, folder="evaluation", files=files, tables=tables)
    mlflow_client.end_run(uri, run_id, "FINISHED")
    return run_page(uri, mlflow_client.experiment_of(uri, run_id), run_id) or uri
