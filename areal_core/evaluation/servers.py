"""Generation servers that score a run's versions (`evaluation.servers`).

- Own engine: one embedded engine on a core, which the evaluator steps itself.
- Own servers: launched beside the run's servers. They load each version to be scored.
- Borrowed: one of the run's servers. It leaves the run, loads the version, and joins again after scoring.
"""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

from areal_core.api.controller_client import ControllerClient
from areal_core.config.schema import RunConfig
from areal_core.errors import GenerationError, ProcessError, ServerLostError
from areal_core.evaluation.sampling import Collector
from areal_core.generation.client import GenerationClient
from areal_core.generation.engines.engine import ServedEngine, make_engine, read_version
from areal_core.launch import heartbeat
from areal_core.models.spec import read_spec
from areal_core.storage.rundir import RunDir, write_json
from areal_core.types import Completion, GenerationRequest, PolicyVersion

logger = logging.getLogger(__name__)
ROLE = "evaluation"  # of the evaluator's own servers, in file names
_BORROWED = "borrowed"  # name of the file with the borrowed server
_RETRY_S = 1.0  # between two tries to reach a server


def open_servers(run: RunDir, config: RunConfig) -> Servers:
    """The servers that `evaluation.servers` selects. Raises ModelError if the engine can't run the model.

    `work_on` loads a version and works until all problems are recorded, or one has failed.
    """
    if not config.evaluation.servers:
        return BorrowedServer(run, config)
    if config.evaluation_servers:
        its = config.evaluation
        return OwnServers(run, config, role=ROLE, count=its.servers, completions=2 * its.slots)
    folder, slots = Path(run.info().model_path), config.evaluation.slots
    spec = read_spec(folder)
    context = min(spec.context, config.context)
    engine = make_engine(
        config.evaluation.engine,
        folder,
        spec,
        {"slots": slots, "context": context, "version": 0, "device": "cpu"},
    )
    return OwnEngine(engine, slots=slots)


class OwnEngine:
    """The embedded engine in this process; each engine step takes one turn of the event loop."""

    def __init__(self, engine: ServedEngine, *, slots: int) -> None:
        """`engine` holds the base model, and decodes `slots` completions at once."""
        self.url = "the evaluator's own engine"
        self._engine = engine
        self._slots = slots
        self._finished: dict[str, asyncio.Future[list[Completion]]] = {}  # by request id
        self._ended: dict[str, dict[int, Completion]] = {}  # ended completions of unfinished requests
        self._stepping: asyncio.Task[None] | None = None

    async def work_on(self, collector: Collector, version: PolicyVersion) -> None:
        if collector.over:
            return
        if version.version or self._engine.version:  # else the engine already holds the base model
            self._engine.swap(read_version(self._engine, Path(version.path), version.digest), version.version)
        await collector.work(self, 2 * self._slots)

    async def complete(self, request: GenerationRequest) -> list[Completion]:
        self._engine.add(request)
        finished = self._finished[request.request_id] = asyncio.get_running_loop().create_future()
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._step())
        try:
            return await finished
        except asyncio.CancelledError:
            self._engine.abort([request.request_id])
            raise
        finally:
            del self._finished[request.request_id]
            self._ended.pop(request.request_id, None)

    async def _step(self) -> None:
        """Step the engine while requests are waiting."""
        try:
            while self._finished:
                heartbeat.progressed()
                for generation in self._engine.step():
                    ended = self._ended.setdefault(request_id := generation.request.request_id, {})
                    ended.update(generation.completions)
                    if generation.last and not (future := self._finished[request_id]).done():  # not cancelled
                        future.set_result([ended[index] for index in range(len(ended))])
                await asyncio.sleep(0)
        except Exception as error:  # noqa: BLE001 - raised by all waiting requests
            for future in self._finished.values():
                if not future.done():
                    future.set_exception(error)


