"""The pool of servers, against servers that do as they are told."""

import asyncio
from unittest.mock import AsyncMock, MagicMock

import aiohttp
import pytest
from aiohttp import web

from areal_core.api.pending_completions import PendingCompletions
from areal_core.api.wire import ROLLOUT, join_completions
from areal_core.controller import pool as module
from areal_core.controller.core.ledger import TrajectoryLedger
from areal_core.controller.pool import GenerationPool
from areal_core.controller.registry import ServerRegistry
from areal_core.controller.routes import server_routes
from areal_core.errors import GenerationError, ServerLostError
from areal_core.generation.client import GenerationClient
from areal_core.types import Tally
from tests.support.generation import request
from tests.support.servers import FakeServer, version

WHOLE = list(range(5, 29))  # what a server makes of `request`, interrupted or not


@pytest.fixture
async def servers():
    async with FakeServer() as first, FakeServer() as second:
        yield first, second


@pytest.fixture
async def pool():
    pool = GenerationPool(completions_per_server=10, patience_s=5)
    yield pool
    await pool.close()


async def both(servers, pool):
    for name, server in zip("ab", servers, strict=True):
        await pool.join(name, server.url, lambda: version(0))


async def until(condition):
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def ask(pool, request_id="r", **changes):
    """The tokens of the completions of a request."""
    return await finish(pool, PendingCompletions(request(request_id, **changes)))


async def finish(pool, pending):
    await pool.generate(pending)
    return tokens(pending)


def tokens(pending):
    return [completion.token_ids.tolist() for completion in join_completions(pending.completions())]


async def interrupt(server):
    """End what runs at a server, behind the pool's back."""
    client = GenerationClient(server.url)
    await client.abort_all()
    await client.close()


@pytest.mark.parametrize(
    "path", ["/start_weight_update", "/update_weights", "/pause", "/finish_weight_update", "/resume"]
)
@pytest.mark.parametrize("status", [400, 500])
async def test_a_server_that_fails_a_phase_is_lost_and_the_others_go_on(servers, pool, path, status):
    await both(servers, pool)
    servers[0].broken[path] = status
    await pool.load_version(version(1))
    assert (pool.version, pool.room) == (1, 10)
    servers[1].release.clear()
    async with servers[1].runs(ask(pool)) as call:
        pass
    assert call.result() == [WHOLE]


async def test_a_server_of_a_controller_that_is_gone_is_woken_and_decodes_nothing_before_it_is_used(servers, pool):
    aborted = ("/pause?mode=abort&clear_cache=false", None)
    servers[0].orphans, servers[0].label, servers[0].sleeping = 3, "1", True
    for name, server in zip("ab", servers, strict=True):
        await pool.join(name, server.url, lambda: version(1))
    assert servers[0].updates()[:3] == [("/wake_up", None), aborted, ("/resume", None)]
    assert not servers[0].sleeping
    assert aborted not in servers[1].updates()
    assert await ask(pool) == [WHOLE]


async def test_requests_wait_for_a_server_and_give_up_or_are_cancelled(servers):
    pool = GenerationPool(completions_per_server=10, patience_s=0.05)
    with pytest.raises(GenerationError, match="no generation server joined"):
        await ask(pool)
    pool = GenerationPool(completions_per_server=10, patience_s=5)
    cancelled, call = asyncio.ensure_future(ask(pool)), asyncio.ensure_future(ask(pool))
    await asyncio.sleep(0)
    cancelled.cancel()
    async with asyncio.timeout(1):
        await asyncio.wait([cancelled])
    assert cancelled.cancelled()
    await pool.join("a", servers[0].url, lambda: None)
    assert await call == [WHOLE]
    await pool.close()


