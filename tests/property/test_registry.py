"""The pool and its registry under a virtual clock: servers come, hang, die and leave while versions and requests go on,
and whatever the order, the recorded versions are correct and nothing waits or stays for ever."""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_core.api.pending_completions import PendingCompletions, receive
from areal_core.api.wire import ServerLoad
from areal_core.controller import pool as module
from areal_core.controller.core.tables import ServerCounters
from areal_core.controller.pool import GenerationPool
from areal_core.controller.registry import Server, ServerState
from areal_core.errors import ArealError, GenerationError, ServerLostError
from areal_core.generation.client import Take
from areal_core.types import GenerationRequest, PolicyVersion
from tests.support.generation import request
from tests.support.rollout import body
from tests.support.servers import server_load, version
from tests.support.virtual import run_virtual

PATIENCE_S = 60.0
NAMES = ("a", "b", "c")


class World:
    """The processes behind the pool, what they really do, and how likely a call of theirs goes wrong."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.fail = rng.choice((0.0, 0.02, 0.1))
        self.hang = rng.choice((0.0, 0.02))
        self.slow = 0.2 * rng.randint(0, 1)  # how likely a load exceeds the pool's timeout
        self.actual: dict[str, int] = {}  # version by URL
        self.sampled: Counter[str] = Counter()  # tokens by URL
        self.dead: set[str] = set()
        self.clients: list[Client] = []
        self.newest = version(0)
        self.pool: GenerationPool

    def start(self) -> str:
        """A new process, with the base model."""
        url = f"http://{len(self.actual)}"
        self.actual[url] = 0
        return url


class Client:
    """Stands in for a GenerationClient of one of the world's processes."""

    world: World

    def __init__(self, url: str, *, update_timeout_s: float, **_: object) -> None:
        self.url, self.update_timeout_s = url, update_timeout_s
        self.resubmitted_tokens = 0
        self.asked = self.returned = self.reported = 0  # tokens, at most
        self.closed = False
        self.aborted = asyncio.Event()
        self.world.clients.append(self)

    async def do(self, name: str) -> None:
        """Take a while, within the time that a client of vLLM has for it; maybe fail."""
        world, rng = self.world, self.world.rng
        long = name == "load_version"
        if self.closed:
            raise ServerLostError("the client is closed")
        if long and rng.random() < world.slow:
            seconds = rng.uniform(0.5, 1.5) * PATIENCE_S
        elif rng.random() < world.hang:
            seconds = 1e6
        else:
            seconds = rng.expovariate(0.5 if long else 20.0)
        try:
            async with asyncio.timeout(self.update_timeout_s if long else 10.0):
                await asyncio.sleep(seconds)
        except TimeoutError:
            raise ServerLostError(f"{name}: no response") from None
        if self.closed or self.url in world.dead:
            raise ServerLostError(f"{name}: it is gone")
        if rng.random() < world.fail:
            raise rng.choice((ServerLostError, GenerationError))(f"{name} failed")

    async def load_version(self, new: PolicyVersion, interruption: str) -> None:
        await self.do("load_version")
        self.world.actual[self.url] = new.version
        await self.do("resume")  # between the two it samples with a version that is not recorded yet

    async def loaded_version(self) -> int:
        await self.do("loaded_version")
        return self.world.actual[self.url]

    async def is_sleeping(self) -> bool:
        await self.do("is_sleeping")
        return False

    async def load(self) -> ServerLoad:
        sampled, returned = self.world.sampled[self.url], self.returned
        await self.do("load")
        self.reported = returned
        return server_load(sampled)

    @property
    def unreported_tokens(self) -> int:
        return self.asked - self.reported

    async def abort_all(self) -> None:
        await self.do("abort_all")
        self.aborted.set()
        self.aborted = asyncio.Event()

    async def generate(self, asked: GenerationRequest, take: Take) -> None:
        (server,) = (server for server in self.world.pool.registry.servers if server.client is self)
        assert server.at_work
        most = asked.n * asked.max_tokens
        self.asked += most
        sampled = self.world.rng.randint(0, most)  # whatever becomes of it
        indices = tuple(range(asked.n))
        try:
            if asked.n > 1 and self.world.rng.random() < 0.5:  # the first one ends before the others
                await self.do("generate")
                sampled = max(sampled, asked.max_tokens)
                first = [(range(5, 5 + asked.max_tokens), "length")]
                take(indices[:1], receive(body(first, self.world.actual[self.url])))
                indices = indices[1:]
            try:
                async with asyncio.timeout(self.world.rng.expovariate(0.2)):
                    await self.aborted.wait()
                finish = "abort"
            except TimeoutError:
                finish = "length"
            tokens = list(range(5, 5 + (min(2, asked.max_tokens) if finish == "abort" else asked.max_tokens)))
            sampled = asked.max_tokens * (asked.n - len(indices)) + len(indices) * len(tokens)
            await self.do("generate")
            take(indices, receive(body([(tokens, finish)] * len(indices), self.world.actual[self.url])))
        finally:
            self.world.sampled[self.url] += sampled
            self.returned += most

    async def close(self) -> None:
        await asyncio.sleep(0)
        self.closed = True

    def __getattr__(self, name: str) -> Any:
        async def call(*_: object) -> None:
            await self.do(name)

        return call


