"""Train, evaluate and compare from Python, and read results as DataFrames.

`areal_core` exports all of it; docs/python.md shows examples.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd

from areal_core.config import schema
from areal_core.config.fields import check_file_name
from areal_core.config.files import configuration
from areal_core.config.schema import RunConfig
from areal_core.errors import ConfigError
from areal_core.run import evaluation, folders, tryout
from areal_core.run.folders import run_folder, with_final_model
from areal_core.run.launcher import execute, read_summary
from areal_core.run.progress import RunProgress
from areal_core.run.tryout import Report
from areal_core.tracking.outbox import curves_of
from areal_core.types import RunSummary

T = TypeVar("T")


def load(source: Mapping[str, Any] | str | Path | None = None, *settings: str) -> RunConfig:
    """Build a configuration from nested values or a YAML file, and settings such as "training.steps=10".

    Fields that are not given have the defaults of `areal train`. Raises ConfigError, one line that names the field.
    """
    if isinstance(source, Mapping):
        return configuration(source, settings)
    return configuration({} if source is None else Path(source), settings)


def train(config: RunConfig, *, name: str | None = None, quiet: bool = False) -> RunSummary:
    """Train one run on this machine and return its summary. A run that exists under this name resumes.

    `quiet` prints nothing. Raises ConfigError and other ArealErrors, and KeyboardInterrupt once the run has stopped.
    """
    progress = RunProgress()
    show: dict[str, Any] = {"log": _silent} if quiet else {"log": progress.log, "on_status": progress.update}
    return execute(config, run_id=name, **show)


def base_model(config: RunConfig, *, quiet: bool = False) -> Path:
    """The folder of the model that a run starts from: the user's, or the built-in one, which is made once.
    Raises ModelError for a model that is missing, unreadable or unsupported."""
    return folders.base_model(config, _silent if quiet else print)


def try_out(config: RunConfig, *, prompts: int = 8, quiet: bool = False) -> Report:
    """Sample the base model, as `areal try` does: one group of rollouts for each of the first training `prompts`.
    Raises ConfigError, ModelError and ProcessError."""
    return _without_loop(lambda: tryout.try_out(config, prompts=prompts, log=_silent if quiet else print))


def evaluate(
    model: str,
    benchmarks: Mapping[str, RunConfig],
    *,
    name: str | None = None,
    reference: str | None = None,
    quiet: bool = False,
) -> pd.DataFrame:
    """Score a model folder, a GGUF file or the final model of a run. Returns one row a benchmark, one column a score.

    `benchmarks` maps a name to the configuration whose held-out prompts are the benchmark. `evaluation.samples` asks
    for samples beside the greedy completion. `reference` names an earlier evaluation; the columns `above/...` hold the
    differences to it. Raises ConfigError, ModelError and ProcessError.
    """
    configs = {
        each: schema.load(with_final_model(replace(config, model=replace(config.model, path=model))).to_dict())
        for each, config in benchmarks.items()
    }
    options: dict[str, Any] = {"name": name, "reference": reference, "log": _silent if quiet else print}
    rows = {
        result.benchmark: {
            **result.scores.metrics(),
            **{f"above/{score}": difference.value for score, difference in result.differences.items()},
        }
        for result in _without_loop(lambda: evaluation.evaluate(configs, **options))
    }
    return pd.DataFrame.from_dict(rows, orient="index")


def compare(
    arms: Mapping[str, RunConfig], *, seeds: Sequence[int] = (1, 2, 3), name: str, quiet: bool = False
) -> pd.DataFrame:
    """Train every arm with every seed, one run after the other. Returns one row a run, with its summary.

    Runs are called NAME.ARM.sSEED; those that have ended are not run again. Runs of one seed are neighbours in time,
    and the arm that goes first changes from seed to seed. `areal compare` adds intervals and a report.
    """
    rows: list[dict[str, Any]] = []
    for place, seed in enumerate(seeds):
        first = place % len(arms)
        for arm in [*arms, *arms][first : first + len(arms)]:
            run = check_file_name("name", f"{name}.{arm}.s{seed}")
            summary = train(replace(arms[arm], seed=seed), name=run, quiet=quiet)
            rows.append({"arm": arm, **_row(summary), "seed": seed})
    return pd.DataFrame(rows)


@dataclass(frozen=True)
class Results:
    """The results of one run."""

    summary: RunSummary | None  # None: the run has not ended in order
    curves: pd.DataFrame  # one row a step, one column a metric; NaN where a step has none

    @property
    def scores(self) -> pd.DataFrame:
        """Held-out scores, one row a scored version; see the metrics `heldout/...`."""
        held_out = self.curves.filter(like="heldout/").dropna(how="all")
        return held_out.rename(columns=lambda column: column.removeprefix("heldout/"))


def results(run: str | RunSummary, config: RunConfig | None = None) -> Results:
    """Read the results of a run by its name or summary. `config` tells its `state_dir`; default: `.areal`.

    Raises ConfigError for a run that does not exist.
    """
    name = check_file_name("run", run if isinstance(run, str) else run.run_id)
    folder = run_folder(config or RunConfig(), name)
    if not folder.root.is_dir():
        raise ConfigError(f"run: there is no run {name} in {folder.root.parent}")
    curves = {key: pd.Series(dict(points)) for key, points in curves_of(folder.outbox, name).items()}
    summary = read_summary(folder) if folder.summary.exists() else None
    return Results(summary, pd.DataFrame(curves).rename_axis("step").sort_index())


def _without_loop(call: Callable[[], T]) -> T:
    """Call in this thread, or in one of its own if this one runs an event loop, as that of a notebook does."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return call()
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(call).result()


def _row(summary: RunSummary) -> dict[str, Any]:
    """The numbers and texts of a summary."""
    return {name: value for name, value in asdict(summary).items() if isinstance(value, str | int | float | None)}


def _silent(_: str) -> None: ...