async def test_a_request_that_is_cancelled_is_ended_at_its_servers_and_hands_over_what_it_has(servers, pool):
    """It was interrupted, and the rest of it has gone to the servers with the least to do."""
    await both(servers, pool)
    servers[0].release.clear()
    servers[1].release.clear()
    pending, other = PendingCompletions(request(n=4)), PendingCompletions(request("other"))
    call = asyncio.ensure_future(pool.generate(pending))
    await servers[0].started("r")
    await interrupt(servers[0])
    await servers[0].started("r-0-2", "r-2-2")
    await servers[1].started("r-1-2", "r-3-2")
    again = servers[1].requests["r-3-2"]
    assert (again["token_ids"], again["sampling_params"]["n"]) == ([2, 3, 4, 5, 6], 1)
    assert [load.recomputed_tokens for load in await pool.loads()] == [1 + 2 * 5, 1 + 2 * 5]  # a prompt of 3, 2 sampled
    another = asyncio.ensure_future(pool.generate(other))
    await servers[0].started("other")
    call.cancel()
    await asyncio.sleep(0)
    call.cancel()  # once more: it counts all the same
    with pytest.raises(asyncio.CancelledError):
        await call
    assert pending.sampled() == Tally(tokens=4 * (2 + 2))
    assert pending.unfinished() == [0, 1, 2, 3]
    assert servers[0].cancelled == servers[1].cancelled == 0
    servers[0].release.set()
    await another
    assert tokens(other) == [WHOLE]
    assert pool.room == 20


async def test_a_server_that_hands_nothing_over_is_taken_out(servers, pool, monkeypatch):
    monkeypatch.setattr(module, "_HAND_OVER_S", 0.05)
    counters = pool.counters
    await pool.join("a", servers[0].url, lambda: version(0))
    servers[0].release.clear()
    servers[0].hanging.add("/abort_requests")
    call = asyncio.ensure_future(ask(pool, "group-1-0", n=2))
    await servers[0].started("group-1-0")
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert pool.registry.lost == (servers[0].url,)
    assert counters.uncounted() == 2 * 24


# -- what servers have counted -----------------------------------------------------------------------------------------


async def test_a_server_that_a_new_controller_finds_goes_on_counting(servers, tmp_path):
    ledger = TrajectoryLedger(tmp_path / "ledger.sqlite", group_size=2)
    for counted, joined in ((10, 0), (25, 15), (3, 15)):  # the last one was started again
        ledger.resume(0)
        pool = GenerationPool(completions_per_server=10, patience_s=5, counters=ledger.counters)
        servers[0].counted = counted
        await pool.join("a", servers[0].url, lambda: version(0))
        assert ledger.tokens().generated == joined
        await pool.close()
    assert ledger.tokens().allowance == 0
    ledger.close()


async def test_what_a_lost_server_has_reported_counts_though_another_one_hangs(servers, pool):
    await pool.join("a", servers[0].url, lambda: version(0))
    await ask(pool, f"{ROLLOUT}1")
    await pool.join("b", servers[1].url, lambda: version(0))
    server = pool.registry.at_work[0]
    sampled = server.client.unreported_tokens
    servers[0].counted, servers[1].hanging = 1 + sampled, {"/load"}
    looking = asyncio.ensure_future(pool.loads())
    await until(lambda: server.client.unreported_tokens == 0)
    pool.registry.apply(server, "fail", "it is gone")
    assert pool.counters.generated() + pool.counters.uncounted() == sampled > 0
    servers[1].hanging.clear()
    await looking


# -- completions that were interrupted ---------------------------------------------------------------------------------


async def test_completions_are_taken_as_they_end_and_free_their_places(servers, pool):
    await pool.join("a", servers[0].url, lambda: version(0))
    freed, pending = [], PendingCompletions(request(n=4))
    pool.freed = lambda: freed.append(pool.room)
    servers[0].release.clear()
    servers[0].early["r"] = [1, 2]
    call = asyncio.ensure_future(pool.generate(pending))
    assert not pending.sent
    await until(lambda: freed)
    assert pending.sent
    assert (freed, pending.unfinished()) == ([8], [0, 3])
    assert [index for index, _ in pending.finished()] == [1, 2]
    servers[0].release.set()
    await call
    assert (freed, pool.room) == ([8, 10], 10)
    assert tokens(pending) == [WHOLE] * 4


async def test_a_part_that_can_not_be_read_keeps_no_other_from_being_taken(servers, pool):
    await pool.join("a", servers[0].url, lambda: version(0))
    servers[0].early["r"] = [1]
    pending = PendingCompletions(request(n=3))
    take = pending.take

    def refusing(indices, body):
        if 1 in indices:
            raise GenerationError("unreadable")
        take(indices, body)

    pending.take = refusing
    with pytest.raises(GenerationError, match="unreadable"):
        await pool.generate(pending)
    assert (pending.unfinished(), pool.room, pool.registry.lost) == ([1], 10, ())


