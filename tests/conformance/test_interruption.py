"""Updates in the middle of completions: what becomes of their tokens, log-probabilities, versions and ends."""

import asyncio
import functools

import pytest

from areal_core.api.pending_completions import PendingCompletions
from areal_core.api.wire import join_completions, version_spans
from tests.support.generation import request
from tests.support.live_servers import EXACT, LENGTH, LONG, SLOTS, deviations, get, post, until


async def begun(client, pool, asked):
    """Pending completions that a pool is working on: as many completions as there are slots are some way on."""
    pending = [PendingCompletions(item) for item in asked]
    most = min(SLOTS, sum(item.n for item in asked))
    calls = [asyncio.ensure_future(pool.generate(pending)) for pending in pending]
    await until(client, lambda load: any_over(calls) or load.running == most)
    await sampled_further(client, calls, 20 * most)
    return pending, calls


async def sampled_further(client, calls, tokens):
    before = (await client.load()).generated_tokens
    await until(client, lambda load: any_over(calls) or load.generated_tokens > before + tokens)


async def interrupted(client, server, pool, asked, *events):
    """The load before, and pending completions and their calls in the middle of which each of these events has come."""
    with server.slowed():
        start = await client.load()
        pending, calls = await begun(client, pool, asked)
        for event in events:
            await event()
            await sampled_further(client, calls, 20 * SLOTS)
    return start, pending, calls


def any_over(calls):
    return any(call.done() for call in calls)


async def joined(pending, calls):
    """(request, completion) of all completions, once they are finished."""
    await asyncio.gather(*calls)
    return [
        (pending.request, completion) for pending in pending for completion in join_completions(pending.completions())
    ]


@pytest.mark.parametrize("interruption", ["recompute", "resubmit"])  # they go on with a KV cache of the new weights
async def test_completions_are_exact_before_across_and_after_updates(client, server, pool_of, published, interruption):
    pool = await pool_of(interruption)
    asked = [request(f"r{i}", range(2, 5 + i), n=4, max_tokens=LENGTH, seed=i, stop_token_ids=()) for i in range(5)]
    first, second = (functools.partial(pool.load_version, published.versions[number]) for number in (1, 2))
    start, pending, calls = await interrupted(client, server, pool, asked, first, second)
    [load] = await pool.loads()
    assert load.recomputed_tokens > SLOTS * 20
    assert load.paused_s > start.paused_s
    assert load.swap_ms > 0

    seen = set()
    for item, completion in await joined(pending, calls):
        assert (len(completion.token_ids), completion.finish_reason) == (LENGTH, "length")
        spans = version_spans(completion.versions)
        assert [version for version, _, _ in spans] == sorted({version for version, _, _ in spans})
        assert deviations(published.reference, item, completion).max() < EXACT
        seen.add(tuple(version for version, _, _ in spans))
    assert (0, 1, 2) in seen
    assert await client.loaded_version() == 2
    end = await until(client, lambda load: (load.running, load.waiting) == (0, 0))
    sampled = sum(pending.sampled().tokens for pending in pending)
    assert end.generated_tokens - start.generated_tokens == sampled == 20 * LENGTH


async def test_keys_and_values_that_are_kept_are_those_of_the_old_weights(client, server, pool_of, published):
    """What `recompute` is for: the log-probabilities after an update with `keep` belong to no policy. A later request
    with the same prompt reuses none of them."""
    pool = await pool_of("keep")
    prompt = [2 + i % 20 for i in range(300)]  # fills blocks of a prefix cache
    asked = [request(f"r{i}", prompt, n=4, max_tokens=LENGTH, seed=i, stop_token_ids=()) for i in range(3)]
    update = functools.partial(pool.load_version, published.versions[1])
    _, pending, calls = await interrupted(client, server, pool, asked, update)
    late = PendingCompletions(request("late", prompt, stop_token_ids=()))
    assert not any_over(calls)
    await pool.generate(late)
    [(item, completion)] = await joined([late], [])
    assert deviations(published.reference, item, completion).max() < EXACT
    for item, completion in await joined(pending, calls):
        assert len(completion.token_ids) == LENGTH
        assert set(completion.versions.tolist()) == {0, 1}
        found = deviations(published.reference, item, completion)
        assert found[completion.versions == 0].max() < EXACT
        assert found[completion.versions == 1].max() > 10


async def test_an_update_that_waits_mixes_no_versions(client, server, pool_of, published):
    pool = await pool_of("wait")
    asked = [request(f"r{i}", n=4, max_tokens=LENGTH, seed=i, stop_token_ids=()) for i in range(4)]  # all slots
    with server.slowed():
        pending, calls = await begun(client, pool, asked)
        update = asyncio.ensure_future(pool.load_version(published.versions[1]))
        await asyncio.sleep(0.5)  # vLLM says nothing of a pause that waits
    assert {completion.versions.tolist()[-1] for _, completion in await joined(pending, calls)} == {0}
    await update
    late = PendingCompletions(request("late", stop_token_ids=()))
    await pool.generate(late)
    for item, completion in await joined([*pending, late], []):
        assert set(completion.versions.tolist()) == ({1} if item is late.request else {0})
        assert deviations(published.reference, item, completion).max() < EXACT


async def test_pause_keep_holds_completions_and_resume_goes_on_as_if_nothing_had_been(client, server, http, published):
    asked = request("r", n=8, max_tokens=LENGTH, stop_token_ids=())
    undisturbed = await client.complete(asked)
    with server.slowed():
        start = (await client.load()).generated_tokens
        call = asyncio.ensure_future(client.complete(asked))
        await until(client, lambda load: load.generated_tokens > start + 20)
        assert await post(http, "/pause?mode=keep&clear_cache=true") == (200, {"status": "paused"})
        assert await get(http, "/is_paused") == (200, {"is_paused": True})
    counted = (await client.load()).generated_tokens
    await asyncio.sleep(0.3)
    assert (await client.load()).generated_tokens == counted
    assert not call.done()
    assert await post(http, "/resume") == (200, {"status": "resumed"})
    for completion, expected in zip(await call, undisturbed, strict=True):
        assert completion.token_ids.tolist() == expected.token_ids.tolist()
        assert deviations(published.reference, asked, completion).max() < EXACT


async def test_one_request_is_ended_by_its_id(client, server):
    """What it hands over is what the server has counted."""
    before = (await client.load()).generated_tokens
    with server.slowed():
        calls = {
            name: asyncio.ensure_future(client.complete(request(name, n=8, max_tokens=LONG, stop_token_ids=())))
            for name in ("ended", "other")
        }
        await until(client, lambda load: load.running == 16)
        await client.abort(["ended", "unknown"])
        ended = await calls["ended"]
        assert {completion.finish_reason for completion in ended} == {"abort"}
        assert all(len(completion.token_ids) < LONG for completion in ended)
        await until(client, lambda load: load.running == 8)
        assert not calls["other"].done()
        await client.abort_all()
        other = await calls["other"]
    assert {completion.finish_reason for completion in other} == {"abort"}
    sampled = sum(len(completion.token_ids) for completion in (*ended, *other))
    await until(client, lambda load: load.generated_tokens >= before + sampled)
    await asyncio.sleep(0.3)
    assert (await client.load()).generated_tokens == before + sampled
