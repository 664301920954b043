"""The controller's process: an HTTP server around the rollout core.

    trainer --GET /batch, /groups; POST /versions, /metrics, /checkpoints, /finish--> here
    evaluator --GET /evaluation; POST /evaluations--> here
    reward workers of other machines --WebSocket /rewards--> here
    launcher --POST /servers; GET /status--> here --generate, pause, update, resume--> generation servers

The process exits with status 0 once the trainer has finished, the last version is scored and summary.json is written.
A stopped run also exits with 0, without a summary, once its trainer has saved the last step. If the token ledger does
not balance, the process exits with EXIT_FINAL and no summary.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import logging
import signal
import time
from pathlib import Path

from areal_core.api import serving
from areal_core.api.scored_groups import REQUEST_LINE_BYTES
from areal_core.controller.core.controller import RolloutController, Signal
from areal_core.controller.core.ledger import TrajectoryLedger
from areal_core.controller.core.tables import Ending
from areal_core.controller.export import best_of, export, model_card
from areal_core.controller.payloads import TABLE_GROUPS, DamagedPayloadError, PayloadStore, trajectory_table
from areal_core.controller.pool import GenerationPool
from areal_core.controller.recorder import Recorder
from areal_core.controller.registry import Server, ServerState
from areal_core.controller.restore import forget_damaged, restore
from areal_core.controller.retention import EvaluationSchedule, Retention
from areal_core.controller.routes import Routes
from areal_core.controller.snapshots import Snapshots
from areal_core.environments.datasets import check_digests
from areal_core.environments.dialogue import stops_by_task
from areal_core.environments.registry import environment_class
from areal_core.environments.source import PromptSource, dataset_report, digests, open_source
from areal_core.errors import ArealError, ProcessError, StorageError, TokenLedgerError, UserCodeError
from areal_core.launch import heartbeat, logs, process
from areal_core.models.tokenizer import Tokenizer
from areal_core.rewards.pool import open_rewards
from areal_core.storage import durable
from areal_core.storage.objects import Storage
from areal_core.storage.rundir import RunDir, write_json
from areal_core.storage.weights import base_version
from areal_core.tracking.outbox import Outbox
from areal_core.tracking.timeline import TimelineWriter, read_timeline
from areal_core.types import BatchManifest, RunSummary, TokenLedger

logger = logging.getLogger(__name__)
_COLLECT_S = 60.0  # least seconds between two garbage collections
_COLLECT_SHARE = 1 / 300  # largest share of time spent in garbage collection
_CHECK_S = 5.0  # between two health checks of the generation servers
_COUNT_TRIES, _COUNT_RETRY_S = 10, 0.5  # final reads, until the servers' counters include their last responses


class Service:
    """One run's controller process."""

    def __init__(self, run: RunDir) -> None:
        self.run_dir = run
        self.config = run.config()
        self.info = run.info()
        store = self.config.storage
        self.storage = Storage.open(self.info.checkpoint_url, store.endpoint_url, store.patience_s)
        restored = restore(run, self.storage)
        self.ledger = TrajectoryLedger(run.ledger, group_size=self.config.algorithm.group_size)
        durable.sync(run.root)  # persists the name of a new ledger
        forget_damaged(self.ledger)
        self.ledger.publish(base_version(self.info.model_path))  # again after a restart: its folder may have moved
        if run.superseded.exists():
            self.ledger.notes.reopen()
            run.superseded.unlink()
        by_task = self.config.by_task
        environments = {name: environment_class(its) for name, its in by_task.items()}
        most_tokens = max(environments[name].max_turns * its.task.max_new_tokens for name, its in by_task.items())
        self.ledger.resume(self.config.algorithm.group_size * most_tokens)  # bound for each group
        self.payloads = PayloadStore(run.payloads, self.info.number)
        self.recorder = Recorder(self.config, self.ledger, Outbox(run.outbox, self.info.run_id, timeout_s=1.0))
        if restored is not None:
            self.recorder.forget(restored + 1)
        self.tokenizer = Tokenizer.from_folder(self.info.model_path)
        self.source: PromptSource = open_source(self.config, self.tokenizer)
        check_digests(self.info.prompts, digests(self.source))
        if report := dataset_report(self.source):
            self.recorder.document("dataset_report", 0, report)
        self.rewards = open_rewards(
            self.config,
            self.info.model_path,
            self.config.rollout.reward_workers,
            timeline=lambda place: run.timeline_file("rewards", place),
        )
        self.servers = GenerationPool(
            completions_per_server=self.config.completions_per_server,
            interruption=self.config.interruption,
            adapters=self.config.training.lora.rank is not None,
            patience_s=self.config.rollout.request_timeout_s,
            timeline=lambda name: TimelineWriter(run.timeline / f"{name}.jsonl"),
            counters=self.ledger.counters,
            token=run.token(),
        )
        self.controller = RolloutController(
            config=self.config,
            source=self.source,
            engine=self.servers,
            rewards=self.rewards,
            payloads=self.payloads,
            ledger=self.ledger,
            stop_token_ids=stops_by_task(self.config, self.tokenizer, self.info.model_path),
            opens_with_prompt={name: environment.opens_with_prompt for name, environment in environments.items()},
        )
        self.servers.registry.subscribe(self._server_changed)
        self.servers.freed = self.controller.freed.notify
        self.schedule = EvaluationSchedule(self.config, self.ledger, self.recorder)
        self.snapshots = Snapshots(run, self.storage, self.payloads, retain=self.config.rollout.retain == "all")
        self.retention = Retention(self.schedule, self.snapshots, lambda: self.servers.loading)
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.stopped = False  # the trainer has stopped with a checkpoint, and the run can be resumed
        self.changed = Signal()  # a version was published or scored, or the trainer has finished

    @property
    def ending(self) -> Ending | None:
        """How the trainer finished; None until then."""
        return self.ledger.notes.ending

    async def record_texts(self, manifest: BatchManifest) -> None:
        """Record some trajectories of a batch for people, with the prompts as the policy receives them."""
        if not self.recorder.records_tables(manifest.step):
            return
        indices = self.ledger.prompt_indices(manifest.step)[:TABLE_GROUPS]
        prompts = [self.tokenizer.decode(self.source.prompt(index).token_ids, special=True) for index in indices]
        table = (trajectory_table, manifest, prompts, self.run_dir.payloads, self.tokenizer)
        try:
            rows = await asyncio.to_thread(*table)
        except (OSError, StorageError) as error:
            logger.warning("step %d: could not record its trajectories: %s", manifest.step, error)
        else:
            self.recorder.document("trajectories", manifest.step, {"rows": rows})

    async def wait_until_published(self) -> None:
        """Wait until the newest version is undamaged. The trainer publishes a damaged one again."""
        while self.ledger.versions.newest() is None:
            await self.changed.wait()

    def fail(self, error: ArealError) -> None:
        """End this process with `error`. A new process starts from the stored state."""
        if not self._failure.done():
            self._failure.set_exception(error)

    async def drop_damaged_groups(self, group_id: int, error: ArealError) -> None:
        """Drop all groups with a damaged payload, and restart everything that depends on them.

        Ignores groups of batches before this group's, which the trainer has already consumed. The trainer requests its
        batch again after it has failed."""
        logger.warning("%s", error)
        if (step := self.ledger.step_of(group_id)) is not None:
            while self.ledger.free(step - 1):
                await asyncio.to_thread(self.ledger.flush)
        for group_id, place in self.ledger.payloads.all():
            try:
                await self.payloads.read(place)
            except DamagedPayloadError:
                if self.ledger.payloads.get(group_id) == place:  # else the group was dropped meanwhile
                    logger.warning("group %d is generated again: its payload is damaged", group_id)
                    self.controller.drop_damaged(group_id)
        forget_damaged(self.ledger)
        self.recorder.forget(self.ledger.versions.last() + 1)

    # -- the process -------------------------------------------------------------------------------------------

    async def serve(self, ready_file: Path) -> None:
        """Serve until the run has ended in order."""
        runner = serving.runner(Routes(self).app(), shutdown_timeout=2.0, max_line_size=REQUEST_LINE_BYTES)
        await runner.setup()
        url = await serving.listen(runner, self.config.launch.address, port_file=self.run_dir.port_file("controller"))
        process.announce_ready(ready_file, url)
        heartbeat.watch_loop(asyncio.get_running_loop())
        try:
            async with asyncio.TaskGroup() as tasks:
                background = [
                    tasks.create_task(work) for work in (self._watch_servers(), self._raise_failure(), collect_rarely())
                ]
                if self.ending is not None:
                    self.controller.finish(self.ending.reason)
                await self.controller.run()
                await self._wait_until_scored()
                await self.retention.wait_until_pruned()
                if not self.stopped:
                    await self._write_summary()
                for task in background:
                    task.cancel()
        finally:
            await self.rewards.close()  # their connections are requests and would delay the cleanup
            await runner.cleanup()
            await self.servers.close()
            self.payloads.close()
            self.ledger.close()

    def _server_changed(self, server: Server, _: ServerState) -> None:
        if server.at_work:
            self.recorder.start_clock()
        self.controller.notify()

    async def _raise_failure(self) -> None:
        await self._failure

    async def _watch_servers(self) -> None:
        """Take out hanging servers, and store the token counts of the others."""
        while True:
            await asyncio.sleep(_CHECK_S)
            self._report_progress()
            await self.servers.check()
            await self.servers.loads()

    def _report_progress(self) -> None:
        """Report the run's progress in the heartbeat, and the role that the controller waits for."""
        its, running = self.ledger, self.controller.running_groups
        scored, at_work = len(self.recorder.evaluations), len(self.servers.registry.at_work)
        if self.ending is not None:
            next_one = "evaluator"
        else:
            next_one = "generation" if running or not at_work else "trainer"
        heartbeat.report(
            f"version {its.versions.last()}, batch {its.last_step()} assembled, {its.admitted} groups admitted, "
            f"{running} in flight, {scored} versions evaluated, {at_work} servers serving",
            waits_for=next_one,
        )

    async def _wait_until_scored(self) -> None:
        """Wait until the trainer has finished and the last version is scored, or the run is stopped."""
        while not self.stopped and (self.ending is None or self.schedule.next() is not None):
            await self.changed.wait()

    async def _write_summary(self) -> None:
        """Write summary.json and store the model card.
        Raises TokenLedgerError if the token ledger does not balance."""
        ending = self.ending
        assert ending is not None
        tokens = await self._balanced_tokens()
        for reason, groups in self.ledger.dropped().items():
            logger.info("dropped groups: %d (%s)", groups, reason)
        if not tokens.balanced:
            raise TokenLedgerError(f"tokens: the token ledger does not balance: {tokens}")
        logger.info("tokens: %s", tokens)
        spans = await asyncio.to_thread(read_timeline, self.run_dir.timeline)
        summary = self.recorder.summary(run_id=self.info.run_id, ending=ending, spans=spans)
        card = model_card(self.config, summary).encode()
        await asyncio.to_thread(self.storage.child("final").put_bytes, "README.md", card)
        await self._keep_best(summary)
        values = dataclasses.asdict(summary)
        self.recorder.document("summary", summary.steps, values)
        self.ledger.sync()
        write_json(self.run_dir.summary, values, synced=True)

    async def _keep_best(self, summary: RunSummary) -> None:
        """Store the best version, unless it is the final version or the base model."""
        best = best_of(self.recorder.evaluations)
        if best is None or best.version in (0, summary.steps):
            return
        version = self.ledger.versions.get(best.version)
        if version is None:
            logger.warning("could not export the best version: version %d is damaged", best.version)
            return
        card = model_card(self.config, summary, best)
        try:
            await asyncio.to_thread(export, self.run_dir, self.storage, version, card)
        except (StorageError, ProcessError) as error:
            logger.warning("could not export the best version: %s", error)

    async def _balanced_tokens(self) -> TokenLedger:
        """Return the token ledger once it balances, or after _COUNT_TRIES reads. vLLM counts tokens only after its
        response."""
        for _ in range(_COUNT_TRIES):
            await self.servers.loads()
            if (tokens := self.ledger.tokens()).balanced:
                return tokens
            await asyncio.sleep(_COUNT_RETRY_S)
        return self.ledger.tokens()