async def test_a_completion_that_fails_does_not_keep_others_from_being_finished(servers, pool):
    await pool.join("a", servers[0].url, lambda: version(0))
    servers[0].release.clear()
    pending = PendingCompletions(request(n=2))
    call = asyncio.ensure_future(pool.generate(pending))
    await servers[0].started("r")
    servers[0].refused.add("r-0-2")
    servers[0].release_after_abort = True
    await interrupt(servers[0])
    with pytest.raises(GenerationError, match="400"):
        await call
    assert pending.unfinished() == [0]
    servers[0].refused.clear()
    assert await finish(pool, pending) == [WHOLE] * 2
    assert [call for call in servers[0].calls if isinstance(call, str)] == ["r", "r-0-2", "r-1-2", "r-0-2"]


async def test_a_join_that_is_asked_for_again_changes_nothing(servers, pool):
    await pool.join("a", servers[0].url, lambda: version(3))
    asked = len(servers[0].calls)
    servers[0].release.clear()
    async with servers[0].runs(ask(pool)) as call:
        await pool.join("a", servers[0].url, lambda: version(3))
        assert servers[0].calls[asked:] == ["r", ("/weight_info", None)]
    assert await call == [WHOLE]
    servers[0].label = "0"  # another one was started in its place
    await pool.join("a", servers[0].url, lambda: version(3))
    assert servers[0].label == "3"


async def test_servers_sleep_until_they_are_woken(servers, pool):
    await pool.join("a", servers[0].url, lambda: version(0))
    await pool.sleep()
    await pool.sleep()
    assert [path for path, _ in servers[0].updates()].count("/sleep?level=1&mode=abort") == 1
    await pool.join("b", servers[1].url, lambda: version(0))
    assert servers[1].sleeping  # one that comes meanwhile, too
    await pool.wake_up()
    assert not servers[0].sleeping
    assert not servers[1].sleeping


async def test_a_completion_of_a_server_that_leaves_goes_on_at_another_under_no_older_weights(servers, pool):
    await both(servers, pool)
    servers[0].release.clear()
    pending = PendingCompletions(request())
    call = asyncio.ensure_future(pool.generate(pending))
    await servers[0].started("r")
    servers[1].hanging.add("/update_weights")
    updating = asyncio.ensure_future(pool.load_version(version(1)))
    await until(lambda: servers[0].label == "1" and ("/resume", None) in servers[0].calls[-1:])
    leaving = asyncio.ensure_future(pool.leave("a"))
    await asyncio.sleep(0.05)
    assert servers[1].requests == {}
    servers[1].hanging.clear()
    await asyncio.gather(updating, leaving)
    await call
    assert (servers[1].requests.keys(), pool.room) == ({"r-0-2"}, 10)
    [completion] = join_completions(pending.completions())
    assert (completion.token_ids.tolist(), completion.versions.tolist()) == (WHOLE, [1] * len(WHOLE))


async def test_a_request_that_arrives_at_a_server_which_leaves_is_aborted_again(servers, pool, monkeypatch):
    monkeypatch.setattr(module, "_ABORT_RETRY_S", 0.05)
    await pool.join("a", servers[0].url, lambda: version(0))
    servers[0].release.clear()
    servers[0].late = asyncio.Event()
    call = asyncio.ensure_future(ask(pool))
    await servers[0].started("r")
    await pool.join("b", servers[1].url, lambda: version(0))
    leaving = asyncio.ensure_future(pool.leave("a"))
    await until(lambda: ("/pause?mode=abort&clear_cache=false", None) in servers[0].calls)
    servers[0].late.set()
    await leaving
    assert await call == [WHOLE]
    assert servers[1].requests.keys() == {"r-0-2"}


# -- servers that take their time --------------------------------------------------------------------------------------


