"""Transfers that the trainer drives, with clients that do as they are told."""

import asyncio
import contextlib

import aiohttp
import pytest
from aiohttp import web

from areal_core.controller.registry import ServerRegistry
from areal_core.controller.weight_transfer import Transfer, transfer_routes
from areal_core.errors import GenerationError, ServerLostError
from areal_core.types import PolicyVersion

INIT = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 4}


def version(number):
    return PolicyVersion(version=number, path=f"/weights/{number}", sha256=f"hash-{number}")


class Client:
    """Notes what it is asked, and fails what is in `broken`."""

    def __init__(self, size):
        self.url, self.size, self.calls, self.broken, self.slow_s = "", size, [], set(), 0.0

    def __getattr__(self, name):
        async def call(*arguments):
            self.calls.append((name, *arguments))
            await asyncio.sleep(self.slow_s)
            if name in self.broken:
                raise ServerLostError(f"{name} failed")
            return self.size

        return call

    @property
    def names(self):
        return [name for name, *_ in self.calls if name != "world_size"]


class Pool:
    """Two servers, of one and of two processes, and their transfers."""

    def __init__(self, patience_s=5.0):
        self.registry = ServerRegistry()
        self.lock = self.registry.exclusive
        self.servers = {}
        self.removed = {}
        for name, size in (("a", 1), ("b", 2)):
            self.add(name, size)
        self.registry.subscribe(self._note)
        self.transfer = Transfer(self.registry, "recompute", patience_s)

    def add(self, name, size):
        server = self.servers[name] = self.registry.announce(name, Client(size))
        self.registry.apply(server, "join")
        self.registry.apply(server, "serve")

    def _note(self, server, before):
        if server.gone:
            self.removed[server.name] = server.why
            del self.servers[server.name]


@contextlib.asynccontextmanager
async def served(app):
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield "http://{}:{}".format(*runner.addresses[0][:2])
    await runner.cleanup()


@pytest.fixture
async def pool():
    return Pool()


def has_loaded(pool, name, version):
    pool.registry.apply(pool.servers[name], "update")
    pool.registry.apply(pool.servers[name], "load", version=version)


async def send(transfer, number):
    await transfer.begin(version(number))
    await transfer.receive({"names": ["w"]})
    await transfer.end()


async def test_every_server_goes_through_the_phases_with_ranks_of_its_own(pool):
    a, b = pool.servers["a"], pool.servers["b"]
    assert await pool.transfer.group(version(1)) == {"needed": True, "open": False, "world_size": 3}
    await pool.transfer.open(INIT)
    waiting = asyncio.ensure_future(pool.transfer.wait(version(1)))
    await send(pool.transfer, 1)
    await waiting
    for server, offset in ((a, 1), (b, 2)):
        assert server.loaded == version(1)
        assert [call for call in server.client.calls if call[0] != "world_size"] == [
            ("open_transfer", INIT | {"rank_offset": offset}),
            ("begin_transfer", version(1), "recompute"),
            ("receive", {"names": ["w"]}),
            ("end_transfer", version(1), "recompute"),
        ]
    assert await pool.transfer.group(version(1)) == {"needed": False, "open": True, "world_size": 3}
    assert (await pool.transfer.group(version(2)))["needed"]
    assert not pool.lock.locked()


@pytest.mark.parametrize("phase", ["begin_transfer", "receive", "end_transfer"])
async def test_a_server_that_fails_a_phase_is_taken_out_and_the_others_go_on(pool, phase):
    a, b = pool.servers["a"], pool.servers["b"]
    await pool.transfer.open(INIT)
    b.client.broken.add(phase)
    await pool.transfer.begin(version(1))
    if phase == "receive":  # NCCL's trainer waits for it
        with pytest.raises(GenerationError, match="the group is broken"):
            await pool.transfer.receive({"names": ["w"]})
    else:
        await pool.transfer.receive({"names": ["w"]})
    await pool.transfer.end()
    assert pool.removed == {"b": f"{phase} failed"}
    assert (a.loaded, b.loaded) == (version(1), None)
    assert b.client.names[-1] == phase
    assert (await pool.transfer.group(version(2)))["open"] is False  # it must be built again


async def test_a_server_that_joins_takes_part_once_a_new_group_is_open(pool):
    await pool.transfer.open(INIT)
    pool.add("c", 1)
    assert await pool.transfer.group(version(1)) == {"needed": True, "open": False, "world_size": 4}
    with pytest.raises(GenerationError, match="open a new group"):
        await pool.transfer.begin(version(1))
    assert not pool.lock.locked()
    assert all("begin_transfer" not in server.client.names for server in pool.servers.values())
    await pool.transfer.open(INIT)
    assert pool.servers["a"].client.names[-2:] == ["close_transfer", "open_transfer"]
    assert pool.servers["c"].client.names == ["open_transfer"]
    await send(pool.transfer, 2)
    assert {server.loaded for server in pool.servers.values()} == {version(2)}


