"""The client of one server, against servers that do as they are told: the embedded one's dialect, and vLLM's."""

import asyncio
import threading

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from areal_core.api.pending_completions import Received
from areal_core.api.wire import version_name
from areal_core.errors import GenerationError, ServerLostError
from areal_core.generation import connection
from areal_core.generation.client import GenerationClient
from areal_core.generation.data_plane import DataPlane
from areal_core.models.tensorfile import write_tensors
from areal_core.storage.weights import publish
from areal_core.types import PolicyVersion
from tests.support.generation import request
from tests.support.lora import adapter, form
from tests.support.servers import FakeServer, generated, version
from tests.support.training import SPEC


@pytest.fixture
async def server():
    async with FakeServer() as server:
        yield server


stager = server  # on the machine of a server that shares no folder with this one


@pytest.fixture
async def vllm():
    async with FakeServer("0.32.0") as server:
        yield server


@pytest.fixture
async def connect():
    """Make a client that has identified its server; all are closed at the end."""
    clients = []

    async def made(server, **options):
        clients.append(GenerationClient(server.url, **options))
        await clients[-1].identify()
        return clients[-1]

    yield made
    for client in clients:
        await client.close()


@pytest.fixture
async def vllm_client(vllm, connect):
    client = await connect(vllm)
    vllm.calls.clear()
    return client


async def test_a_server_that_is_silent_is_lost(server, connect):
    client = await connect(server, update_timeout_s=0.05)
    server.hanging |= {"/health", "/finish_weight_update"}
    with pytest.raises(ServerLostError, match=r"/health: no response in 0\.2 s"):
        await client._control("GET", "/health", timeout_s=0.2)
    with pytest.raises(ServerLostError, match=r"version 1 was not loaded within 0\.05 s"):
        await client.load_version(version(1), "resubmit")


@pytest.fixture
def weights(tmp_path):
    """A version with a file, which vLLM's client looks at."""
    written = write_tensors(tmp_path / "model.safetensors", {"w": np.ones(3, np.float32)})
    return PolicyVersion(version=7, path=str(tmp_path), digest=written.digest)


@pytest.mark.parametrize(
    ("interruption", "pause"),
    [
        ("recompute", "/pause?mode=abort&clear_cache=true"),
        ("resubmit", "/pause?mode=abort&clear_cache=true"),
        ("keep", "/pause?mode=keep&clear_cache=false"),
        ("wait", "/pause?mode=wait&clear_cache=true"),
    ],
)
async def test_vllm_shares_no_cache_between_versions(vllm, vllm_client, weights, interruption, pause):
    for name in ("before", "too"):
        await vllm_client.complete(request(name))
    await vllm_client.load_version(weights, interruption)
    await vllm_client.complete(request("after"))
    before, too, after = (vllm.requests[name]["cache_salt"] for name in ("before", "too", "after"))
    assert before == too != after
    assert vllm.updates() == [
        ("/start_weight_update", None),
        ("/update_weights", {"update_info": {"path": weights.path, "digest": weights.digest}}),
        (pause, None),
        ("/finish_weight_update", {"weight_version": "7"}),
        ("/reset_prefix_cache", None),
        ("/resume", None),
    ]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda file: file.write_bytes(b"waights"), r"version 7 was not loaded: digest: .* has .*, expected "),
        (lambda file: file.unlink(), r"version 7 was not loaded: .*No such file"),
    ],
)
async def test_a_damaged_file_does_not_stop_vllm(vllm, vllm_client, weights, tmp_path, damage, said):
    damage(tmp_path / "model.safetensors")
    with pytest.raises(ServerLostError, match=said) as caught:
        await vllm_client.load_version(weights, "resubmit")
    assert "\n" not in str(caught.value)
    assert [path for path, _ in vllm.calls] == ["/start_weight_update", "/update_weights"]


