"""The controller's routes (listed in docs/routes.md). Bodies are JSON; errors are one line of text."""

from __future__ import annotations

import asyncio
import dataclasses
import sqlite3
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from areal_core.api.refusals import error_middleware, read, token_middleware
from areal_core.api.scored_groups import parsed_spans
from areal_core.controller.core.tables import Ending
from areal_core.controller.payloads import DamagedPayloadError
from areal_core.controller.pool import GenerationPool, Newest
from areal_core.errors import ArealError, GenerationError, LedgerError, RunFinished, StorageError
from areal_core.launch import logs
from areal_core.rewards.pool import RewardPool
from areal_core.rewards.remote import ANSWER_BYTES
from areal_core.storage import weights
from areal_core.types import STOPPED, BatchManifest, Evaluation, MetricRow, PolicyVersion

if TYPE_CHECKING:
    from areal_core.controller.service import Service


class Join(msgspec.Struct):
    """Request for a generation server to join within `timeout_s` seconds; None: no limit.

    `stager` is the URL of the process that fetches versions onto its machine; None on the controller's machine.
    """

    name: str
    url: str
    timeout_s: float | None = None
    stager: str | None = None


class Metrics(msgspec.Struct):
    """Metric points: key, step, value, and time in seconds since the epoch."""

    rows: list[tuple[str, int, float, float]]


class Document(msgspec.Struct):
    """A record of a step other than metrics."""

    kind: str
    step: int
    data: dict[str, Any]


class Snapshot(msgspec.Struct):
    """Request for a snapshot: name of the job, and how long to wait for it, in seconds."""

    job: str
    timeout_s: float


class Stop(msgspec.Struct):
    """Request to end the run after its current step, and the reason."""

    reason: str


_STATUSES = {  # the last three are faults of the store or the disk, not of the caller
    RunFinished: 410, LedgerError: 400, GenerationError: 502, ArealError: 500, sqlite3.Error: 500, OSError: 500,
}  # fmt: skip


