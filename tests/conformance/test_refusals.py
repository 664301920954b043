"""What servers refuse, and how: requests, callers without the token, and updates that must fail."""

from __future__ import annotations

import asyncio
from unittest.mock import MagicMock

import aiohttp
import pytest
import torch
from safetensors.torch import load_file, save_file

from areal_core.api.access import authorization
from areal_core.errors import ServerLostError
from areal_core.generation.server.routes import GenerationServer
from areal_core.models.verified import weights_digest
from areal_core.types import PolicyVersion
from tests.conformance.conftest import TOKEN
from tests.support.generation import request
from tests.support.live_servers import CONTEXT, EXACT, SLOTS, Server, body, deviations, get, post

# What vLLM serves beyond the routes of its own description; /collective_rpc runs any method of its workers.
HIDDEN = ("/collective_rpc", "/openapi.json", "/docs", "/metrics", "/server_info")


async def routes(server: Server) -> list[tuple[str, str]]:
    """Every method and path that the server knows."""
    if server.kind == "embedded":
        app = GenerationServer(MagicMock(), asyncio.get_running_loop()).app()
        return [(route.method, route.resource.canonical) for route in app.router.routes() if route.resource is not None]
    async with (
        aiohttp.ClientSession(server.url, headers=authorization(TOKEN)) as http,
        http.get("/openapi.json") as told,
    ):
        paths = (await told.json())["paths"]
    return [(method.upper(), path) for path, methods in paths.items() for method in methods]


@pytest.mark.parametrize("credentials", [{}, authorization("a-token-of-another-run")], ids=["none", "another"])
async def test_no_route_takes_a_request_without_the_token(server: Server, credentials: dict[str, str]) -> None:
    known = await routes(server)
    assert ("POST", "/inference/v1/generate") in known
    assert ("POST", "/finish_weight_update") in known
    others = [(method, path) for path in HIDDEN for method in ("GET", "POST", "OPTIONS")]
    async with aiohttp.ClientSession(server.url, headers=credentials) as http:
        for method, path in (*known, *others):
            async with http.request(method, path, data="{}") as response:
                assert response.status == 401, (method, path)
                if method != "HEAD":
                    assert "the run's token" in (await response.json())["error"]["message"]


async def test_a_web_socket_is_refused(server: Server) -> None:
    async with aiohttp.ClientSession(server.url) as http:
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await http.ws_connect("/v1/realtime")
    assert refused.value.status in (401, 403)


GENERATE = "/inference/v1/generate"

# Refused by both, with one status: what is sent, that status, and the field that each of them names.
REFUSED = {
    "text for tokens": (body() | {"token_ids": "abc"}, 400, "token_ids", "body.token_ids"),
    "no tokens": (body([]), 400, "token_ids", "body.token_ids"),
    "a fraction of a token": (body([2.5]), 400, "token_ids", "body.token_ids.0"),
    "a prompt that fills the context": (body([2] * CONTEXT), 400, "token_ids", None),
    "no id": (body() | {"request_id": None}, 400, "request_id", "body.request_id"),
    "another model": (body() | {"model": "other"}, 404, "model", "model"),
    "negative temperature": (body(temperature=-1), 400, "temperature", "temperature"),
    "top_p above 1": (body(top_p=2), 400, "top_p", "top_p"),
    "n of 0": (body(n=0), 400, "n", None),
    "max_tokens of 0": (body(max_tokens=0), 400, "max_tokens", "max_tokens"),
    "a seed of more than 64 bits": (body(seed=2**70), 400, "seed", None),
    "a stop token outside the vocabulary": (body(stop_token_ids=[23]), 400, "stop_token_ids", "stop_token_ids"),
}

# Where they differ. The embedded server refuses what it can't do or can't know; vLLM does it, or passes it over.
# What is sent, and for each the status and the field named.
DIFFERENT = {
    "a token outside the vocabulary": (body([23]), (400, "token_ids"), (200, None)),
    "an unknown field": (body() | {"tokens": []}, (400, "tokens"), (200, None)),
    "an unknown parameter": (body(best_of=2), (400, "best_of"), (200, None)),
    "top_p": (body(top_p=0.5), (400, "top_p"), (200, None)),
    "more completions than slots": (body(n=SLOTS + 1), (200, None), (400, None)),
}