async def test_the_load_of_vllm_is_what_its_metrics_say(vllm, vllm_client):
    metrics = (
        "# HELP vllm:num_requests_running Number of requests.\n"
        'vllm:num_requests_running{{engine="0",model_name="policy"}} 3.0\n'
        'vllm:num_requests_running{{engine="1",model_name="policy"}} 4.0\n'
        'vllm:num_requests_waiting{{engine="0"}} 2.0\n'
        'vllm:generation_tokens_total{{engine="0"}} {generated}\n'
    )
    vllm.metrics = metrics.format(generated="1e+02")
    vllm.release.clear()
    async with vllm.runs(generated(vllm_client, request("r"))):
        load = await vllm_client.load()
        assert (load.running, load.waiting, load.generated_tokens, load.rollout_tokens) == (7, 2, 100, 100)
        assert load.recomputed_tokens == 0
        vllm_client.resubmitted_tokens = 12
        vllm.metrics = metrics.format(generated="130.0")
        load = await vllm_client.load()
        assert (load.generated_tokens, load.recomputed_tokens) == (130, 12)
    vllm.metrics = metrics.format(generated="129.0")
    with pytest.raises(ServerLostError, match="the server has restarted"):
        await vllm_client.load()


async def test_vllm_gets_a_request_for_each_completion_with_the_seeds_that_it_would_give_them(vllm, vllm_client):
    """And each is taken when it ends; one that is refused keeps none of the others away."""
    vllm.refused.add("group-1-0.1")
    taken = []
    with pytest.raises(GenerationError, match="refused"):
        await vllm_client.generate(request("group-1-0", n=3, seed=7), lambda *part: taken.append(part))
    assert [indices for indices, _ in taken] == [(0,), (2,)]
    sent = [vllm.requests[f"group-1-0.{index}"]["sampling_params"] for index in range(3)]
    assert [(params["n"], params["seed"]) for params in sent] == [(1, 7), (1, 8), (1, 9)]


async def test_a_request_sent_in_parts_is_aborted_in_parts(vllm, vllm_client):
    vllm.release.clear()
    call = asyncio.ensure_future(vllm_client.complete(request("group-1-0", n=2)))
    await vllm.started("group-1-0.0", "group-1-0.1")
    await vllm_client.abort(["group-1-0", "unknown"])
    assert [completion.finish_reason for completion in await call] == ["abort", "abort"]
    assert vllm.calls[-1] == (
        "/abort_requests",
        {"request_ids": [f"generate-tokens-{name}" for name in ("group-1-0.0", "group-1-0.1", "unknown")]},
    )


async def test_tokens_since_the_last_report_are_bounded(vllm, vllm_client):
    """And those of others than the rollout are taken from what vLLM counts."""
    await vllm_client.complete(request("group-1-0", n=3))
    assert len(await vllm_client.complete(request("held-out-1", n=2))) == 2
    assert vllm_client.unreported_tokens == 3 * 24
    vllm.release.clear()
    async with vllm.runs(vllm_client.complete(request("group-2-0", n=2))):
        assert vllm_client.unreported_tokens == (3 + 2) * 24
        await asyncio.gather(vllm_client.load(), vllm_client.load())
        assert vllm_client.unreported_tokens == 2 * 24
    assert vllm_client.unreported_tokens == 2 * 24  # completed since
    vllm.metrics = "vllm:generation_tokens_total 200.0\n"
    load = await vllm_client.load()
    assert vllm_client.unreported_tokens == 0
    assert (load.generated_tokens, load.rollout_tokens) == (200, 200 - 2 * 24)


async def test_a_client_counts_the_time_without_requests_and_the_time_of_an_update(vllm, vllm_client, weights):
    vllm.release.clear()
    before = await vllm_client.load()
    async with vllm.runs(generated(vllm_client, request("r"))):
        begun, busy = await vllm_client.load(), await vllm_client.load()
    await vllm_client.load_version(weights, "resubmit")
    after = await vllm_client.load()
    assert before.idle_s < begun.idle_s == busy.idle_s < after.idle_s
    assert (before.paused_s, before.swap_ms) == (0.0, 0.0)
    assert after.swap_ms == 1e3 * after.paused_s > 0.0


