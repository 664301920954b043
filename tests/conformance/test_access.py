"""Servers take requests that carry the run's token, and no others, on every route that they have."""

from __future__ import annotations

import asyncio
import base64
from unittest.mock import MagicMock

import aiohttp
import pytest

from areal_core.api.access import authorization
from areal_core.generation.server.routes import GenerationServer
from tests.conformance.conftest import TOKEN
from tests.support.live_servers import Server

# What vLLM serves beyond the routes of its own description; /collective_rpc runs any method of its workers.
HIDDEN = ("/collective_rpc", "/openapi.json", "/docs", "/metrics", "/server_info")
CREDENTIALS = {
    "none": {},
    "another": authorization("a-token-of-another-run"),
    "a part": authorization(TOKEN[:-1]),
    "more": authorization(TOKEN + "x"),
    "as a password": {"Authorization": f"Basic {base64.b64encode(f'areal:{TOKEN}'.encode()).decode()}"},
    "empty": {"Authorization": ""},
    "of another site": {"Origin": "https://example.org", "Content-Type": "text/plain"},
}


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


@pytest.mark.parametrize("credentials", CREDENTIALS.values(), ids=CREDENTIALS)
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
