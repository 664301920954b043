"""Many clients, slow ones and vanishing ones; the load that a server reports."""

import asyncio
import contextlib
import socket

from areal_core.api.wire import encode_request, parse_generation
from tests.conformance.conftest import TOKEN
from tests.support.generation import request
from tests.support.live_servers import EXACT, LONG, SLOTS, deviations, until


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


async def test_no_more_completions_run_than_there_are_slots(client):
    calls = [
        asyncio.ensure_future(client.complete(request(f"r{i}", n=8, max_tokens=LONG, stop_token_ids=())))
        for i in range(3)
    ]
    load = await until(client, lambda load: load.running == SLOTS and load.waiting == 8)
    assert load.generated_tokens > 0
    await client.abort_all()
    completions = [completion for call in calls for completion in await call]
    assert {completion.finish_reason for completion in completions} == {"abort"}
    assert [len(completion.token_ids) for completion in completions[SLOTS:]] == [0] * 8
    await until(client, lambda load: (load.running, load.waiting) == (0, 0))


async def test_a_client_that_reads_slowly_holds_up_nobody(server, client, published):
    asked = request("slow", n=SLOTS, max_tokens=120, stop_token_ids=())
    host, port = server.url.removeprefix("http://").split(":")
    before = (await client.load()).generated_tokens
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        slow.connect((host, int(port)))
        slow.sendall(_http(encode_request(asked)))
        slow.setblocking(False)
        await until(client, lambda load: load.generated_tokens == before + SLOTS * 120)
        others = [request(f"r{i}", seed=i, stop_token_ids=()) for i in range(8)]
        for [completion] in await asyncio.gather(*map(client.complete, others)):
            assert len(completion.token_ids) == 24
        received = bytearray()
        loop = asyncio.get_running_loop()
        while piece := await loop.sock_recv(slow, 1500):
            received += piece
    headers, _, content = bytes(received).partition(b"\r\n\r\n")
    assert headers.startswith(b"HTTP/1.1 200")
    completions = parse_generation(content)
    assert len(content) > 50_000
    assert [len(completion.token_ids) for completion in completions] == [120] * SLOTS
    assert deviations(published.reference, asked, completions[-1]).max() < EXACT


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


async def test_the_load_counts_tokens_to_the_last(client):
    before = await client.load()
    asked = [request(f"r{i}", n=3, max_tokens=17, seed=i, stop_token_ids=()) for i in range(5)]
    await asyncio.gather(*map(client.complete, asked))
    idle = await until(client, lambda load: (load.running, load.waiting) == (0, 0))
    assert idle.generated_tokens - before.generated_tokens == 5 * 3 * 17

    call = asyncio.ensure_future(client.complete(request("long", n=8, max_tokens=LONG, stop_token_ids=())))
    busy = await until(client, lambda load: load.generated_tokens > idle.generated_tokens + 40)
    assert busy.running == 8
    assert busy.idle_s >= idle.idle_s > 0
    await client.abort_all()
    completions = await call
    after = await until(client, lambda load: load.running == 0)
    sampled = sum(len(completion.token_ids) for completion in completions)
    assert after.generated_tokens - idle.generated_tokens == sampled


def _http(content):
    head = (
        "POST /inference/v1/generate HTTP/1.1",
        "Host: server",
        "Content-Type: application/json",
        f"Authorization: Bearer {TOKEN}",
        f"Content-Length: {len(content)}",
        "Connection: close",
    )
    return "\r\n".join((*head, "", "")).encode() + content