async def test_a_server_that_is_slow_to_join_holds_up_nobody_and_catches_up(servers, pool):
    newest = version(1)
    await pool.join("a", servers[0].url, lambda: newest)
    servers[1].hanging.add("/update_weights")
    joining = asyncio.ensure_future(pool.join("b", servers[1].url, lambda: newest))
    await until(lambda: any("/update_weights" in call for call in servers[1].calls))
    newest = version(2)
    async with asyncio.timeout(2):
        await pool.load_version(newest)
        await pool.leave("nobody")
    assert (pool.version, pool.room, servers[0].label) == (2, 10, "2")
    assert pool.loading == {1, 2}
    servers[1].hanging.clear()
    await joining
    assert pool.loading == {2}
    assert (pool.version, pool.room, servers[1].label) == (2, 20, "2")
    finished = [body for path, body in servers[1].updates() if path == "/finish_weight_update"]
    assert finished == [{"weight_version": "1"}, {"weight_version": "2"}]


async def test_a_server_that_does_not_catch_up_holds_up_others_for_a_while_only(servers, pool, monkeypatch):
    monkeypatch.setattr(module, "_LOADS_ALONE", 0)
    monkeypatch.setattr(module, "_LOAD_S", 0.05)
    servers[1].hanging.add("/update_weights")
    with pytest.raises(ServerLostError, match=r"^b: it did not load the newest version within 0\.05 s$"):
        await pool.join("b", servers[1].url, lambda: version(1))
    assert [server.loading for server in pool.registry.servers] == [None]
    assert not pool.registry.exclusive.locked()


async def test_over_http_a_join_that_takes_its_time_is_asked_for_again(servers, pool):
    app, published = web.Application(), asyncio.Event()
    app.add_routes(server_routes(pool, lambda: version(1), published.wait))
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    servers[0].hanging.add("/update_weights")
    async with aiohttp.ClientSession("http://{}:{}".format(*runner.addresses[0][:2])) as http:

        async def join(**more):
            async with http.post("/servers", json={"name": "a", "url": servers[0].url} | more) as response:
                return response.status

        assert (await join(timeout_s=0.05), pool.registry.servers) == (204, ())  # the newest version is still to come
        published.set()
        assert [await join(timeout_s=0.05) for _ in range(2)] == [204, 204]
        servers[0].hanging.clear()
        assert (await join(), pool.room) == (200, 10)
        async with http.delete("/servers/a") as response:
            assert (response.status, pool.room) == (200, 0)
    await runner.cleanup()


# -- the life of a server, as the picture of the registry has it -------------------------------------------------------


def serving(registry, name="a"):
    server = registry.announce(name, MagicMock(url=f"http://{name}"))
    registry.apply(server, "join")
    registry.apply(server, "serve")
    return server


@pytest.fixture
def registry():
    return ServerRegistry()


def test_the_next_incarnation_of_a_name_ends_one_that_is_lost_and_nobody_else(registry):
    other, lost, other_name = serving(registry), serving(registry), serving(registry, "b")
    for each in (lost, other_name):
        registry.apply(each, "fail")
    new = registry.announce("a", MagicMock())
    assert (lost.state.value, new.state.value) == ("ended", "announced")
    assert registry.servers == (other, other_name, new)
    assert registry.lost == ("http://b",)


async def test_servers_that_do_not_respond_have_failed_and_a_mistake_of_ours_is_raised(registry):
    servers = [serving(registry, name) for name in "abc"]

    async def call(server):
        if server.name == "b":
            raise GenerationError("no")
        return server.name

    assert await registry.call_each(servers, call) == {servers[0]: "a", servers[2]: "c"}
    assert servers[1].state.value == "lost"

    with pytest.raises(ZeroDivisionError):
        await registry.call_each(servers[:1], AsyncMock(side_effect=ZeroDivisionError))
    assert servers[0].at_work


async def test_an_update_that_a_newer_version_has_overtaken_touches_nobody(registry):
    server = serving(registry)
    registry.target = version(2)  # of one that has joined while this one waited
    await registry.update(version(1), AsyncMock())
    assert (server.state.value, server.loaded) == ("serving", None)


@pytest.mark.parametrize("error", [ZeroDivisionError, asyncio.CancelledError])
async def test_an_update_that_is_broken_off_leaves_no_server_with_half_of_it(registry, error):
    server = serving(registry)
    registry.target = version(1)
    with pytest.raises(error):
        await registry.update(version(1), AsyncMock(side_effect=error))
    assert server.state.value == "lost"
    assert not registry.exclusive.locked()