class Routes:
    """Handlers for requests of the trainer, the evaluator, reward workers and the launcher."""

    def __init__(self, run: Service) -> None:
        self._run = run
        self._recorded: BatchManifest | None = None  # the last batch whose metrics are recorded

    def app(self) -> web.Application:
        middlewares = [token_middleware(self._run.run_dir.token()), error_middleware(_STATUSES)]
        app = web.Application(middlewares=middlewares, client_max_size=ANSWER_BYTES)
        newest = self._run.ledger.versions.newest
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/status", self._status),
                *server_routes(self._run.servers, newest, self._run.wait_until_published),
                web.get("/batch/{step}", self._batch),
                web.get("/groups/{group_id}", self._group),
                *reward_routes(self._run.rewards),
                web.post("/versions", self._publish),
                web.get("/evaluation", self._evaluation),
                web.post("/evaluations", self._evaluated),
                web.post("/metrics", self._metrics),
                web.post("/documents", self._document),
                web.post("/checkpoints/{step}", self._snapshot),
                web.post("/checkpoints/{step}/committed", self._committed),
                web.post("/finish", self._finish),
                web.post("/stop", self._stop),
            ]
        )
        return app

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _status(self, _: web.Request) -> web.Response:
        status = self._run.recorder.status(
            version=self._run.servers.version,
            finished=self._run.controller.finished,
            lost_servers=self._run.servers.registry.lost,
        )
        return web.json_response(dataclasses.asdict(status))

    async def _batch(self, request: web.Request) -> web.Response:
        if reason := self._run.recorder.reason_to_stop():
            self._run.controller.finish(reason)
        step = int(request.match_info["step"])
        if step <= self._run.ledger.payloads.forgotten:
            self._run.fail(
                StorageError(
                    f"the payloads of step {step} are deleted: the run continues with the ledger of a checkpoint"
                )
            )
            return web.Response(status=503)
        fixed_before = self._run.ledger.last_step()
        manifest = await self._run.controller.batch(step, timeout_s=float(request.query.get("timeout_s", "20")))
        if manifest is None:
            return web.Response(status=204)
        if self._run.config.sleeps:
            await self._run.servers.sleep()
        # Once for all ranks, and again after a restart, because the controller may have died before recording.
        if step >= fixed_before and manifest is not self._recorded:
            self._recorded = manifest
            self._run.recorder.record_batch(manifest)
            await self._run.record_texts(manifest)
        return web.Response(body=msgspec.json.encode(manifest), content_type="application/json")

    async def _group(self, request: web.Request) -> web.Response:
        """Return parts of a group's payload to a rank that has found damage."""
        group_id = int(request.match_info["group_id"])
        spans = parsed_spans(request.query.get("spans", ""))
        place = self._run.ledger.payload(group_id)
        try:
            payload = await self._run.payloads.read(place)
            return web.Response(body=b"".join(payload[start:end] for start, end in spans))
        except DamagedPayloadError as error:
            await self._run.drop_damaged_groups(group_id, error)
            raise

    async def _publish(self, request: web.Request) -> web.Response:
        version = await read(request, PolicyVersion)
        if version.version < 1:
            raise LedgerError(f"version: must be at least 1, as version 0 is the base model, got {version.version}")
        if self._run.config.sleeps:
            await self._run.servers.wake_up()
        outcome = self._run.controller.publish(version)
        logs.at_step(version.version)
        if outcome == "replaced":
            self._run.recorder.forget(version.version)
        if outcome != "same" or not self._run.recorder.has_recorded_step(version.version):
            loads = await self._run.servers.loads()
            self._run.recorder.record_step(version.version, loads)
        self._run.changed.notify()
        return web.json_response({"status": outcome, "release": self._run.retention.obsolete_versions()})

    async def _evaluation(self, request: web.Request) -> web.Response:
        try:
            async with asyncio.timeout(float(request.query.get("timeout_s", "20"))):
                while True:
                    if version := self._run.schedule.next():
                        return web.json_response(dataclasses.asdict(version))
                    if (ending := self._run.ending) is not None:
                        raise RunFinished(ending.reason)
                    await self._run.changed.wait()
        except TimeoutError:
            return web.Response(status=204)

    async def _evaluated(self, request: web.Request) -> web.Response:
        evaluation = await read(request, Evaluation)
        published = self._run.ledger.versions.get(evaluation.version)
        if published is not None and published.digest == evaluation.digest:  # else of a replaced version
            self._run.recorder.record_evaluation(evaluation)
            await self._run.retention.prune_pages()
        if reason := self._run.recorder.reason_to_stop():
            self._run.controller.finish(reason)
        self._run.changed.notify()
        return web.json_response({"more": self._run.ending is None or self._run.schedule.next() is not None})

    async def _metrics(self, request: web.Request) -> web.Response:
        rows = (await read(request, Metrics)).rows
        self._run.recorder.log_rows([MetricRow(key=k, step=step, value=v, time_s=t) for k, step, v, t in rows])
        return web.json_response({})

    async def _document(self, request: web.Request) -> web.Response:
        document = await read(request, Document)
        if document.kind == "staleness_histogram":
            self._run.recorder.record_staleness(document.step, document.data["counts"])
        else:
            self._run.recorder.document(document.kind, document.step, document.data)
        return web.json_response({})

    async def _snapshot(self, request: web.Request) -> web.Response:
        """Store a snapshot of the ledger, as of the beginning of the job, beside the trainer's checkpoint."""
        asked = await read(request, Snapshot)
        entries = await self._run.snapshots.take(int(request.match_info["step"]), asked.job, asked.timeout_s)
        return web.Response(status=204) if entries is None else web.json_response(entries)

    async def _committed(self, _: web.Request) -> web.Response:
        self._run.retention.start_pruning()
        return web.json_response({})

    async def _finish(self, request: web.Request) -> web.Response:
        ending = await read(request, Ending)
        reason = self._run.controller.finished or ending.reason
        self._run.stopped = ending.reason == STOPPED
        if not self._run.stopped:  # an ended run never publishes its versions again
            await asyncio.to_thread(weights.sync, self._run.run_dir.weights)
            self._run.ledger.notes.end(dataclasses.replace(ending, reason=reason))
        self._run.controller.finish(reason)
        self._run.changed.notify()
        return web.json_response({})

    async def _stop(self, request: web.Request) -> web.Response:
        self._run.controller.finish((await read(request, Stop)).reason)
        return web.json_response({})


def server_routes(
    servers: GenerationPool, newest: Newest, published: Callable[[], Awaitable[None]]
) -> list[web.RouteDef]:
    """Routes to list generation servers and to make them join or leave.
    `newest` returns the version for a joining server, which first waits until that version is `published`."""

    async def join(request: web.Request) -> web.Response:
        server = await read(request, Join)
        try:
            async with asyncio.timeout(server.timeout_s):
                await published()
                await servers.join(server.name, server.url, newest, stager=server.stager)
        except TimeoutError:
            return web.Response(status=204)
        return web.json_response({})

    async def leave(request: web.Request) -> web.Response:
        await servers.leave(request.match_info["name"])
        return web.json_response({})

    async def listed(_: web.Request) -> web.Response:
        return web.json_response(
            [
                {
                    "name": one.name,
                    "url": one.url,
                    "stager": one.client.stager,
                    "state": one.state.value,
                    "completions": one.completions,
                }
                for one in servers.registry.servers
            ]
        )

    return [web.get("/servers", listed), web.post("/servers", join), web.delete("/servers/{name}", leave)]


def reward_routes(rewards: RewardPool) -> list[web.RouteDef]:
    """The route by which reward workers on other machines connect."""

    async def work(request: web.Request) -> web.WebSocketResponse:
        return await rewards.serve(int(request.match_info["place"]), request)

    return [web.get("/rewards/{place}", work)]