class _RunServers:
    """Servers that load each version to be scored."""

    def __init__(self, run: RunDir, config: RunConfig) -> None:
        self._run, self._config = run, config

    async def _score(
        self, url: str, collector: Collector, version: PolicyVersion, completions: int, stager: str | None = None
    ) -> None:
        """Let one server load a version and work on problems. Raises ServerLostError."""
        client = GenerationClient(
            url,
            token=self._run.token(),
            stager=stager,
            adapters=self._config.training.lora.rank is not None,
            update_timeout_s=self._config.rollout.request_timeout_s,
        )
        try:
            await client.identify()
            await _load(client, version)
            await collector.work(client, completions)
        except ServerLostError:
            raise
        except GenerationError as error:
            raise ProcessError(f"{url} can't evaluate version {version.version}: {error}") from error
        finally:
            await client.close()


class OwnServers(_RunServers):
    """Servers that the launcher runs only for evaluation, and restarts when they exit."""

    def __init__(self, run: RunDir, config: RunConfig, *, role: str, count: int, completions: int) -> None:
        """`role` is the role in their ready files. Each server works on about `completions` at once."""
        super().__init__(run, config)
        self._role, self._count, self._completions = role, count, completions

    async def work_on(self, collector: Collector, version: PolicyVersion) -> None:
        with heartbeat.waiting(self._role, f"version {version.version}: scoring"):
            await asyncio.gather(*(self._work_on(index, collector, version) for index in range(self._count)))

    async def _work_on(self, index: int, collector: Collector, version: PolicyVersion) -> None:
        said = ""
        while not collector.over:
            info = self._run.ready_info(self._role, index)
            if info is not None:
                try:
                    await self._score(info["url"], collector, version, self._completions)
                    return
                except ServerLostError as error:
                    if said != (said := str(error)):
                        logger.warning("%s", said)
            await asyncio.sleep(_RETRY_S)


class BorrowedServer(_RunServers):
    """One of the run's servers at a time; meanwhile the others generate its completions.
    At least one other server is serving when it leaves."""

    def __init__(self, run: RunDir, config: RunConfig) -> None:
        super().__init__(run, config)
        self._controller = ControllerClient(run)
        self._file = run.ready_file(_BORROWED)  # a new launcher, with new servers, removes this file

    async def work_on(self, collector: Collector, version: PolicyVersion) -> None:
        if self._file.exists():  # left by an evaluator that was killed
            await self._give_back(json.loads(self._file.read_text()))
        while not collector.over:
            with heartbeat.waiting("controller-0", f"version {version.version}: no server to borrow"):
                server = await self._borrow()
            try:
                with heartbeat.waiting(server["name"], f"version {version.version}: scoring"):
                    completions = 2 * self._config.generation.slots
                    await self._score(server["url"], collector, version, completions, server["stager"])
            except ServerLostError as error:
                logger.warning("borrowed server %s failed: %s", server["name"], error)
                await asyncio.sleep(_RETRY_S)
            finally:
                await self._give_back(server)

    async def _borrow(self) -> dict[str, Any]:
        """Let the serving server with the fewest completions leave the run, and return it."""
        while True:
            servers = await asyncio.to_thread(self._controller.servers)
            serving = [server for server in servers if server["state"] == "serving"]
            if len(serving) > 1:
                least = min(serving, key=lambda server: server["completions"])
                borrowed = {key: least[key] for key in ("name", "url", "stager")}
                write_json(self._file, borrowed)
                await asyncio.to_thread(self._controller.leave, borrowed["name"])
                return borrowed
            await asyncio.sleep(_RETRY_S)

    async def _give_back(self, server: dict[str, Any]) -> None:
        """Let the server join the run again, unless a restarted server of its name has joined.
        The controller takes out a server that can't join, and its supervisor restarts it."""
        try:
            if all(known["name"] != server["name"] for known in await asyncio.to_thread(self._controller.servers)):
                join = self._controller.join
                await asyncio.to_thread(join, server["name"], server["url"], stager=server["stager"])
        except ProcessError as error:
            logger.warning("borrowed server %s could not rejoin: %s", server["name"], error)
        self._file.unlink(missing_ok=True)


Servers = OwnEngine | OwnServers | BorrowedServer


async def _load(client: GenerationClient, version: PolicyVersion) -> None:
    if version.version == 0 and await client.loaded_version() == 0:
        await client.resume()  # the server may have left while paused
    elif version.version == 0 and not client.in_place:
        await client.reload(version)  # a model folder may have several files
    else:
        await client.load_version(version, "wait")