class Play:
    """Launcher, trainer and requests around a pool for a while, with checks of what must always hold."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.world = Client.world = World(self.rng)
        self.counters = ServerCounters(sqlite3.connect(":memory:", isolation_level=None))
        self.pool = self.world.pool = GenerationPool(
            completions_per_server=4, patience_s=PATIENCE_S, counters=self.counters
        )
        self.registry = self.pool.registry
        self.registry.subscribe(self.look)
        self.lowest = 0
        self.gone: Counter[Server] = Counter()
        self.reported: Counter[str] = Counter()  # URLs, by the launcher's looks
        self.urls: dict[str, str] = {}  # of the newest process of a name
        self.over = False

    def look(self, server: Server, before: ServerState) -> None:
        if server.gone and before not in (ServerState.LOST, ServerState.ENDED):
            self.gone[server] += 1
        working = [one for one in self.registry.servers if one.at_work]
        for one in working:
            actual = self.world.actual[one.url]
            assert one.loaded is not None
            assert one.loaded.version <= actual
            assert one.loaded.version == actual or one.state is ServerState.UPDATING, (one, actual)
        assert len(working) == len({one.name for one in working})
        for one in self.registry.servers:
            if one.state is ServerState.JOINING:
                assert one.name not in {other.name for other in working}
        assert len(set(self.pool.registry.lost)) == len(self.pool.registry.lost)
        assert not set(self.pool.registry.lost) & {one.url for one in working}
        assert len(self.pool.registry.at_work) == len(working)
        if working:
            assert self.pool.version == min(one.loaded.version for one in working)
            assert self.pool.version >= self.lowest, "i went back"
            self.lowest = self.pool.version

    async def pause(self, mean_s: float) -> None:
        await asyncio.sleep(self.rng.expovariate(1 / mean_s))

    async def join(self, name: str) -> None:
        """As a launcher does: register it again until it has joined, or another has come."""
        url = self.urls[name] = self.world.start()
        while not self.over and self.urls[name] == url and url not in self.world.dead:
            try:
                async with asyncio.timeout(self.rng.choice((1.0, 1000.0))):
                    await self.pool.join(name, url, lambda: self.world.newest)
                return
            except (TimeoutError, ArealError):
                await asyncio.sleep(1.0)

    async def launcher(self, tasks: asyncio.TaskGroup) -> None:
        """Starts what was lost again, once for each time that it is reported."""
        for name in NAMES:
            tasks.create_task(self.join(name))
        while not self.over:
            await asyncio.sleep(1.0)
            for url in self.pool.registry.lost:
                name = next((name for name, known in self.urls.items() if known == url), None)
                if name is not None:
                    self.reported[url] += 1
                    self.world.dead.add(url)
                    tasks.create_task(self.join(name))

    async def trouble(self, tasks: asyncio.TaskGroup) -> None:
        while not self.over:
            await self.pause(40.0)
            name = self.rng.choice(NAMES)
            match self.rng.randrange(5):
                case 0:
                    self.world.dead.add(self.urls[name])
                    await self.pool.check()
                case 1:
                    await self.pool.leave(name)
                    tasks.create_task(self.join(name))
                case 2:  # by hand, in the place of one that is at work
                    tasks.create_task(self.join(name))
                case 3:
                    await self.pool.sleep()
                    await self.pool.wake_up()
                case _:
                    await self.pool.check()

    async def publisher(self) -> None:
        while not self.over:
            await self.pause(30.0)
            self.world.newest = version(self.world.newest.version + 1)
            await self.pool.load_version(self.world.newest)

    async def requests(self, index: int) -> None:
        number = 0
        while not self.over:
            number += 1
            pending = PendingCompletions(request(f"{index}-{number}", n=2, max_tokens=6, stop_token_ids=()))
            try:
                await self.pool.generate(pending)
                assert not pending.unfinished()
            except GenerationError:
                await asyncio.sleep(0.1)

    async def turns(self) -> None:
        """No holder keeps the exclusive lock for ever: whoever waits for it gets it."""
        while not self.over:
            async with asyncio.timeout(12 * PATIENCE_S), self.registry.exclusive:
                pass
            await self.pause(20.0)

    async def run(self, seconds: float) -> None:
        async with asyncio.TaskGroup() as tasks:
            for work in (self.launcher(tasks), self.trouble(tasks), self.publisher(), self.turns()):
                tasks.create_task(work)
            for index in range(3):
                tasks.create_task(self.requests(index))
            await asyncio.sleep(seconds)
            self.over = True
        await self.recovered()
        await self.pool.loads()
        sampled = sum(self.world.sampled.values())
        assert self.counters.generated() <= sampled <= self.counters.generated() + self.counters.uncounted()
        await self.pool.close()
        assert self.registry.servers == ()
        assert not self.registry.exclusive.locked()
        assert all(client.closed for client in self.world.clients)
        assert len(self.gone) == len(self.world.clients)
        assert set(self.gone.values()) == {1}
        assert set(self.reported.values()) <= {1}
        assert asyncio.all_tasks() == {asyncio.current_task()}

    async def recovered(self) -> None:
        """Once all goes well, every server that is started joins and has the newest version."""
        self.world.fail = self.world.hang = self.world.slow = 0.0
        self.over = False
        for name in NAMES:
            await self.join(name)
        await self.pool.load_version(self.world.newest)
        assert {server.name for server in self.registry.at_work} == set(NAMES)
        assert {server.loaded for server in self.registry.at_work} == {self.world.newest}
        assert self.pool.registry.lost == ()


@settings(max_examples=8)
@given(seed=st.integers(0, 2**32))
def test_versions_are_true_and_nothing_waits_or_stays_whatever_becomes_of_the_servers(seed: int) -> None:
    async def play() -> None:
        await Play(seed).run(1200.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "GenerationClient", Client)
        run_virtual(play())
