"""The generation servers that score a run's versions: the evaluator's own, or one at a time that the run lends.

own        launched beside the run's (`evaluation.servers`); they load a version when it is scored
borrowed   one of the run's: it leaves the run, loads the version, and joins again once that is scored
"""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Protocol

from areal_core.api.controller_client import ControllerClient
from areal_core.config.schema import RunConfig
from areal_core.errors import GenerationError, ProcessError, ServerLostError
from areal_core.evaluation.sampling import Collector
from areal_core.generation.client import GenerationClient
from areal_core.storage.rundir import RunDir, write_json
from areal_core.types import PolicyVersion

logger = logging.getLogger(__name__)
ROLE = "evaluation"  # of its own servers, in the names of their files
_BORROWED = "borrowed"  # the file that names the server that is borrowed
_AGAIN_S = 1.0  # between two tries to reach a server


class Servers(Protocol):
    """Servers that load a version and complete prompts with it."""

    async def open(self) -> None:
        """Put in order what an evaluator that was killed has left."""
        ...

    async def work_on(self, collector: Collector, version: PolicyVersion) -> None:
        """Have servers that hold `version` work until all is recorded, or a problem has failed."""
        ...


class OwnServers:
    """Servers that the launcher runs for the evaluator alone, and starts again when they end."""

    def __init__(self, run: RunDir, config: RunConfig) -> None:
        self._run = run
        self._config = config

    async def open(self) -> None:
        """Nothing is left: a server loads what it is told to."""

    async def work_on(self, collector: Collector, version: PolicyVersion) -> None:
        servers = range(self._config.evaluation.servers)
        await asyncio.gather(*(self._work_on(index, collector, version) for index in servers))

    async def _work_on(self, index: int, collector: Collector, version: PolicyVersion) -> None:
        complaint = ""
        while not collector.over:
            info = self._run.ready_info(ROLE, index)
            if info is not None:
                try:
                    await _score(info["url"], self._config, collector, version, slots=self._config.evaluation.slots)
                    return
                except ServerLostError as error:
                    if str(error) != complaint:
                        complaint = str(error)
                        logger.warning("%s", complaint)
            await asyncio.sleep(_AGAIN_S if complaint else _AGAIN_S / 10)


class BorrowedServer:
    """One of the run's servers at a time: what it generates for the run meanwhile, others do. There is always another
    one at work when it leaves."""

    def __init__(self, run: RunDir, config: RunConfig) -> None:
        self._config = config
        self._controller = ControllerClient(run)
        self._file = run.ready_file(_BORROWED)  # a new launcher, whose servers are new, forgets it

    async def open(self) -> None:
        if self._file.exists():
            borrowed = json.loads(self._file.read_text())
            await self._give_back(borrowed["name"], borrowed["url"])

    async def work_on(self, collector: Collector, version: PolicyVersion) -> None:
        while not collector.over:
            name, url = await self._borrow()
            try:
                await _score(url, self._config, collector, version, slots=self._config.generation.slots)
            except ServerLostError as error:
                logger.warning("%s, which was borrowed: %s", name, error)
                await asyncio.sleep(_AGAIN_S)
            finally:
                await self._give_back(name, url)

    async def _borrow(self) -> tuple[str, str]:
        """Name and URL of a server that has left the run: of those at work the one with the least to do."""
        while True:
            servers = await asyncio.to_thread(self._controller.servers)
            serving = [server for server in servers if server["state"] == "serving"]
            if len(serving) > 1:
                least = min(serving, key=lambda server: server["completions"])
                write_json(self._file, {"name": least["name"], "url": least["url"]})
                await asyncio.to_thread(self._controller.leave, least["name"])
                return least["name"], least["url"]
            await asyncio.sleep(_AGAIN_S)

    async def _give_back(self, name: str, url: str) -> None:
        """Have the server join the run again, unless one of its name, started anew, has done so. One that can't is
        taken out by the controller, and started again."""
        try:
            if all(server["name"] != name for server in await asyncio.to_thread(self._controller.servers)):
                await asyncio.to_thread(self._controller.join, name, url)
        except ProcessError as error:
            logger.warning("%s, which was borrowed, has not joined again: %s", name, error)
        self._file.unlink(missing_ok=True)


async def _score(url: str, config: RunConfig, collector: Collector, version: PolicyVersion, *, slots: int) -> None:
    """Have one server load a version and work. Raises ServerLostError."""
    client = GenerationClient(url, update_timeout_s=config.rollout.request_timeout_s)
    try:
        await client.identify()
        await _load(client, version)
        await collector.work(client, 2 * slots)
    except ServerLostError:
        raise
    except GenerationError as error:
        raise ProcessError(f"{url} can't score version {version.version}: {error}") from error
    finally:
        await client.close()


async def _load(client: GenerationClient, version: PolicyVersion) -> None:
    if version.version == 0 and await client.loaded_version() == 0:
        await client.resume()  # it may have left while it was paused
    elif version.version == 0 and not client.in_place:
        await client.reload(version)  # a model folder, of one file or several
    else:
        await client.load_version(version, "wait")
