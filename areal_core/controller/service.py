"""The controller's process: HTTP around the rollout core, with the real engine, rewards, ledger and clock behind it.

    trainer --GET /batch, /groups; POST /versions, /metrics, /checkpoints, /finish--> here
    evaluator --GET /evaluation; POST /evaluations--> here
    launcher --POST /servers; GET /status--> here --generate, pause, update, resume--> generation servers

It ends with exit status 0 once the trainer has finished, the last version is scored and summary.json is written; with
SPENT and no summary where the tokens that the servers counted are not those that the ledger accounts for.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import hashlib
import json
import logging
import signal
import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web
from safetensors.numpy import load_file

from areal_core.config.schema import RunConfig
from areal_core.controller.pool import GenerationPool, server_routes
from areal_core.controller.recorder import Recorder
from areal_core.controller.registry import Server, ServerState
from areal_core.controller.weight_transfer import transfer_routes
from areal_core.environments.source import PromptSource, open_source
from areal_core.errors import ArealError, BooksError, GenerationError, LedgerError, RunFinished
from areal_core.launch import logs, process
from areal_core.models.tokenizer import Tokenizer
from areal_core.rewards.worker import GroupJob, GroupSession, RewardPool
from areal_core.rollout.controller import RolloutController, Signal
from areal_core.rollout.ledger import TrajectoryLedger, snapshot
from areal_core.rollout.notes import Ending
from areal_core.storage import checkpoint, weights
from areal_core.storage.objects import Storage
from areal_core.storage.rundir import RunDir, write_json
from areal_core.tracking.outbox import Outbox
from areal_core.tracking.timeline import TimelineWriter, read_timeline
from areal_core.types import Evaluation, MetricRow, PolicyVersion, Prompt, TokenLedger

logger = logging.getLogger(__name__)
_CHECK_S = 5.0  # between two looks at the generation servers' health
_COUNT_TRIES, _COUNT_AGAIN_S = 10, 0.5  # at the end, for the servers' counters to catch up with their answers
_VERSIONS_KEPT = 8  # at most, of the newest: servers may be staging one, and the trainer compares engines on old ones


class Environments:
    """The reward workers as the rollout core sees them: a session for every group."""

    def __init__(self, config: RunConfig, model_path: str, pool: RewardPool) -> None:
        self._config = config
        self._model_path = model_path
        self._pool = pool

    def begin(self, prompt: Prompt) -> GroupSession:
        return self._pool.begin(
            GroupJob(
                prompt=prompt,
                environment=self._config.environment,
                task=self._config.task,
                algorithm=self._config.algorithm,
                model_path=self._model_path,
            )
        )


class Service:
    """One run's controller process."""

    def __init__(self, run: RunDir) -> None:
        self.run_dir = run
        self.config = run.config()
        self.info = run.info()
        self.storage = Storage.open(self.info.checkpoint_url, self.config.storage.endpoint_url)
        restored = restore(run, self.storage)
        self.ledger = TrajectoryLedger(run.ledger, group_size=self.config.algorithm.group_size)
        self.ledger.publish(base_version(self.info.model_path))  # again after a restart: its folder may have moved
        self.ledger.resume(self.config.algorithm.group_size * self.config.task.max_new_tokens)
        self.recorder = Recorder(self.config, self.ledger, Outbox(run.outbox, self.info.run_id, timeout_s=1.0))
        if restored is not None:
            self.recorder.forget(restored + 1)
        self.source: PromptSource = open_source(self.config, Tokenizer.from_folder(self.info.model_path))
        self.rewards = RewardPool(
            workers=self.config.rollout.reward_workers,
            timeout_s=self.config.rollout.reward_timeout_s,
            timeline=lambda place: run.timeline_file("rewards", place),
        )
        self.servers = GenerationPool(
            answers_per_server=self.config.answers_per_server,
            interruption=self.config.interruption,
            transfer=self.config.generation.transfer,
            patience_s=self.config.rollout.request_timeout_s,
            timeline=lambda name: TimelineWriter(run.timeline / f"{name}.jsonl"),
            counters=self.ledger.counters,
        )
        self.controller = RolloutController(
            config=self.config,
            source=self.source,
            engine=self.servers,
            rewards=Environments(self.config, self.info.model_path, self.rewards),
            ledger=self.ledger,
            stop_token_ids=stop_token_ids(self.info.model_path),
        )
        self.servers.registry.subscribe(self._server_changed)
        self._changed = Signal()
        self._ending = self.ledger.notes.ending

    # -- the process -------------------------------------------------------------------------------------------

    async def serve(self, ready_file: Path) -> None:
        """Serve until the run has ended in order."""
        runner = web.AppRunner(self._app(), access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, self.config.launch.address, 0, shutdown_timeout=2.0)
        await site.start()
        host, port = runner.addresses[0][:2]
        process.announce_ready(ready_file, f"http://{f'[{host}]' if ':' in host else host}:{port}")
        try:
            async with asyncio.TaskGroup() as tasks:
                watching = tasks.create_task(self._watch_servers(), name="watch servers")
                if self._ending:
                    self.controller.finish(self._ending.reason)
                await self.controller.run()
                await self._scored()
                await self._write_summary()
                watching.cancel()
        finally:
            await runner.cleanup()
            await self.servers.close()
            await self.rewards.close()
            self.ledger.close()

    def _server_changed(self, server: Server, _: ServerState) -> None:
        if server.at_work:
            self.recorder.start_clock()
        self.controller.servers_changed()

    async def _watch_servers(self) -> None:
        """Take out servers that hang, whether they have requests or not, and keep what they have counted."""
        while True:
            await asyncio.sleep(_CHECK_S)
            await self.servers.check()
            await self.servers.loads()

    async def _scored(self) -> None:
        """Wait until the trainer has handed its last version in and the evaluator has scored it."""
        while self._ending is None or self._next_evaluation() is not None:
            await self._changed.wait()

    async def _write_summary(self) -> None:
        """Raises BooksError, and writes none, unless the servers counted the tokens that the ledger accounts for."""
        assert self._ending is not None
        tokens = await self._counted()
        for reason, groups in self.ledger.dropped().items():
            logger.info("dropped groups: %d, %s", groups, reason)
        if not tokens.balanced:
            raise BooksError(f"tokens: the books do not balance: {tokens}")
        logger.info("tokens: %s", tokens)
        spans = await asyncio.to_thread(read_timeline, self.run_dir.timeline)
        summary = self.recorder.summary(
            run_id=self.info.run_id,
            ending=self._ending,
            bound=self.recorder.explained(spans),
        )
        values = dataclasses.asdict(summary)
        self.recorder.document("summary", summary.steps, values)
        write_json(self.run_dir.summary, values)

    async def _counted(self) -> TokenLedger:
        """The token ledger once all servers have said what they sampled: vLLM counts a moment after it has answered."""
        for _ in range(_COUNT_TRIES):
            await self.servers.loads()
            if (tokens := self.ledger.tokens()).balanced:
                return tokens
            await asyncio.sleep(_COUNT_AGAIN_S)
        return self.ledger.tokens()

    # -- routes ------------------------------------------------------------------------------------------------

    def _app(self) -> web.Application:
        app = web.Application(middlewares=[_errors_as_lines], client_max_size=64 * 2**20)
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/status", self._status),
                *server_routes(self.servers, self._newest),
                web.get("/batch/{step}", self._batch),
                web.get("/groups/{group_id}", self._group),
                web.post("/versions", self._publish),
                *transfer_routes(self.servers.transfer, self._newest),
                web.get("/evaluation", self._evaluation),
                web.post("/evaluations", self._evaluated),
                web.post("/metrics", self._metrics),
                web.post("/documents", self._document),
                web.post("/checkpoints/{step}", self._snapshot),
                web.post("/checkpoints/{step}/committed", self._committed),
                web.post("/finish", self._finish),
            ]
        )
        return app

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _status(self, _: web.Request) -> web.Response:
        status = self.recorder.status(
            version=self.servers.version, finished=self.controller.finished, lost_servers=self.servers.lost
        )
        return web.json_response(dataclasses.asdict(status))

    async def _batch(self, request: web.Request) -> web.Response:
        if reason := self.recorder.reason_to_stop():
            self.controller.finish(reason)
        step = int(request.match_info["step"])
        fixed_before = self.ledger.last_step()
        manifest = await self.controller.batch(step, timeout_s=float(request.query.get("timeout_s", "20")))
        if manifest is None:
            return web.Response(status=204)
        if self.config.sleeps:
            await self.servers.sleep()
        if manifest.step >= fixed_before:  # once more after a restart, which may have come before the first time
            self.recorder.batch_fixed(manifest, self.source.prompt)
        return web.json_response(dataclasses.asdict(manifest))

    async def _group(self, request: web.Request) -> web.Response:
        return web.Response(body=self.ledger.payload(int(request.match_info["group_id"])))

    async def _publish(self, request: web.Request) -> web.Response:
        version = PolicyVersion(**await request.json())
        if self.config.sleeps:
            await self.servers.wake_up()
        outcome = self.controller.publish(version)
        logs.at_step(version.version)
        if outcome == "epoch":
            self.recorder.forget(version.version)
        if outcome != "same" or not self.recorder.has_published(version.version):
            loads = await self.servers.loads()
            self.recorder.published(version.version, loads)
        self._changed.notify()
        return web.json_response({"status": outcome, "release": self._released()})

    async def _evaluation(self, request: web.Request) -> web.Response:
        try:
            async with asyncio.timeout(float(request.query.get("timeout_s", "20"))):
                while True:
                    if version := self._next_evaluation():
                        return web.json_response(dataclasses.asdict(version))
                    if self._ending is not None:
                        raise RunFinished(self._ending.reason)
                    await self._changed.wait()
        except TimeoutError:
            return web.Response(status=204)

    async def _evaluated(self, request: web.Request) -> web.Response:
        evaluation = Evaluation(**await request.json())
        published = self.ledger.version(evaluation.version)
        if published is not None and published.sha256 == evaluation.sha256:  # else of weights that an epoch disowned
            self.recorder.evaluated(evaluation)
        if reason := self.recorder.reason_to_stop():
            self.controller.finish(reason)
        self._changed.notify()
        return web.json_response({"more": self._ending is None or self._next_evaluation() is not None})

    async def _metrics(self, request: web.Request) -> web.Response:
        rows = (await request.json())["rows"]
        self.recorder.log_rows([MetricRow(key=k, step=step, value=v, time_s=t) for k, step, v, t in rows])
        return web.json_response({})

    async def _document(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body["kind"] == "staleness_histogram":
            self.recorder.staleness(body["step"], body["data"]["counts"])
        else:
            self.recorder.document(body["kind"], body["step"], body["data"])
        return web.json_response({})

    async def _snapshot(self, request: web.Request) -> web.Response:
        """Put the ledger, as it is now, beside the trainer's checkpoint."""
        step = int(request.match_info["step"])
        copy = self.run_dir.root / "ledger-snapshot.sqlite"
        entry = await asyncio.to_thread(self._upload_snapshot, step, copy)
        return web.json_response(entry)

    def _upload_snapshot(self, step: int, copy: Path) -> dict[str, Any]:
        snapshot(self.run_dir.ledger, copy)
        self.storage.child(checkpoint.folder_name(step)).put_file(copy, checkpoint.LEDGER)
        return dataclasses.asdict(checkpoint.describe(copy))

    async def _committed(self, request: web.Request) -> web.Response:
        if self.config.rollout.retain == "uncommitted":
            self.ledger.free(int(request.match_info["step"]))
        return web.json_response({})

    async def _finish(self, request: web.Request) -> web.Response:
        body = await request.json()
        reason = self.controller.finished or body["reason"]
        self._ending = Ending(reason=reason, version=body["version"], model_url=body["model_url"])
        self.ledger.notes.end(self._ending)
        self.controller.finish(reason)
        self._changed.notify()
        return web.json_response({})

    # -- inside ------------------------------------------------------------------------------------------------

    def _newest(self) -> PolicyVersion:
        newest = self.ledger.newest_version()
        assert newest is not None
        return newest

    def _next_evaluation(self) -> PolicyVersion | None:
        """The oldest version that is due and not scored; once the run has ended only the base and the last count. None
        is due where versions are not scored."""
        if not self.config.evaluated:
            return None
        scored = {evaluation.version for evaluation in self.recorder.evaluations}
        every = self.config.evaluation.every
        newest = self._newest().version
        due = range(0, newest + 1, every) if self._ending is None else sorted({0, self._ending.version})
        for number in due:
            version = None if number in scored else self.ledger.version(number)
            # Weights that another machine kept to itself are gone; no score of them will ever come.
            if version is not None and Path(version.path).exists():
                return version
        return None

    def _released(self) -> list[int]:
        """Versions whose folders nobody needs: neither a server that loads, nor the evaluator, nor a restart."""
        newest = self._newest().version
        scored = {evaluation.version for evaluation in self.recorder.evaluations}
        every = self.config.evaluation.every
        kept = min(self.config.max_staleness + 2, _VERSIONS_KEPT)
        return [v for v in range(1, newest - kept + 1) if v % every or v in scored or not self.config.evaluated]


def restore(run: RunDir, storage: Storage) -> int | None:
    """On a machine where this run has no ledger yet, take it and its policy version from the newest checkpoint. Returns
    that version; None where there was nothing to do."""
    if run.ledger.exists():
        return None
    newest = checkpoint.newest(storage)
    if newest is None:
        return None
    files = checkpoint.fetch(storage, newest, run.root / "restored")
    state = load_file(files[checkpoint.STATE])
    tensors = {name.removeprefix("weight/"): array for name, array in state.items() if name.startswith("weight/")}
    version = weights.publish(run.weights, newest.step, tensors, dtype=run.config().training.dtype)
    ledger = TrajectoryLedger(files[checkpoint.LEDGER], group_size=run.config().algorithm.group_size)
    ledger.rewind(version.version)  # it was copied after the trainer's state, and may know more
    ledger.publish(version)
    ledger.close()
    files[checkpoint.LEDGER].replace(run.ledger)
    logger.info("restored the ledger from the checkpoint of step %d", newest.step)
    return newest.step


def base_version(model_path: str) -> PolicyVersion:
    """Version 0: the base model's own folder."""
    files = sorted(Path(model_path).glob("*.safetensors"))
    hashes = [checkpoint.describe(file).sha256 for file in files]
    whole = hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()
    return PolicyVersion(version=0, path=model_path, sha256=whole)


def stop_token_ids(model_path: str) -> tuple[int, ...]:
    """The end tokens of a model folder, without loading the model."""
    for name in ("generation_config.json", "config.json"):
        file = Path(model_path) / name
        ids = json.loads(file.read_text()).get("eos_token_id") if file.exists() else None
        if ids is not None:
            return tuple(ids) if isinstance(ids, list) else (ids,)
    return ()


@web.middleware
async def _errors_as_lines(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except RunFinished as ending:
        return web.Response(status=410, text=str(ending))
    except (LedgerError, ValueError, KeyError, TypeError) as error:
        return web.Response(status=400, text=f"{type(error).__name__}: {error}")
    except GenerationError as error:
        return web.Response(status=502, text=str(error))
    except (ArealError, sqlite3.Error, OSError) as error:  # the store, the disk: nothing that the caller did
        return web.Response(status=500, text=f"{type(error).__name__}: {error}")


async def _main(run: RunDir, ready_file: Path) -> None:
    service = Service(run)
    serving = asyncio.ensure_future(service.serve(ready_file))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, serving.cancel)
    try:
        await serving
    except* ArealError as errors:  # of a task group in a task group: the first tells why
        error: BaseException = errors
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--run-dir", type=Path, required=True)
    run = RunDir(parser.parse_args().run_dir)
    logs.start("controller")
    process.adopt(run.ready_file("controller"))
    try:
        asyncio.run(_main(run, run.ready_file("controller")))
    except asyncio.CancelledError:
        raise SystemExit(143) from None
    except ArealError as error:
        logger.error("%s", error)
        raise SystemExit(process.SPENT if isinstance(error, BooksError) else 1) from None


if __name__ == "__main__":
    main()
