"""The version cache of a machine: fetches each policy version once and serves it to other machines.

    controller --POST /stage--> stager --GET /versions/N, once for all servers of the machine--> data server
               <--path of the copy---    while these go on decoding
    data server --GET /versions/N--> stager of the machine of rank 0, where that is another machine

A version is hashed while it arrives, and gets its final name once it is complete. The stager runs in a thread of the
remote worker. Requests carry the run's token.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

from aiohttp import web

from areal_core.api import serving
from areal_core.api.head import Head, HeadNodeError, fetch
from areal_core.api.refusals import error_middleware, read, token_middleware
from areal_core.errors import ProcessError, StorageError
from areal_core.run.supervision import Supervision
from areal_core.storage import weights
from areal_core.storage.rundir import RunDir
from areal_core.types import PolicyVersion

_DIGEST = re.compile("[0-9a-f]{64}")
_HIGHEST_VERSION = 10**9
_PATIENCE_S = 30.0  # longest pause of the sender of a version
_SHUTDOWN_S = 1.0


class VersionCache:
    """The policy versions in the run's folder on this machine."""

    def __init__(self, run: RunDir, *, kept: int | None = None) -> None:
        """Keep the `kept` most recently requested versions; None keeps all of them until `release`."""
        self._run = run
        self._kept = kept
        self.closed = threading.Event()  # when set, downloads stop
        self._fetching: dict[tuple[int, str], asyncio.Task[PolicyVersion]] = {}
        self._local: dict[int, PolicyVersion] = {}  # ordered by request, the most recent last

    async def staged(self, version: PolicyVersion, source: Head) -> PolicyVersion:
        """The local copy of a version, fetched from `source` if missing; concurrent requests share a download.
        Raises ValueError for an invalid version or digest, StorageError, HeadNodeError, OSError."""
        if version.version < 0 or not _DIGEST.fullmatch(version.digest):
            raise ValueError("version, digest: must be a whole number of at least 0, and 64 hexadecimal digits")
        key = version.version, version.digest
        if key not in self._fetching:
            task = self._fetching[key] = asyncio.ensure_future(self._load(version, source))
            task.add_done_callback(lambda _: self._fetching.pop(key))
        return await asyncio.shield(self._fetching[key])

    def forget(self, version: int) -> None:
        """Fetch this version again at its next request."""
        self._local.pop(version, None)

    async def release(self, versions: Iterable[int]) -> None:
        """Delete obsolete versions."""
        for version in (gone := list(versions)):
            self.forget(version)
        await asyncio.to_thread(weights.release, self._run.weights, gone)

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """`GET /versions/N`: the model weights of a version; the `digest` in the query must match, if given."""
        number = int(request.match_info["version"])
        if not 1 <= number <= _HIGHEST_VERSION:
            raise ValueError(f"version: must be from 1 to {_HIGHEST_VERSION}, as version 0 is the base model")
        path = weights.version_folder(self._run.weights, number)
        try:
            published = weights.read_manifest(path)
        except StorageError:
            return web.Response(status=404, text=f"version {number} does not exist, or was deleted")
        if (asked := request.query.get("digest", published.digest)) != published.digest:
            return web.Response(
                status=404, text=f"version {number} has digest {published.digest}, expected {asked[:64]}"
            )
        return web.FileResponse(weights.weights_file(path), headers={"X-Digest": published.digest})

    async def _load(self, version: PolicyVersion, source: Head) -> PolicyVersion:
        if version.version == 0:
            base = await asyncio.to_thread(weights.base_version, self._run.info().model_path)
            if base.digest != version.digest:
                wanted = f"the head node's base model, with digest {version.digest}"
                raise StorageError(f"model.path: must be {wanted}, got {base.path} with {base.digest}; copy it here")
            return base
        here = self._local.pop(version.version, None)
        if here is None or here.digest != version.digest:
            here = await asyncio.to_thread(self._fetch, version, source)
        self._local[version.version] = here
        if self._kept is not None:
            await self.release(list(self._local)[: -self._kept])
        return here

    def _fetch(self, version: PolicyVersion, source: Head) -> PolicyVersion:
        scratch = self._run.weights / f".v{version.version}.{version.digest[:16]}"
        path = f"/versions/{version.version}?digest={version.digest}"
        try:
            fetch(source, path, scratch, version.digest, stopped=self.closed.is_set, patience_s=_PATIENCE_S)
            lora = self._run.config().training.lora.adapter
            return weights.adopt(self._run.weights, version.version, version.digest, scratch, lora)
        finally:
            scratch.unlink(missing_ok=True)


class Stager:
    """Serves the version cache of a remote worker, whose run folder is `run`."""

    def __init__(self, run: RunDir, head: Head, address: str, *, kept: int) -> None:
        """`address` is this machine's; the `kept` most recently requested versions are kept."""
        self._run = run
        self._head = head
        self._address = address
        self._cache = VersionCache(run, kept=kept)

    @contextmanager
    def running(self, supervision: Supervision) -> Iterator[str]:
        """Run the stager in a thread until the end of the `with`; yields its URL. Raises ProcessError."""
        shutil.rmtree(self._run.weights, ignore_errors=True)
        self._run.weights.mkdir(parents=True)
        up: Future[str] = Future()
        with supervision.thread("stager", lambda: self._work(up)):
            try:
                yield up.result()
            finally:
                self._cache.closed.set()

    def app(self) -> web.Application:
        statuses = {StorageError: 502, HeadNodeError: 502, OSError: 502}
        app = web.Application(middlewares=[token_middleware(self._head.token), error_middleware(statuses)])
        app.add_routes([web.post("/stage", self._stage), web.get("/versions/{version}", self._cache.serve)])
        return app

    async def _stage(self, request: web.Request) -> web.Response:
        """`POST /stage`: the path, on this machine, of a version that the trainer has published."""
        version = await read(request, PolicyVersion)
        return web.json_response({"path": (await self.staged(version)).path})

    async def staged(self, version: PolicyVersion) -> PolicyVersion:
        """The local copy of a version of the data server. Raises the errors of VersionCache.staged."""
        return await self._cache.staged(version, self._head)

    def _work(self, up: Future[str]) -> None:
        try:
            asyncio.run(self._serve(up))
        finally:
            if not up.done():
                up.set_exception(ProcessError("the stager did not start"))

    async def _serve(self, up: Future[str]) -> None:
        runner = serving.runner(self.app(), shutdown_timeout=_SHUTDOWN_S)
        await runner.setup()
        try:
            up.set_result(await serving.listen(runner, self._address))
            await asyncio.to_thread(self._cache.closed.wait)
        except OSError as error:
            up.set_exception(ProcessError(f"--address: can't listen on {self._address}: {error.strerror}"))
        finally:
            await runner.cleanup()
