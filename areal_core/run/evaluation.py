"""Evaluate a model on one or several benchmarks, with generation servers of the evaluation's own.

    one configuration per benchmark --> servers, started once --> one file of records per benchmark --> scores

A benchmark is the held-out set of a task. Its records are in <state_dir>/evaluations/<name>/<benchmark>.jsonl.
Interrupted evaluations resume. Evaluating a complete one again gives the same scores.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_core.config.fields import check_file_name
from areal_core.config.schema import RunConfig
from areal_core.environments.dialogue import stops_by_task
from areal_core.errors import ConfigError
from areal_core.evaluation.sampling import Benchmark, Collector, open_benchmark
from areal_core.evaluation.scores import Record, RecordFile, Scores, compared, read_records, scored, write_page
from areal_core.evaluation.servers import OwnServers
from areal_core.evaluation.statistics import Difference
from areal_core.launch.supervisor import FileLock, StopSignal, Supervisor
from areal_core.models.tokenizer import Tokenizer
from areal_core.rewards.pool import open_rewards
from areal_core.run.folders import Log, base_model
from areal_core.run.preflight import preflight
from areal_core.run.roles import role_specs
from areal_core.storage.rundir import RunDir, RunInfo, write_json
from areal_core.storage.weights import base_version

_WORKERS = 4  # reward workers, which run environments; fewer on a machine with fewer cores
_OWNER_S = 20.0  # time for the servers of a killed evaluation to end

Progress = Callable[[str, int, int], None]  # benchmark, problems recorded, problems


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of one benchmark: its scores, records and files."""

    benchmark: str
    scores: Scores
    records: tuple[Record, ...]
    differences: Mapping[str, Difference]  # score minus that of the reference evaluation; empty without a reference
    about: Mapping[str, Any]  # the model, the task and the sampling settings
    records_file: Path
    page: Path


def evaluate(
    configs: Mapping[str, RunConfig],
    *,
    name: str | None = None,
    reference: str | None = None,
    prompts: int | None = None,
    log: Log = print,
    on_progress: Progress = lambda benchmark, done, problems: None,
) -> list[Result]:
    """Evaluate one model on several benchmarks and return one result per benchmark.

    `configs` maps the name of each benchmark to its configuration; all of them name the same model. `name` identifies
    the evaluation: records of an earlier evaluation with this name are reused. `reference` names another evaluation to
    compare with, problem by problem. With `prompts` the problems are so many training prompts, not the held-out set.

    Raises ConfigError, ModelError and others as `preflight` does, and ProcessError for servers that fail.
    """
    if not configs:
        raise ConfigError("benchmarks: must name at least one")
    for field, each in (("name", name), ("reference", reference), *(("benchmarks", each) for each in configs)):
        if each is not None:
            check_file_name(field, each)
    if reference is not None:
        for benchmark, config in configs.items():
            if not _records_file(config, reference, benchmark).exists():
                raise ConfigError(f"reference: must be an earlier evaluation of {benchmark}, got {reference!r}")
    for config in configs.values():
        preflight(config, log)
    served = max(configs.values(), key=lambda config: config.task.max_prompt_tokens + config.task.max_new_tokens)
    folder = base_model(served, log)
    weights = base_version(str(folder)).digest
    tokenizer = Tokenizer.from_folder(folder)
    benchmarks = [
        open_benchmark(each, config, tokenizer, weights, engine=config.generation.engine, prompts=prompts)
        for each, config in configs.items()
    ]
    info = RunInfo(
        run_id=name or _name(folder, served, benchmarks), model_path=str(folder), checkpoint_url=served.storage.url
    )
    run = RunDir.create(served, info, kind="evaluations")
    busy = f"name: {info.run_id} is already running; wait for its end or choose another name"
    with FileLock(run.launcher_lock, timeout_s=_OWNER_S, busy=busy):
        its = _Evaluation(run=run, tokenizer=tokenizer, reference=reference, log=log, on_progress=on_progress)
        return asyncio.run(its.results(benchmarks))


