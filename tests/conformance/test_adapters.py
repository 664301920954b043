"""Versions that are adapters: loaded, asked for by name, interrupted. vLLM holds them beside the base model."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses

import numpy as np
import pytest

from areal_core.api.pending_completions import PendingCompletions
from areal_core.api.wire import MODEL_NAME, join_completions, version_name
from areal_core.controller.pool import GenerationPool
from areal_core.generation.client import GenerationClient
from areal_core.models.verified import weights_digest
from areal_core.storage import weights as versions
from areal_core.types import PolicyVersion
from tests.conformance.conftest import KINDS, TOKEN, guarded
from tests.support.generation import Reference, request, write
from tests.support.live_servers import LENGTH, SLOTS, SPEC, Published, body, get, post, until
from tests.support.lora import adapter, by_peft, form

TOLERANCE = 1e-4  # nats


class PeftReference(Reference):
    """The versions as transformers has them with peft's adapters."""

    def __init__(self, base, published):
        models = {number: by_peft(base, one.path) for number, one in published.items() if number}
        models[0] = copy.deepcopy(models[1]).unload()
        self._rounded = models
        self._exact = {number: copy.deepcopy(model).double() for number, model in models.items()}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory) -> Published:
    root = tmp_path_factory.mktemp("adapters")
    base = write(root / "base", SPEC, 1)
    zero = PolicyVersion(version=0, path=str(base), digest=weights_digest(base / "model.safetensors"))
    published = {0: zero} | {
        number: versions.publish(root / "weights", number, adapter(SPEC, seed=number), lora=form())
        for number in (1, 2, 3)
    }
    return Published(base=base, versions=published, reference=PeftReference(base, published))


@pytest.fixture(scope="module", params=KINDS)
def server(request, adapters, tmp_path_factory):
    lora = ("--lora-rank", form().rank) if request.param == "vllm" else ()
    with guarded(request.param, adapters.base, tmp_path_factory.mktemp("ready"), *lora) as server:
        yield server


@pytest.fixture
async def client(server):
    client = GenerationClient(server.url, token=TOKEN, adapters=True)
    await client.identify()
    yield client
    await client.abort_all()
    await client.close()


async def test_every_version_has_the_log_probabilities_of_peft(client, adapters):
    asked = request(n=2, max_tokens=16, stop_token_ids=())
    for number in (0, 1, 2, 1, 3, 0):
        await client.load_version(adapters.versions[number], "resubmit")
        assert await client.loaded_version() == number
        for completion in await client.complete(asked):
            assert set(completion.versions.tolist()) == {number}
            wanted, _ = adapters.reference.logprobs(asked, completion)
            np.testing.assert_allclose(completion.logprobs, wanted, rtol=0, atol=TOLERANCE)


async def test_a_version_that_the_server_does_not_hold_can_not_be_asked_of_it(client, adapters, server, http):
    one, two, three = (adapters.versions[number] for number in (1, 2, 3))
    again = dataclasses.replace(three, digest=weights_digest(adapters.base / "config.json"))  # of other weights
    for version in (one, two, three):
        await client.load_version(version, "resubmit")
    for version in (one, again, dataclasses.replace(three, version=4)):
        name = version_name(version)
        status, answer = await post(http, "/inference/v1/generate", body() | {"model": name})
        assert (status, answer["error"]["code"]) == (404, 404)
        assert name in answer["error"]["message"]
        assert "\n" not in answer["error"]["message"]
    assert (await post(http, "/inference/v1/generate", body() | {"model": version_name(three)}))[0] == 200
    if server.kind == "vllm":  # the one before stays for requests that are on their way
        models = (await get(http, "/v1/models"))[1]["data"]
        assert {model["id"] for model in models} == {MODEL_NAME, version_name(two), version_name(three)}


@pytest.mark.parametrize("interruption", ["recompute", "resubmit"])
async def test_interrupted_completions_go_on_under_the_new_version(client, adapters, server, interruption):
    await client.load_version(adapters.versions[1], "resubmit")
    pool = GenerationPool(completions_per_server=SLOTS, interruption=interruption, token=TOKEN, adapters=True)
    pending = PendingCompletions(request("long", n=2, max_tokens=LENGTH, stop_token_ids=()))
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(pool.close)
        await pool.join("server", server.url, lambda: adapters.versions[1])
        with server.slowed():
            work = asyncio.ensure_future(pool.generate(pending))
            await until(client, lambda load: load.running == 2)
            await asyncio.sleep(0.5)
            await pool.load_version(adapters.versions[2])
        await work
    for completion in join_completions(pending.completions()):
        assert completion.versions.tolist() == sorted(completion.versions.tolist())
        assert set(completion.versions.tolist()) == {1, 2}
        wanted, _ = adapters.reference.logprobs(pending.request, completion)
        error = np.abs(completion.logprobs - wanted)
        assert error.mean() < TOLERANCE / 10
        assert error.max() < 5 * TOLERANCE  # rounding of float32, which one token in 600 may amplify