async def _main(run: RunDir, ready_file: Path) -> None:
    service = Service(run)
    serving = asyncio.ensure_future(service.serve(ready_file))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, serving.cancel)
    try:
        await serving
    except* ArealError as errors:  # of nested task groups: the first error is the cause
        error: BaseException = errors
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None


async def collect_rarely() -> None:
    """Run Python's garbage collector rarely, until cancelled. Exempts all existing objects from it.

    A collection visits all objects and blocks the process, for a second with thousands of completions in flight. Python
    would collect after many allocations, as in every update. Hardly any object here is ever part of a cycle.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        took_s = 0.0
        while True:
            await asyncio.sleep(max(_COLLECT_S, took_s / _COLLECT_SHARE))
            start = time.perf_counter()
            gc.collect()
            took_s = time.perf_counter() - start
    finally:
        gc.enable()
        gc.unfreeze()


def main() -> None:
    run = RunDir.of_command_line()
    logs.start("controller")
    process.tie_to_parent(run.ready_file("controller"))
    try:
        asyncio.run(_main(run, run.ready_file("controller")))
    except asyncio.CancelledError:
        raise SystemExit(143) from None
    except ArealError as error:
        logger.error("%s", error)
        final = {TokenLedgerError: process.EXIT_FINAL, UserCodeError: process.EXIT_USER_CODE}
        raise SystemExit(next((status for kind, status in final.items() if isinstance(error, kind)), 1)) from None


if __name__ == "__main__":
    main()
