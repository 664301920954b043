"""A real server process over real HTTP: the routes of vLLM's RL API, updates in the middle of answers, ways to fail."""

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time

import aiohttp
import numpy as np
import orjson
import pytest
import torch
from safetensors.torch import load_file, save_file

from areal_core import weights as versions
from areal_core.errors import GenerationError, ServerLostError
from areal_core.generation.client import GenerationClient, GenerationPool
from areal_core.types import PolicyVersion
from areal_core.wire import parse_generation
from tests.support.generation import LLAMA_GQA, Reference, request, weights, write

SPEC = dataclasses.replace(LLAMA_GQA, context=4096, eos_token_ids=(1,))
LONG = 4000  # tokens: an answer that outlasts whatever a test does meanwhile
SEEDS = {0: 1, 1: 2, 2: 3}  # version -> seed of its weights


def start(model, ready, *options):
    command = [sys.executable, "-m", "areal_core.generation.server", "--model", str(model), "--ready-file", str(ready)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen([*command, *options], env=environment, stderr=subprocess.PIPE, text=True)


def url_of(process, ready):
    deadline = time.monotonic() + 60
    while not ready.exists():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline, "the server never became ready"
        time.sleep(0.05)
    return json.loads(ready.read_text())["url"]


@contextlib.contextmanager
def serving(model, ready, *options):
    process = start(model, ready, *options)
    try:
        yield process, url_of(process, ready)
    finally:
        process.terminate()
        _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (0, "")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The base model, published versions of other weights, and what transformers says of all of them."""
    root = tmp_path_factory.mktemp("generation")
    reference = Reference(root / "reference", SPEC, SEEDS)
    base = write(root / "base", SPEC, SEEDS[0])
    published = {
        version: versions.publish(
            root / "weights", version, {name: tensor.numpy() for name, tensor in weights(SPEC, SEEDS[version]).items()}
        )
        for version in (1, 2)
    }
    return base, published, reference


@pytest.fixture(scope="module")
def server(folders, tmp_path_factory):
    with serving(folders[0], tmp_path_factory.mktemp("ready") / "r.json", "--slots", "16") as (_, url):
        yield url


@pytest.fixture
async def client(server, folders):
    """A client of a server that runs the base weights and nothing else."""
    client = GenerationClient(server)
    base = folders[0] / "model.safetensors"
    yield client
    await client.abort_all()
    version = PolicyVersion(version=0, path=str(base), sha256=digest(base))
    await client.load_version(version, interrupt=True)
    await client.close()


@pytest.fixture
async def http(server):
    async with aiohttp.ClientSession(server) as session:
        yield session


def digest(file):
    return hashlib.sha256(file.read_bytes()).hexdigest()


def body(**params):
    sampling = {"max_tokens": 8, "seed": 7, "logprobs": 0, "ignore_eos": True} | params
    return {"model": "policy", "token_ids": [2, 3, 4], "sampling_params": sampling}


async def post(http, path, value=None):
    async with http.post(path, data=None if value is None else orjson.dumps(value)) as response:
        return response.status, await response.json(content_type=None)


async def get(http, path):
    async with http.get(path) as response:
        return response.status, await response.json(content_type=None)


async def until(client, condition):
    async with asyncio.timeout(20):
        while not condition(load := await client.load()):  # noqa: ASYNC110 - another process's state
            await asyncio.sleep(0.01)
    return load


async def test_logprobs_before_across_and_after_updates_are_those_of_transformers(client, folders):
    _, published, reference = folders
    asked = [request(f"r{i}", range(2, 5 + i), n=4, max_tokens=1500, seed=i, stop_token_ids=()) for i in range(5)]
    calls = [asyncio.ensure_future(client.generate(item)) for item in asked]
    for version in (1, 2):
        before = (await until(client, lambda load: load.running == 16)).generated_tokens
        await until(client, lambda load: load.generated_tokens > before + 500)  # noqa: B023 - awaited here
        await client.load_version(published[version], interrupt=True)
    load = await client.load()
    assert load.running == 16
    assert load.paused_s > 0

    seen = set()
    for item, call in zip(asked, calls, strict=True):
        answers = parse_generation(await call)
        assert len(answers) == 4
        for answer in answers:
            assert answer.finish_reason == "length"
            seen.add(tuple(np.unique(answer.versions).tolist()))
            reference.check(item, answer)
    assert (0, 1, 2) in seen
    load = await client.load()
    assert (load.running, load.waiting) == (0, 0)
    assert load.recomputed_tokens > 16 * 20
    assert load.recompute_ms > 0
    assert await client.loaded_version() == 2


async def test_without_interruption_an_update_waits_for_running_answers_and_not_for_waiting_ones(client, folders):
    _, published, reference = folders
    asked = request("r", n=20, max_tokens=400, stop_token_ids=())  # 16 slots: four answers start later
    call = asyncio.ensure_future(client.generate(asked))
    await until(client, lambda load: load.running == 16)
    await client.load_version(published[1], interrupt=False)
    answers = parse_generation(await call)
    assert [np.unique(answer.versions).tolist() for answer in answers] == [[0]] * 16 + [[1]] * 4
    for answer in answers:
        reference.check(asked, answer)


async def test_the_fields_of_an_answer(client, http):
    status, answer = await post(http, "/inference/v1/generate", body(n=2) | {"request_id": "r-1"})
    assert status == 200
    assert answer["request_id"] == "generate-tokens-r-1"
    assert answer["model"] == "policy"
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 16, "total_tokens": 19}
    first, second = answer["choices"]
    assert (first["index"], second["index"]) == (0, 1)
    assert first["finish_reason"] == "length"
    assert first["weight_versions"] == [{"version": "0", "start": 0, "end": 8}]
    assert [entry["token_id"] for entry in first["logprobs"]["content"]] == first["token_ids"]
    assert first["token_ids"] != second["token_ids"]

    _, alone = await post(http, "/inference/v1/generate", body(n=1, logprobs=None))
    assert alone["choices"][0]["token_ids"] == first["token_ids"]
    assert alone["choices"][0]["logprobs"] is None


async def test_end_tokens_stop_unless_they_are_ignored(client, http):
    _, free = await post(http, "/inference/v1/generate", body(max_tokens=300))
    tokens = free["choices"][0]["token_ids"]
    assert 1 in tokens[:-1]
    _, stopped = await post(http, "/inference/v1/generate", body(max_tokens=300, ignore_eos=False))
    choice = stopped["choices"][0]
    assert choice["token_ids"] == tokens[: tokens.index(1) + 1]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
    own = tokens[0]
    _, stopped = await post(http, "/inference/v1/generate", body(max_tokens=300, stop_token_ids=[own]))
    assert stopped["choices"][0]["token_ids"] == [own]
    assert stopped["choices"][0]["stop_reason"] == own


async def test_without_a_seed_answers_differ(client, http):
    answers = [(await post(http, "/inference/v1/generate", body(seed=None)))[1] for _ in range(2)]
    assert answers[0]["choices"][0]["token_ids"] != answers[1]["choices"][0]["token_ids"]


@pytest.mark.parametrize(
    ("value", "status", "param"),
    [
        ([], 400, None),
        ({}, 400, "token_ids"),
        (body() | {"token_ids": "abc"}, 400, "token_ids"),
        (body() | {"token_ids": []}, 400, "token_ids"),
        (body() | {"token_ids": [2.5]}, 400, "token_ids"),
        (body() | {"token_ids": [True]}, 400, "token_ids"),
        (body() | {"token_ids": [23]}, 400, "token_ids"),
        (body() | {"token_ids": [2] * 4096}, 400, "token_ids"),
        (body() | {"request_id": None}, 400, "request_id"),
        (body() | {"model": "other"}, 404, "model"),
        (body() | {"stream": True}, 400, "stream"),
        (body() | {"tokens": []}, 400, "tokens"),
        (body() | {"sampling_params": None}, 400, "sampling_params"),
        (body(temperature=0.5), 400, "temperature"),
        (body(temperature=-1), 400, "temperature"),
        (body(top_p=0.5), 400, "top_p"),
        (body(top_k=5), 400, "top_k"),
        (body(min_tokens=1), 400, "min_tokens"),
        (body(logprobs=3), 400, "logprobs"),
        (body(n=0), 400, "n"),
        (body(n=10**9), 400, "n"),
        (body(max_tokens=0), 400, "max_tokens"),
        (body(seed="7"), 400, "seed"),
        (body(ignore_eos=1), 400, "ignore_eos"),
        (body(stop_token_ids=[23]), 400, "stop_token_ids"),
        (body(best_of=2), 400, "best_of"),
    ],
)
async def test_requests_that_cannot_be_served_are_refused_by_field(http, value, status, param):
    got, answer = await post(http, "/inference/v1/generate", value)
    assert got == status
    assert answer["error"].keys() == {"message", "type", "param", "code"}
    assert (answer["error"]["param"], answer["error"]["code"]) == (param, status)
    assert "\n" not in answer["error"]["message"]


async def test_neutral_settings_are_accepted_and_long_prompts_get_fewer_tokens(client, http):
    neutral = body(top_p=1.0, top_k=0, temperature=1.0, min_tokens=0, n=1)
    assert (await post(http, "/inference/v1/generate", neutral))[0] == 200
    status, answer = await post(http, "/inference/v1/generate", body() | {"token_ids": [2] * 4093})
    assert status == 200
    assert len(answer["choices"][0]["token_ids"]) == 3
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_bodies_that_are_not_json_and_unknown_routes(http):
    async with http.post("/inference/v1/generate", data=b"{") as response:
        assert response.status == 400
        assert (await response.json())["error"]["type"] == "BadRequestError"
    status, answer = await get(http, "/nowhere")
    assert (status, answer["error"]["code"]) == (404, 404)


async def test_pause_abort_ends_everything_with_what_it_has_and_new_requests_wait(client, http):
    running = asyncio.ensure_future(client.generate(request("r", n=4, max_tokens=LONG, stop_token_ids=())))
    await until(client, lambda load: load.generated_tokens and load.running == 4)
    assert await post(http, "/pause?mode=abort&clear_cache=true") == (200, {"status": "paused"})
    answers = parse_generation(await running)
    assert {answer.finish_reason for answer in answers} == {"abort"}
    assert all(0 < len(answer.token_ids) < LONG for answer in answers)
    assert await get(http, "/is_paused") == (200, {"is_paused": True})

    waiting = asyncio.ensure_future(client.generate(request("next")))
    await until(client, lambda load: load.waiting == 1)
    assert not waiting.done()
    assert await post(http, "/resume") == (200, {"status": "resumed"})
    assert len(parse_generation(await waiting)) == 1
    assert await get(http, "/is_paused") == (200, {"is_paused": False})


async def test_pause_keep_holds_answers_and_resume_goes_on_as_if_nothing_had_been(client, http):
    asked = request("r", n=2, max_tokens=800, stop_token_ids=())
    undisturbed = parse_generation(await client.generate(asked))
    call = asyncio.ensure_future(client.generate(asked))
    await until(client, lambda load: load.running == 2)
    await post(http, "/pause?mode=keep&clear_cache=true")
    held = await client.load()
    assert held.running == 2
    assert (await client.load()).generated_tokens == held.generated_tokens
    await post(http, "/resume")
    for answer, expected in zip(parse_generation(await call), undisturbed, strict=True):
        assert answer.token_ids.tolist() == expected.token_ids.tolist()
        np.testing.assert_allclose(answer.logprobs, expected.logprobs, atol=1e-4)


async def test_abort_requests_and_vanished_clients(client, http):
    calls = {
        name: asyncio.ensure_future(client.generate(request(name, n=2, max_tokens=LONG, stop_token_ids=())))
        for name in ("ended", "vanishes", "duplicate")
    }
    await until(client, lambda load: load.running == 6)
    with pytest.raises(GenerationError, match="already being served"):
        await client.generate(request("duplicate"))
    answer = await post(http, "/abort_requests", {"request_ids": ["ended", "unknown"]})
    assert answer == (200, {"status": "aborted", "aborted": 1})
    assert parse_generation(await calls["ended"])[0].finish_reason == "abort"
    calls["vanishes"].cancel()
    await until(client, lambda load: load.running == 2)
    await client.abort_all()
    assert parse_generation(await calls["duplicate"])[1].finish_reason == "abort"


def spoil(folder, kind, published, other):
    """The update_info of a bad update, made from a good one."""
    file = folder / "model.safetensors"
    tensors = load_file(f"{published.path}/model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    if kind == "shape":
        tensors[name] = torch.zeros(3, 3)
    elif kind == "missing tensor":
        del tensors[name]
    elif kind == "not finite":
        tensors[name][0, 0] = torch.nan
    save_file(tensors, file)
    if kind == "damaged":
        file.write_bytes(file.read_bytes()[:1000])
    sha256 = digest(file)
    if kind == "no file":
        file.unlink()
    return {"path": str(folder), "sha256": other.sha256 if kind == "hash" else sha256}


@pytest.mark.parametrize("kind", ["no file", "damaged", "hash", "shape", "missing tensor", "not finite"])
async def test_a_bad_update_leaves_the_running_weights_untouched(client, http, folders, tmp_path, kind):
    _, published, reference = folders
    info = spoil(tmp_path, kind, published[1], published[2])
    await post(http, "/start_weight_update")
    status, answer = await post(http, "/update_weights", {"update_info": info})
    assert status == 400
    assert "\n" not in answer["error"]["message"]
    status, _ = await post(http, "/finish_weight_update", {"weight_version": "1"})
    assert status == 400
    assert await get(http, "/weight_info") == (200, {"weight_version": "0"})
    asked = request("after")
    [after] = parse_generation(await client.generate(asked))
    assert set(after.versions.tolist()) == {0}
    reference.check(asked, after)

    bad = PolicyVersion(version=1, **info)
    with pytest.raises(ServerLostError, match="version 1"):
        await client.load_version(bad, interrupt=True)
    assert await get(http, "/is_paused") == (200, {"is_paused": False})


@pytest.mark.parametrize(
    ("path", "value", "param"),
    [
        ("/update_weights", {}, "update_info"),
        ("/update_weights", {"update_info": {"path": "x"}}, "sha256"),
        ("/finish_weight_update", {"weight_version": 7}, "weight_version"),
        ("/finish_weight_update", {"weight_version": "seven"}, "weight_version"),
        ("/finish_weight_update", {"weight_version": "7"}, "weight_version"),
        ("/update_weight_version", {}, "new_version"),
        ("/abort_requests", {"request_ids": "r"}, "request_ids"),
        ("/init_weight_transfer_engine", {}, "init_info"),
        ("/pause?mode=sometimes", None, "mode"),
        ("/pause?mode=keep&clear_cache=perhaps", None, "clear_cache"),
        ("/sleep?level=2", None, "level"),
    ],
)
async def test_control_routes_refuse_by_field(http, path, value, param):
    status, answer = await post(http, path, value)
    assert (status, answer["error"]["param"]) == (400, param)


async def test_the_other_routes(client, http):
    async with http.get("/health") as response:
        assert (response.status, await response.read()) == (200, b"")
    assert await get(http, "/get_world_size") == (200, {"world_size": 1})
    assert (await get(http, "/version"))[1]["version"].startswith("0.32.0")
    assert (await post(http, "/init_weight_transfer_engine", {"init_info": {}}))[0] == 200
    assert await post(http, "/reset_prefix_cache") == (200, {"success": True})
    assert await post(http, "/update_weight_version", {"new_version": "8"}) == (
        200,
        {"success": True, "new_version": "8"},
    )
    assert await get(http, "/weight_info") == (200, {"weight_version": "8"})
    [answer] = parse_generation(await client.generate(request()))
    assert set(answer.versions.tolist()) == {8}
    await post(http, "/sleep?level=1&mode=keep")
    assert await get(http, "/is_sleeping") == (200, {"is_sleeping": True})
    assert await get(http, "/is_paused") == (200, {"is_paused": True})
    await post(http, "/wake_up")
    assert await get(http, "/is_sleeping") == (200, {"is_sleeping": False})
    load = await client.load()
    assert load.idle_s > 0
    async with http.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    assert f"areal_generation_generated_tokens {load.generated_tokens}" in lines
    assert "areal_generation_weight_version 8" in lines


async def test_the_pool_loads_into_all_servers_and_takes_out_one_that_dies(folders, tmp_path):
    base, published, reference = folders
    changes = []
    with contextlib.ExitStack() as stack:
        dying = start(base, tmp_path / "a.json", "--slots", "4", "--deterministic", "--context", "512")
        stack.callback(dying.stderr.close)
        stack.callback(dying.wait)
        stack.callback(dying.kill)
        _, url = stack.enter_context(serving(base, tmp_path / "b.json", "--slots", "4"))
        pool = GenerationPool(answers_per_server=8, patience_s=20, on_change=lambda: changes.append(pool.capacity))
        base_version = PolicyVersion(version=0, path=str(base), sha256="not looked at")
        await pool.join("a", url_of(dying, tmp_path / "a.json"), lambda: base_version)
        await pool.join("b", url, lambda: base_version)
        assert (pool.version, pool.capacity) == (0, 16)
        await pool.load_version(published[1])
        assert pool.version == 1

        asked = [request(f"r{i}", n=2, max_tokens=LONG, stop_token_ids=()) for i in range(2)]
        calls = [asyncio.ensure_future(pool.generate(item)) for item in asked]
        async with asyncio.timeout(20):
            while [load.running for load in await pool.loads()] != [2, 2]:  # noqa: ASYNC110 - other processes' state
                await asyncio.sleep(0.01)
        os.kill(dying.pid, signal.SIGKILL)
        with pytest.raises(ServerLostError):
            await calls[0]
        assert (pool.version, pool.capacity) == (1, 8)
        await pool.load_version(published[2])
        assert pool.version == 2
        await pool.abort_all()
        for answer in parse_generation(await calls[1]):
            reference.check(asked[1], answer)
        await pool.close()
    assert changes == [8, 16, 16, 8, 8, 0]


def test_a_model_that_does_not_load_is_one_line_and_status_2(tmp_path):
    process = start(tmp_path / "nowhere", tmp_path / "ready.json")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert errors.count("\n") == 1
    assert str(tmp_path / "nowhere") in errors
    assert not (tmp_path / "ready.json").exists()


def test_a_port_in_use_is_one_line_that_names_it_and_status_2(folders, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = start(folders[0], tmp_path / "ready.json", "--port", str(port))
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert errors.count("\n") == 1
    assert f"127.0.0.1:{port}" in errors


async def test_sigterm_fails_running_requests_and_ends_with_status_0(folders, tmp_path):
    with serving(folders[0], tmp_path / "ready.json") as (process, url):
        client = GenerationClient(url)
        call = asyncio.ensure_future(client.generate(request(max_tokens=LONG, stop_token_ids=())))
        await until(client, lambda load: load.running == 1)
        process.terminate()
        with pytest.raises(ServerLostError):
            await call
        await client.close()
