"""The evaluator: scores published versions on the held-out prompts during training.

    controller --GET /evaluation--> version -> generation servers -> rollouts of its environment -> POST /evaluations

The evaluator is a client of generation servers like any other, and computes nothing itself. Its tokens are outside the
token ledger. Each version has a file of records and a page in the run's evaluations/. A restarted evaluator resumes the
records.
"""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

import orjson

from areal_core.api.controller_client import ControllerClient
from areal_core.environments.dialogue import stops_by_task
from areal_core.errors import ArealError, RunFinished, UserCodeError
from areal_core.evaluation.sampling import Collector, open_benchmark
from areal_core.evaluation.scores import RecordFile, problem_row, scored, write_page
from areal_core.evaluation.servers import open_servers
from areal_core.launch import heartbeat, logs, process
from areal_core.models.tokenizer import Tokenizer
from areal_core.rewards.pool import open_rewards
from areal_core.storage.rundir import RunDir
from areal_core.tracking.timeline import TimelineWriter
from areal_core.types import Evaluation, PolicyVersion

logger = logging.getLogger(__name__)


class Evaluator:
    """Scores versions of a run on its held-out set. Raises ModelError or StorageError for bad files."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        config = run.config()
        model_path = run.info().model_path
        self._tokenizer = Tokenizer.from_folder(model_path)
        self._benchmark = open_benchmark("heldout", config, self._tokenizer, "", engine=config.evaluation_engine)
        self._stop_token_ids = stops_by_task(config, self._tokenizer, model_path)
        self.rewards = open_rewards(config, model_path, config.rollout.reward_workers)
        self.servers = open_servers(run, config)

    async def score(self, version: PolicyVersion) -> tuple[Evaluation, Path]:
        """The scores of `version`, and the file of a table with one row per problem."""
        start = time.monotonic()
        file = self._run.evaluations / f"v{version.version:06d}-{version.digest[:8]}.jsonl"
        about = {**self._benchmark.about, "model": {"digest": version.digest}}
        with RecordFile(file, about) as records:
            collector = Collector(
                self._benchmark,
                records,
                self._tokenizer,
                self.rewards,
                stop_token_ids=self._stop_token_ids,
                version=version.version,
                on_record=lambda _: heartbeat.progressed(),
            )
            await self.servers.work_on(collector, version)
            await collector.finished()
            found = records.records
        scores = scored(found)
        write_page(file.with_suffix(".html"), f"{self._run.root.name}: version {version.version}", found, scores)
        metrics = scores.metrics()
        evaluation = Evaluation(
            version=version.version,
            digest=version.digest,
            accuracy=metrics.pop("greedy"),
            prompts=len(found),
            no_result=sum(record.greedy.score is None for record in found),
            mean_tokens=metrics.pop("mean_tokens"),
            wall_s=time.monotonic() - start,
            scores={name.replace("greedy", "accuracy"): value for name, value in metrics.items()},
        )
        table = file.with_suffix(".table.json")
        table.write_bytes(orjson.dumps([problem_row(record) for record in found]))
        return evaluation, table


async def evaluate(run: RunDir) -> None:
    """Score the versions that the controller hands out, until there are no more."""
    controller = ControllerClient(run)
    evaluator = Evaluator(run)
    timeline = TimelineWriter(run.timeline_file("evaluator"), cpu=time.process_time)
    process.announce_ready(run.ready_file("evaluator"))
    heartbeat.watch_loop(asyncio.get_running_loop())
    more = True
    try:
        while more:
            try:
                with heartbeat.waiting("controller-0", "no version to score"):
                    version = await asyncio.to_thread(controller.next_evaluation)
            except RunFinished:
                return
            logs.at_step(version.version)
            heartbeat.report(f"version {version.version}: scoring")
            start = time.monotonic()
            evaluation, table = await evaluator.score(version)
            timeline.span("evaluate", start, time.monotonic(), version.version)
            logger.info("version %d: held-out accuracy %.3f", evaluation.version, evaluation.accuracy)
            await asyncio.to_thread(controller.document, "evaluation", version.version, {"file": str(table)})
            more = await asyncio.to_thread(controller.report_evaluation, evaluation)
    finally:
        await evaluator.rewards.close()


def main() -> None:
    run = RunDir.of_command_line()
    logs.start("evaluator")
    process.tie_to_parent(run.ready_file("evaluator"))
    try:
        asyncio.run(evaluate(run))
    except ArealError as error:
        logger.error("%s", error)
        raise SystemExit(process.EXIT_USER_CODE if isinstance(error, UserCodeError) else 1) from None


if __name__ == "__main__":
    main()
