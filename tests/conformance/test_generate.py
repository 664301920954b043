"""Completions of a server without updates: their fields, ends, distribution, and many clients at once."""

import asyncio
import contextlib

import numpy as np
import pytest

from areal_core.api.wire import parse_generation
from tests.support.generation import request
from tests.support.live_servers import CONTEXT, EXACT, LONG, SLOTS, body, deviations, post, sample, until

DRAWS = 600


async def test_the_fields_of_a_response(client, http):
    status, response = await post(http, "/inference/v1/generate", body(n=2) | {"request_id": "r-1"})
    assert status == 200
    assert response["request_id"] == "generate-tokens-r-1"
    assert response["model"] == "policy"
    counts = {name: response["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    assert counts == {"prompt_tokens": 3, "completion_tokens": 16, "total_tokens": 19}
    first, second = response["choices"]
    assert (first["index"], second["index"]) == (0, 1)
    assert first["finish_reason"] == "length"
    assert first["weight_versions"] == [{"version": "0", "start": 0, "end": 8}]
    assert [entry["token_id"] for entry in first["logprobs"]["content"]] == first["token_ids"]
    assert all(entry["logprob"] <= 0 for entry in first["logprobs"]["content"])
    assert first["token_ids"] != second["token_ids"]

    assert (await sample(http, body(n=1)))["token_ids"] == first["token_ids"]


async def test_end_tokens_stop_unless_they_are_ignored(client, http):
    for seed in range(8):
        tokens = (await sample(http, body(max_tokens=100, seed=seed)))["token_ids"]
        assert len(tokens) == 100
        if 1 in tokens[1:-1]:
            break
    else:
        pytest.fail("the model never samples its end token")
    stopped = await sample(http, body(max_tokens=100, seed=seed, ignore_eos=False))
    assert stopped["token_ids"] == tokens[: tokens.index(1) + 1]
    assert stopped["finish_reason"] == "stop"
    own = tokens[0]
    stopped = await sample(http, body(max_tokens=100, seed=seed, stop_token_ids=[own]))
    assert (stopped["token_ids"], stopped["finish_reason"]) == ([own], "stop")
    at_the_limit = await sample(http, body(max_tokens=tokens.index(1) + 1, seed=seed, ignore_eos=False))
    assert at_the_limit["finish_reason"] == "stop"


@pytest.mark.parametrize(("prompt", "tokens"), [(CONTEXT - 1, 1), (CONTEXT - 3, 3), (CONTEXT - 8, 8)])
async def test_the_context_ends_a_completion_before_max_tokens_does(client, http, prompt, tokens):
    choice = await sample(http, body([2] * prompt, max_tokens=9))
    assert (len(choice["token_ids"]), choice["finish_reason"]) == (tokens, "length")


async def test_the_seed_decides(client, http):
    async def tokens(**params):
        return (await sample(http, body(max_tokens=24, **params)))["token_ids"]

    first = await tokens(seed=7)
    assert await tokens(seed=7) == first
    assert len({tuple(await tokens(seed=seed)) for seed in range(8)}) == 8
    assert await tokens(seed=None) != await tokens(seed=None)
    status, response = await post(http, "/inference/v1/generate", body(n=8, max_tokens=24))
    assert status == 200
    assert len({tuple(choice["token_ids"]) for choice in response["choices"]}) == 8


@pytest.mark.parametrize("how", [{"temperature": 0.5}, {"temperature": 2.0}, {"greedy": True}])
async def test_log_probabilities_are_those_of_the_distribution_that_was_asked_for(client, published, how):
    asked = request(max_tokens=60, stop_token_ids=(), **how)
    [completion] = await client.complete(asked)
    tokens = completion.token_ids.tolist()
    assert len(tokens) == 60
    assert deviations(published.reference, asked, completion).max() < EXACT
    if asked.greedy:
        assert tokens == published.reference.logits(0, [*asked.token_ids, *tokens])[2:-1].argmax(-1).tolist()
    else:
        assert deviations(published.reference, request(max_tokens=60), completion).max() > 100


async def test_first_tokens_are_distributed_as_the_model_says(client, published):
    """Pearson's chi-square over many seeds; with the seeds fixed it is one number, far below what a wrong sampler
    makes."""
    asked = [request(f"r{seed}", max_tokens=1, seed=101 * seed, stop_token_ids=()) for seed in range(DRAWS)]
    completions = await asyncio.gather(*map(client.complete, asked))
    sampled = np.bincount([completion.token_ids[0] for [completion] in completions], minlength=23)
    expected = DRAWS * published.reference.logits(0, (2, 3, 4))[-1].softmax(-1).numpy()
    common = expected >= 5
    observed = np.append(sampled[common], sampled[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum())
    assert common.sum() >= 3
    statistic = float((np.square(observed - wanted) / wanted).sum())
    assert statistic < 2.5 * len(wanted) + 10


async def test_completions_come_as_they_end(client, server):
    """Long ones hold no short ones up."""
    parts = []
    asked = request("r", n=8, max_tokens=60)
    with server.slowed():
        await client.generate(asked, lambda indices, received: parts.append((indices, parse_generation(received.body))))
    assert sorted(index for indices, _ in parts for index in indices) == list(range(8))
    assert len(parts) > 1
    lengths = [[len(completion.token_ids) for completion in completions] for _, completions in parts]
    assert [len(indices) for indices, _ in parts] == list(map(len, lengths))
    assert max(lengths[0]) < max(lengths[-1])


async def test_requests_end_with_their_client(client):
    running = asyncio.ensure_future(client.complete(request("running", n=SLOTS, max_tokens=LONG, stop_token_ids=())))
    await until(client, lambda load: load.running == SLOTS)
    vanishing = asyncio.ensure_future(client.complete(request("vanishing", n=3, max_tokens=LONG)))
    await until(client, lambda load: load.waiting == 3)
    vanishing.cancel()
    await until(client, lambda load: load.waiting == 0)
    assert not running.done()
    waiting = asyncio.ensure_future(client.complete(request("waiting", n=2)))
    await until(client, lambda load: load.waiting == 2)
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    assert len(await waiting) == 2  # the slots are free
    await until(client, lambda load: (load.running, load.waiting) == (0, 0))