@pytest.mark.parametrize(
    ("release", "said"),
    [
        ("0.31.9", "runs vLLM 0.31.9, must be vLLM 0.32.0 for its RL routes"),
        ("0.32.1+areal.13", "runs vLLM 0.32.1+areal.13, must be vLLM 0.32.0 for its RL routes"),
        ("0.32.0+areal", "has routes of areal, must be areal.13: start it from the same installation"),
    ],
)
async def test_a_server_with_other_routes_is_refused_in_one_line(connect, release, said):
    async with FakeServer(release) as server:
        with pytest.raises(GenerationError) as caught:
            await connect(server)
    assert str(caught.value) == f"{server.url} {said}"
    assert not isinstance(caught.value, ServerLostError)


async def test_a_version_is_brought_to_the_server_before_it_hears_of_it_and_not_looked_for_here(vllm, stager, connect):
    client = await connect(vllm, token="t", stager=stager.url)
    await client.load_version(version(3), "resubmit")
    assert stager.calls == [("/stage", {"version": 3, "path": "/weights/3", "digest": "hash-3"})]
    await client.reload(version(4))
    assert vllm.updates()[:2] == [
        ("/start_weight_update", None),
        ("/update_weights", {"update_info": {"path": "/here/3", "digest": "hash-3"}}),
    ]
    call = {"method": "reload_weights", "kwargs": {"weights_path": "/here/4"}}
    assert ("/collective_rpc", call) in vllm.calls


@pytest.mark.parametrize("status", [400, 502])
async def test_a_version_that_can_not_be_brought_costs_the_server(server, stager, connect, status):
    far = await connect(server, token="t", stager=stager.url)
    stager.broken["/stage"] = status
    with pytest.raises(ServerLostError, match=rf"/stage: {status}: as it was told$"):
        await far.load_version(version(3), "recompute")
    assert server.updates() == []


async def test_a_stager_that_tells_no_path_is_an_error(server, stager, connect):
    far = await connect(server, token="t", stager=stager.url)
    stager.broken["/stage"] = 200
    with pytest.raises(GenerationError, match=r"/stage: no path in b'as it was told'$"):
        await far.load_version(version(3), "recompute")


async def test_server_errors_and_lost_connections_are_lost_servers(server, connect):
    client = await connect(server)
    for status, kind in (
        (400, GenerationError),
        (404, GenerationError),
        (500, ServerLostError),
        (503, ServerLostError),
    ):
        server.broken["/inference/v1/generate"] = status
        with pytest.raises(GenerationError, match=rf"{status}: as it was told") as raised:
            await generated(client, request())
        assert raised.type is kind
    await server.__aexit__()
    with pytest.raises(ServerLostError):
        await generated(client, request())
    await client.close()
    with pytest.raises(ServerLostError, match="closed"):
        await client.health()


async def test_a_connection_that_the_server_may_be_closing_is_not_used_again(monkeypatch):
    monkeypatch.setattr(connection, "_KEEP_ALIVE_S", 0.05)
    ports = []

    async def health(http):
        ports.append(http.transport.get_extra_info("peername")[1])
        return web.Response()

    app = web.Application()
    app.router.add_get("/health", health)
    async with TestServer(app) as server:
        client = GenerationClient(str(server.make_url("")))
        for pause_s in (0.0, 0.2, 0.0):
            await client.health()
            await asyncio.sleep(pause_s)
        await client.close()
    assert ports[0] == ports[1] != ports[2]


def published(tmp_path, number):
    return publish(tmp_path, number, adapter(SPEC, seed=number), lora=form())


def paths(server):
    return [path for path, _ in server.updates()]


@pytest.fixture
async def adapting(vllm, connect):
    """A client of vLLM, whose versions are adapters."""
    return await connect(vllm, adapters=True)


async def test_vllm_holds_adapters_under_names_of_their_own_and_requests_name_one(vllm, adapting, tmp_path):
    one, two, three = (published(tmp_path, number) for number in (1, 2, 3))
    await adapting.complete(request("base"))
    assert vllm.requests["base"]["model"] == "policy"
    for each in (one, two, three):
        await adapting.load_version(each, "recompute")
        assert await adapting.loaded_version() == each.version
    assert paths(vllm)[-6:] == [
        "/v1/load_lora_adapter",
        "/pause?mode=abort&clear_cache=true",
        "/update_weight_version",
        "/reset_prefix_cache",
        "/resume",
        "/v1/unload_lora_adapter",
    ]
    assert ("/v1/load_lora_adapter", {"lora_name": version_name(two), "lora_path": two.path}) in vllm.updates()
    assert vllm.models == ["policy", version_name(two), version_name(three)]  # the one before stays
    await adapting.complete(request("adapted"))
    assert vllm.requests["adapted"]["model"] == version_name(three)


