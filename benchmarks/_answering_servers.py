"""Generation servers that return responses encoded in advance, so that a measurement covers only the controller.

    python -m benchmarks._answering_servers --servers 8 --tokens 8192 [--hold]

The servers implement the vLLM routes that a controller uses. The first line on standard output has their URLs. Without
`--hold` a server completes each request at once. With `--hold` a completion runs until it is interrupted, and then has
half of its tokens. For each line on standard input, the process prints the number of running completions.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys

import orjson
from aiohttp import web

from areal_core.api.wire import ROUTES_VERSION

END = 0  # the token that ends a completion


def body(tokens: int, *, ended: bool) -> bytes:
    """Response with one completion, for a vocabulary of 150,000 tokens."""
    ids = [100_000 + place % 50_000 for place in range(tokens - ended)] + [END] * ended
    choice = {
        "index": 0,
        "finish_reason": "stop" if ended else "abort",
        "token_ids": ids,
        "weight_versions": [{"version": "0", "start": 0, "end": len(ids)}],
        "logprobs": {"content": [{"token_id": token, "logprob": -0.6931471824645996} for token in ids]},
    }
    usage = {"prompt_tokens": 8, "completion_tokens": len(ids), "total_tokens": 8 + len(ids)}
    return orjson.dumps({"request_id": "r", "model": "policy", "usage": usage, "choices": [choice]})


class Server:
    """One such server."""

    def __init__(self, tokens: int, *, hold: bool) -> None:
        self._ended, self._begun = body(tokens, ended=True), body(tokens // 2, ended=False)
        self._hold = hold
        self.running = 0
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._interrupted = asyncio.Event()
        self._sampled = 0

    def app(self) -> web.Application:
        app = web.Application(client_max_size=64 * 2**20)
        answers = {"/version": {"version": ROUTES_VERSION}, "/weight_info": {"weight_version": "0"}}
        answers |= {"/is_sleeping": {"is_sleeping": False}}
        for path, answer in answers.items():
            app.router.add_get(path, self._always(orjson.dumps(answer)))
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_post("/pause", self._pause)
        app.router.add_post("/resume", self._resume)
        app.router.add_route("*", "/{other:.*}", self._always(b"{}"))
        return app

    def _always(self, answer: bytes):
        async def handler(request: web.Request) -> web.Response:
            await request.read()
            return web.Response(body=answer)

        return handler

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=f"vllm:generation_tokens_total {self._sampled}\n")

    async def _generate(self, request: web.Request) -> web.Response:
        await request.read()
        await self._resumed.wait()
        if not self._hold:
            return web.Response(body=self._ended)
        self.running += 1
        try:
            await self._interrupted.wait()
        finally:
            self.running -= 1
        return web.Response(body=self._begun)

    async def _pause(self, _: web.Request) -> web.Response:
        self._resumed.clear()
        self._interrupted.set()
        self._interrupted = asyncio.Event()
        return web.Response(body=b"{}")

    async def _resume(self, _: web.Request) -> web.Response:
        self._resumed.set()
        return web.Response(body=b"{}")


async def _serve(servers: int, tokens: int, *, hold: bool) -> None:
    running = [Server(tokens, hold=hold) for _ in range(servers)]
    urls: list[str] = []
    for server in running:
        runner = web.AppRunner(server.app(), access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
        urls.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
    print(orjson.dumps(urls).decode(), flush=True)
    with contextlib.suppress(EOFError):
        while await asyncio.to_thread(sys.stdin.readline):
            print(sum(server.running for server in running), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--hold", action="store_true")
    arguments = parser.parse_args()
    os.nice(10)  # who asks comes first
    asyncio.run(_serve(arguments.servers, arguments.tokens, hold=arguments.hold))


if __name__ == "__main__":
    main()