async def test_a_trainer_that_stays_away_costs_the_servers_their_place_and_nobody_waits(pool):
    pool = Pool(patience_s=0.05)
    await pool.transfer.open(INIT)
    await pool.transfer.begin(version(1))
    async with asyncio.timeout(5):
        async with pool.lock:  # free again
            pass
    assert set(pool.removed) == {"a", "b"}
    with pytest.raises(GenerationError, match="no transfer of weights is under way"):
        await pool.transfer.receive({})


async def test_a_trainer_that_begins_again_gives_up_what_it_began(pool):
    a, b = pool.servers["a"], pool.servers["b"]
    await pool.transfer.open(INIT)
    await pool.transfer.begin(version(1))
    async with asyncio.timeout(2):  # not at the deadline
        with pytest.raises(GenerationError, match="open a new group"):
            await pool.transfer.begin(version(1))
    assert set(pool.removed) == {"a", "b"}
    assert a.client.names.count("begin_transfer") + b.client.names.count("begin_transfer") == 2


async def test_a_trainer_that_was_restarted_gives_up_what_the_one_before_began(pool):
    await pool.transfer.open(INIT)
    await pool.transfer.begin(version(1))
    async with asyncio.timeout(2):
        await pool.transfer.open(INIT)
    assert set(pool.removed) == {"a", "b"}
    assert not pool.lock.locked()


async def test_a_deadline_that_passes_in_a_phase_ends_the_transfer_once(pool):
    pool = Pool(patience_s=0.05)
    await pool.transfer.open(INIT)
    await pool.transfer.begin(version(1))
    for server in pool.servers.values():
        server.client.slow_s = 0.2
    a = pool.servers["a"]
    with pytest.raises(GenerationError, match="version 1 was given up meanwhile"):
        await pool.transfer.end()
    assert set(pool.removed) == {"a", "b"}
    assert a.loaded is None
    assert not pool.lock.locked()


async def test_what_a_trainer_makes_once_more_is_needed_nowhere(pool):
    """Servers hold version 13, a trainer replays from 11, and may make other weights of 13."""
    await pool.transfer.open(INIT)
    await send(pool.transfer, 13)
    newest = version(13)
    app = web.Application()
    app.add_routes(transfer_routes(pool.transfer, lambda: newest))
    async with served(app) as url, aiohttp.ClientSession(raise_for_status=True) as http:

        async def needed(number):
            return (await (await http.get(f"{url}/transfer?version={number}")).json())["needed"]

        assert [await needed(number) for number in (11, 12, 13)] == [False] * 3
        newest = PolicyVersion(version=13, path="/weights/13", sha256="other")
        assert [await needed(number) for number in (12, 13)] == [False, True]
        newest = None  # damaged, and to be made again
        assert [await needed(number) for number in (12, 13)] == [False, False]
        assert not (await http.post(f"{url}/transfer/start_weight_update", raise_for_status=False)).ok


async def test_who_does_not_get_the_version_in_time_is_taken_out(pool):
    pool = Pool(patience_s=0.05)
    has_loaded(pool, "a", version(1))
    await pool.transfer.wait(version(1))
    assert set(pool.removed) == {"b"}
    assert "version 1 did not come" in pool.removed["b"]


async def test_nobody_waits_for_a_server_that_is_gone(pool):
    has_loaded(pool, "a", version(1))
    waiting = asyncio.ensure_future(pool.transfer.wait(version(1)))
    await asyncio.sleep(0)
    pool.registry.apply(pool.servers["b"], "fail", "it died")
    async with asyncio.timeout(2):
        await waiting


async def test_to_the_trainer_the_controller_is_one_server(pool):
    app = web.Application()
    app.add_routes(transfer_routes(pool.transfer, lambda: version(3)))
    async with served(app) as url, aiohttp.ClientSession(raise_for_status=True) as http:
        for path, body in (
            ("init_weight_transfer_engine", {"init_info": {"packed": True}}),
            ("start_weight_update", None),
            ("update_weights", {"update_info": [{"names": ["w"]}]}),
            ("finish_weight_update", {"weight_version": None}),
        ):
            await http.post(f"{url}/transfer/{path}", json=body)
        group = await (await http.get(f"{url}/transfer?version=3")).json()
    assert group == {"needed": False, "open": True, "world_size": 3}
    assert pool.servers["a"].client.calls[:4] == [
        ("open_transfer", {"packed": True}),
        ("begin_transfer", version(3), "recompute"),
        ("receive", [{"names": ["w"]}]),
        ("end_transfer", version(3), "recompute"),
    ]