async def test_an_interrupted_request_goes_on_under_the_new_name(vllm, adapting, tmp_path):
    """Its rest may be sent before the update is over."""
    version = published(tmp_path, 1)
    vllm.hanging.add("/pause")
    update = asyncio.ensure_future(adapting.load_version(version, "recompute"))
    async with asyncio.timeout(5):
        while not [path for path in paths(vllm) if path.startswith("/pause")]:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    await adapting.complete(request("rest"))
    assert vllm.requests["rest"]["model"] == version_name(version)
    vllm.hanging.clear()
    await update


async def test_an_adapter_that_is_held_is_not_loaded_again_and_version_0_is_the_base(vllm, connect, tmp_path):
    """By a client of its own, as the evaluator is."""
    first, second = [await connect(vllm, adapters=True) for _ in range(2)]
    version, base = published(tmp_path, 1), PolicyVersion(version=0, path=str(tmp_path), digest="0" * 64)
    for client in (first, second):
        await client.load_version(version, "wait")
    assert paths(vllm).count("/v1/load_lora_adapter") == 1
    await second.reload(base)
    assert "/collective_rpc" not in paths(vllm)
    await second.complete(request("base"))
    assert (vllm.requests["base"]["model"], await second.loaded_version()) == ("policy", 0)


# -- a loop beside the one that asks: what comes in there is taken here, in order, and nothing once it is unwanted ----


@pytest.fixture
async def plane():
    plane = DataPlane()
    yield plane
    await plane.close()
    assert "data plane" not in {thread.name for thread in threading.enumerate()}


async def test_parts_are_taken_in_order_before_the_work_ends_or_fails(plane):
    taken = []

    async def work(take):
        for number in range(1000):
            take((number,), Received(b""))
            if number % 100 == 0:
                await asyncio.sleep(0)
        raise ServerLostError("gone")

    with pytest.raises(ServerLostError, match="gone"):
        await plane.run(work, lambda indices, _: taken.append((indices, threading.current_thread())))
    assert taken == [((number,), threading.main_thread()) for number in range(1000)]


async def test_a_failure_of_the_taker_ends_the_work(plane):
    ended = threading.Event()

    def refuse(*_):
        raise KeyError("no")

    async def work(take):
        try:
            take((0,), Received(b""))
            await asyncio.sleep(3600)
        finally:
            ended.set()

    with pytest.raises(KeyError, match="no"):
        await plane.run(work, refuse)
    assert await asyncio.to_thread(ended.wait, 10)


async def test_a_cancelled_call_takes_no_more_parts(plane):
    taken, begun, ended = [], threading.Event(), threading.Event()

    async def work(take):
        begun.set()
        try:
            await asyncio.sleep(3600)
        finally:
            take((0,), Received(b""))
            ended.set()

    call = asyncio.ensure_future(plane.run(work, lambda indices, _: taken.append(indices)))
    assert await asyncio.to_thread(begun.wait, 10)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await asyncio.to_thread(ended.wait, 10)
    await asyncio.sleep(0.01)
    assert taken == []  # it came after the cancellation


async def test_the_loop_that_asks_goes_on_while_much_comes_in():
    """It gets its turn every few takes of a millisecond each."""
    plane, turns, taken = DataPlane(), [0], []

    async def work(take):
        for number in range(300):
            take((number,), Received(b""))

    def slow(*_):
        taken.append(turns[0])
        until = asyncio.get_running_loop().time() + 0.001
        while asyncio.get_running_loop().time() < until:
            pass

    async def count():
        while True:
            turns[0] += 1
            await asyncio.sleep(0)

    counting = asyncio.ensure_future(count())
    await plane.run(work, slow)
    counting.cancel()
    await plane.close()
    assert max(taken.count(turn) for turn in set(taken)) <= 3