@dataclass(frozen=True, kw_only=True)
class _Evaluation:
    """One evaluation, in the folder `run`."""

    run: RunDir
    tokenizer: Tokenizer
    reference: str | None
    log: Log
    on_progress: Progress

    async def results(self, benchmarks: list[Benchmark]) -> list[Result]:
        """Complete the records of each benchmark, and score them. Raises the errors of the sampling and the servers."""
        self.run.forget_ready()
        results: list[Result] = []
        stop, servers = StopSignal(), None  # the servers start when the first benchmark needs them
        try:
            for benchmark in benchmarks:
                with RecordFile(self.run.root / f"{benchmark.name}.jsonl", benchmark.about) as records:
                    if len(records) < len(benchmark.problems):
                        servers = servers or asyncio.ensure_future(asyncio.to_thread(self._supervise, stop))
                        await self._complete(servers, records, benchmark)
                    results.append(self._result(benchmark, records))
        finally:
            stop.set()
            if servers is not None:
                await asyncio.wait([servers])
        return results

    def _result(self, benchmark: Benchmark, records: RecordFile) -> Result:
        found, page = tuple(records.records), records.path.with_suffix(".html")
        scores = scored(found)
        write_json(records.path.with_suffix(".scores.json"), dataclasses.asdict(scores))
        write_page(page, f"{self.run.root.name}: {benchmark.name}", found, scores)
        differences: Mapping[str, Difference] = {}
        if self.reference is not None:
            differences = compared(found, read_records(_records_file(benchmark.config, self.reference, benchmark.name)))
        return Result(
            benchmark=benchmark.name,
            scores=scores,
            records=found,
            differences=differences,
            about=benchmark.about,
            records_file=records.path,
            page=page,
        )

    async def _complete(self, supervised: asyncio.Future[None], records: RecordFile, benchmark: Benchmark) -> None:
        """Sample all problems without records."""
        config, model_path = benchmark.config, self.run.info().model_path
        rewards = open_rewards(config, model_path, min(_WORKERS, len(os.sched_getaffinity(0))))
        collector = Collector(
            benchmark,
            records,
            self.tokenizer,
            rewards,
            stop_token_ids=stops_by_task(config, self.tokenizer, model_path),
            on_record=lambda done: self.on_progress(benchmark.name, done, len(benchmark.problems)),
        )
        count, completions = self.run.config().generation_servers, config.completions_per_server
        servers = OwnServers(self.run, config, role="generation", count=count, completions=completions)
        working = asyncio.ensure_future(servers.work_on(collector, base_version(model_path)))
        try:
            await asyncio.wait((working, supervised), return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                supervised.result()
            await working
            await collector.finished()
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
            await rewards.close()

    def _supervise(self, stop: StopSignal) -> None:
        """Supervise the generation servers in a thread until `stop` is set."""
        config = self.run.config()
        spec = role_specs(self.run, config, sorted(os.sched_getaffinity(0)))["generation"]
        Supervisor(self.run, spec, config.launch, stop=stop, log=self.log).run()


def _records_file(config: RunConfig, name: str, benchmark: str) -> Path:
    return Path(config.state_dir).absolute() / "evaluations" / name / f"{benchmark}.jsonl"


def _name(folder: Path, config: RunConfig, benchmarks: list[Benchmark]) -> str:
    """Name the evaluation after its model and its settings, so that the same evaluation resumes by itself."""
    path = Path(config.model.path or "embedded")
    model = path.parent.name if path.name == "final" else path.stem  # the final model of a run: use the run's name
    digest = hashlib.sha256(repr([benchmark.about for benchmark in benchmarks]).encode()).hexdigest()
    return f"{re.sub(r'[^A-Za-z0-9]+', '-', model)[:100].strip('-') or 'model'}-{digest[:8]}"