CONTROL = {
    "no update": ("/update_weights", {}, "update_info"),
    "a number for a version": ("/finish_weight_update", {"weight_version": 7}, "weight_version"),
    "no label": ("/update_weight_version", {}, "new_version"),
    "an unknown mode": ("/pause?mode=sometimes", None, "mode"),
}


def assert_refused(content, status, param):
    error = content["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert (error["code"], error["param"]) == (status, param)
    assert error["type"].replace(" ", "") in ("BadRequest", "BadRequestError", "NotFoundError")
    assert error["message"]


CASES = {name: ((status, embedded), (status, vllm)) for name, (_, status, embedded, vllm) in REFUSED.items()}
CASES |= {name: (embedded, vllm) for name, (_, embedded, vllm) in DIFFERENT.items()}


@pytest.mark.parametrize("case", CASES)
async def test_bad_requests_are_refused_by_field(server, http, case):
    status, param = CASES[case][server.kind == "vllm"]
    async with http.post(GENERATE, json=(REFUSED | DIFFERENT)[case][0]) as response:  # also numbers beyond 64 bits
        content = await response.json(content_type=None)
    assert response.status == status
    if status == 200:
        assert content["choices"][0]["token_ids"]
    else:
        assert_refused(content, status, param)


async def test_a_body_that_is_not_json(http):
    async with http.post(GENERATE, data=b"{", headers={"Content-Type": "application/json"}) as response:
        assert response.status == 400
        assert (await response.json())["error"]["code"] == 400
    assert (await get(http, "/nowhere"))[0] == 404


@pytest.mark.parametrize("case", CONTROL)
async def test_control_routes_refuse_by_field(http, case):
    path, value, param = CONTROL[case]
    status, content = await post(http, path, value)
    assert status == 400
    assert_refused(content, 400, content["error"]["param"])
    assert content["error"]["param"].rpartition(".")[2] == param  # vLLM's says where it stands: body.new_version
    assert await get(http, "/is_paused") == (200, {"is_paused": False})


NAME = "model.layers.1.mlp.up_proj.weight"
KINDS = ["no file", "damaged", "hash", "no safetensors", "shape", "missing tensor", "not finite"]


def spoil(folder, kind, published):
    """A bad version 1, made from the good one."""
    file = folder / "model.safetensors"
    tensors = load_file(f"{published.versions[1].path}/model.safetensors")
    if kind == "shape":
        tensors[NAME] = torch.zeros(3, 3)
    elif kind == "missing tensor":
        del tensors[NAME]
    elif kind == "not finite":
        tensors[NAME][0, 0] = torch.nan
    save_file(tensors, file)
    whole = weights_digest(file)
    if kind in ("damaged", "no safetensors"):
        file.write_bytes(file.read_bytes()[:1000])
    digest = {"damaged": whole, "hash": published.versions[2].digest}.get(kind, weights_digest(file))
    if kind == "no file":
        file.unlink()
    return PolicyVersion(version=1, path=str(folder), digest=digest)


@pytest.fixture
async def mended(server, client, http, published):
    """A server whose update failed is started again; here it is given a good update, which takes less time."""
    yield
    await client.abort_all()
    if server.kind == "embedded":
        assert (await post(http, "/start_weight_update"))[0] == 200
    base = published.versions[0]
    info = {"update_info": {"path": base.path, "digest": base.digest}}
    assert (await post(http, "/update_weights", info))[0] == 200
    assert (await post(http, "/finish_weight_update", {"weight_version": "0"}))[0] == 200


@pytest.mark.usefixtures("mended")
@pytest.mark.parametrize("interruption", ["recompute", "keep"])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_bad_update_loses_the_server_and_changes_nothing(client, http, published, tmp_path, kind, interruption):
    with pytest.raises(ServerLostError, match=r"version 1|finish_weight_update"):
        await client.load_version(spoil(tmp_path, kind, published), interruption)
    if kind in ("no file", "damaged", "hash"):  # it interrupts nobody
        assert await get(http, "/is_paused") == (200, {"is_paused": False})
    assert await get(http, "/weight_info") == (200, {"weight_version": "0"})
    await client.health()
    await post(http, "/resume")
    asked = request("after", max_tokens=16, stop_token_ids=())
    [completion] = await client.complete(asked)
    assert set(completion.versions.tolist()) == {0}
    assert deviations(published.reference, asked, completion).max() < EXACT
