"""The data server of the head node: serves the run's files to other machines over HTTP.

    remote worker --GET /run, /model/NAME, /versions/N--> the contents of its copy of the run's folder
    its ranks     --GET /payloads/SEGMENT--> their parts of scored groups
    remote worker --POST /nodes/NODE, once a second--> its ready files and heartbeats; back: those that it needs
                  --POST /nodes/NODE/logs/FILE, /timeline/FILE--> new lines of its processes
    rank 0, on another machine --POST /nodes/NODE/versions--> a version to fetch from there

The data server is a process beside the controller, so that transfers of versions and trajectories do not delay the
controller's requests. It exits with 0 once the run has ended in order and all remote workers have sent their final
report. If it is stopped earlier, it tells the remote workers. The client side is areal_core.api.head.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import msgspec
from aiohttp import web

from areal_core.api import serving
from areal_core.api.head import Head, HeadNodeError
from areal_core.api.refusals import error_middleware, read, token_middleware
from areal_core.api.scored_groups import REQUEST_LINE_BYTES, Span, parsed_spans, segment_file
from areal_core.errors import ArealError, StorageError, one_line
from areal_core.launch import heartbeat, logs, process
from areal_core.models.verified import weights_digest
from areal_core.run.remote.share import FIRST_RANK, LOGS, NodeReport, Nodes, ShareContents, TakenError, role_and_index
from areal_core.run.remote.stager import VersionCache
from areal_core.storage.rundir import RunDir
from areal_core.types import PolicyVersion

logger = logging.getLogger(__name__)

IN_ORDER, NOT_IN_ORDER = "in order", "otherwise"  # how a run ended
_POLL_S = 0.5  # between two checks whether the run has ended
_STATE_S = 0.2  # how long the contents of ready files are cached
_FETCH_S = 5.0  # longest wait of a request for a version
_FINAL_REPORT_S = 10.0  # beyond launch.stop_timeout_s: time for remote workers to end
_SHARE_OF_STOP = 0.8  # share of launch.stop_timeout_s for the same, if this process is stopped
_MOST_BYTES = 2**20  # most bytes of a request


class NoShareError(ArealError):
    """A remote worker has no share of the run, or has lost it."""


class NewVersion(msgspec.Struct):
    """A policy version that rank 0 has made on another machine."""

    version: Annotated[int, msgspec.Meta(ge=1)]
    digest: str
    url: str  # of the stager on that machine
    release: list[int] = []  # obsolete versions, to be deleted


class DataServer:
    """Routes of the data server of one run. All methods run in the event loop."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self.config = run.config()
        self.nodes = Nodes(run, self.config)
        self.cache = VersionCache(run)
        self._folder = Path(run.info().model_path)
        self._state: dict[str, Any] = {}
        self._read_at = float("-inf")
        self.ended: str | None = None  # how the run ended: IN_ORDER or NOT_IN_ORDER; None while it runs
        self.model: asyncio.Future[dict[str, dict[str, Any]]] = asyncio.ensure_future(
            asyncio.to_thread(_listed, self._folder)
        )

    def app(self) -> web.Application:
        statuses = {TakenError: 409, NoShareError: 410, StorageError: 502, HeadNodeError: 502, OSError: 500}
        middlewares = [token_middleware(self._run.token()), error_middleware(statuses)]
        app = web.Application(middlewares=middlewares, client_max_size=_MOST_BYTES)
        app.add_routes(
            [
                web.get("/run", self._about),
                web.get("/model/{name}", self._model_file),
                web.get("/versions/{version}", self.cache.serve),
                web.get("/payloads/{segment:[0-9]{6,}-[0-9]{6,}}", self._payloads),
                web.post("/nodes/{node}", self._report),
                web.post("/nodes/{node}/versions", self._fetch_version),
                web.post("/nodes/{node}/{kind}/{name}", self._append),
            ]
        )
        return app

    async def _about(self, _: web.Request) -> web.Response:
        """`GET /run`: everything to start a copy from, once the files of the model are hashed."""
        return web.json_response(
            {
                "run_id": self._run.root.name,
                "ended": self._how_ended(),
                "config": self.config.to_dict(),
                "info": dataclasses.asdict(self._run.info()),
                "model": await asyncio.shield(self.model),
            }
        )

    async def _model_file(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        if name not in await asyncio.shield(self.model):
            return web.Response(status=404, text="the model has no such file")
        return web.FileResponse(self._folder / name)

    async def _payloads(self, request: web.Request) -> web.Response:
        """`GET /payloads/SEGMENT`: parts of a segment, concatenated. The client verifies their checksums."""
        spans, name = parsed_spans(request.query.get("spans", "")), request.match_info["segment"]
        try:
            parts = await asyncio.to_thread(_parts, segment_file(self._run.payloads, name), spans)
        except OSError as error:
            return web.Response(status=404, text=f"segment {name} can't be read: {error.strerror}")
        if parts is None:
            return web.Response(
                status=416, text=f"spans: must lie within segment {name}, and add up to at most its size"
            )
        return web.Response(body=parts)

    async def _report(self, request: web.Request) -> web.Response:
        self.nodes.handle_report(request.match_info["node"], await read(request, NodeReport))
        return web.json_response(self._run_state())

    async def _fetch_version(self, request: web.Request) -> web.Response:
        """Fetch a version from the machine of rank 0 and delete obsolete ones.
        Responds with the local path, or with 202 while the transfer is in progress."""
        if FIRST_RANK not in self._contents_of(request).processes:
            raise ValueError("node: does not run rank 0")
        made = await read(request, NewVersion)
        await self.cache.release(made.release)
        version = PolicyVersion(version=made.version, path="", digest=made.digest)
        try:
            async with asyncio.timeout(_FETCH_S):
                here = await self.cache.staged(version, Head(made.url, self._run.token(), name="url"))
        except TimeoutError:
            return web.Response(status=202)
        self.cache.forget(here.version)  # fetch a version again if it is announced again: it may be damaged
        return web.json_response({"path": here.path})

    async def _append(self, request: web.Request) -> web.Response:
        """Append a process's new lines to its file on the head node, if that file has `offset` bytes.
        Responds with the new size, or with 409 and the present size."""
        contents = self._contents_of(request)
        kind, name = request.match_info["kind"], request.match_info["name"]
        if (kind, name) not in contents.files:
            raise ValueError("file: must be a log or a timeline of the node's own processes")
        older = logs.LOG_FILES if kind == LOGS else None  # timelines are not rotated
        file, data = self._run.root / kind / name, await request.read()
        fits, size = append(file, int(request.query["offset"]), data, limit=logs.LOG_BYTES, older=older)
        return web.json_response({"size": size}, status=200 if fits else 409)

    def _contents_of(self, request: web.Request) -> ShareContents:
        if (contents := self.nodes.contents_of(request.match_info["node"])) is None:
            raise NoShareError("node: has no share of this run")
        return contents

    def _run_state(self) -> dict[str, Any]:
        """Whether and how the run has ended, and the ready files of the processes that other machines need.
        One result is cached for all workers."""
        if time.monotonic() - self._read_at >= _STATE_S:
            names = ["controller-0", "rendezvous-0"]
            names += [f"trainer-{rank}" for rank in range(self.config.trainer_processes)]
            ready = {name: self._run.ready_info(*role_and_index(name)) for name in names}
            self._state = {
                "run_id": self._run.root.name,
                "number": self._run.info().number,
                "ended": self._how_ended(),
                "ready": {name: info for name, info in ready.items() if info is not None},
            }
            self._read_at = time.monotonic()
        return self._state

    def _how_ended(self) -> str | None:
        return IN_ORDER if self._run.summary.exists() else self.ended


def _listed(folder: Path) -> dict[str, dict[str, Any]]:
    """Size and digest of every file of a model folder. Raises OSError."""
    files = (path for path in sorted(folder.iterdir()) if path.is_file() and not path.name.startswith("."))
    return {path.name: {"size": path.stat().st_size, "digest": weights_digest(path)} for path in files}


def append(file: Path, offset: int, data: bytes, *, limit: int, older: int | None) -> tuple[bool, int]:
    """Append `data` to a file if the file has `offset` bytes; returns whether it did, and the new size.

    With `older`, the file is a log. It is rotated instead if it would exceed `limit` bytes, and `older` rotated files
    are kept. Raises OSError.
    """
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    with open(descriptor, "ab") as out:
        if (size := os.fstat(descriptor).st_size) != offset:
            return False, size
        if size and size + len(data) > limit and older is not None:
            logs.shift(file, older)
            file.replace(logs.older(file, 1))
            return False, 0
        out.write(data)
    return True, size + len(data)


def _parts(file: Path, spans: Sequence[Span]) -> bytes | None:
    """Concatenated spans of a file; None if the file is too short. Raises OSError."""
    with file.open("rb") as segment:
        size = os.fstat(segment.fileno()).st_size
        if max(end for _, end in spans) > size or sum(end - start for start, end in spans) > size:
            return None
        return b"".join(os.pread(segment.fileno(), end - start, start) for start, end in spans)


async def _serve(run: RunDir, ready_file: Path) -> bool:
    """Serve until the run has ended; returns whether it ended in order.
    Raises OSError for an unreadable model, or for a port that is in use."""
    launch, loop = run.config().launch, asyncio.get_running_loop()
    asked = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, asked.set)
    files = DataServer(run)
    runner = serving.runner(files.app(), shutdown_timeout=1.0, max_line_size=REQUEST_LINE_BYTES)
    await runner.setup()
    try:
        url = await serving.listen(runner, launch.address, launch.files_port, port_file=run.port_file("files"))
        process.announce_ready(ready_file, url)
        heartbeat.watch_loop(loop)
        while not asked.is_set() and not run.summary.exists():
            if files.model.done():
                files.model.result()
            with suppress(TimeoutError):
                await asyncio.wait_for(asked.wait(), _POLL_S)
        await _await_final_reports(files, run, launch.stop_timeout_s)
    finally:
        files.cache.closed.set()  # else this process would wait for the download of a version
        await runner.cleanup()
    return run.summary.exists()


async def _await_final_reports(files: DataServer, run: RunDir, stop_timeout_s: float) -> None:
    """Report to remote workers how the run ended, and wait for their final reports."""
    patience_s = stop_timeout_s + _FINAL_REPORT_S
    if not run.summary.exists():
        files.ended = NOT_IN_ORDER
        patience_s = _SHARE_OF_STOP * stop_timeout_s
    deadline = time.monotonic() + patience_s
    while files.nodes.awaits_reports:
        if time.monotonic() > deadline:
            logger.warning("some remote workers have not stopped within %.0f s of the run's end", patience_s)
            return
        await asyncio.sleep(_POLL_S)


def main() -> None:
    run = RunDir.of_command_line()
    ready_file = run.ready_file("files")
    logs.start("files")
    process.tie_to_parent(ready_file)
    try:
        in_order = asyncio.run(_serve(run, ready_file))
    except OSError as error:
        logger.error("%s", one_line(error))
        raise SystemExit(1) from None
    if not in_order:
        raise SystemExit(128 + signal.SIGTERM)


if __name__ == "__main__":
    main()
