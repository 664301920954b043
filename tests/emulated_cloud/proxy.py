"""What stands before moto's server: hands calls on, and spoils those that a fault meets."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping

from aiohttp import ClientSession, ClientTimeout, DummyCookieJar, web
from multidict import CIMultiDict
from yarl import URL

from tests.emulated_cloud.calls import (
    TERMINATED,
    Call,
    Describe,
    call_of,
    each_terminated,
    terminated,
    with_template,
)
from tests.emulated_cloud.faults import Fault, Faults, error

# Of one connection; the body has its length, and is whole when it is handed on.
_NOT_HANDED_ON = ("Connection", "Keep-Alive", "Transfer-Encoding", "Content-Length", "Expect")
_TIMEOUT_S = 300.0
_DONE = 200
_TERMINATED = TERMINATED.encode()
_NO_GROUPS = b"<DescribePlacementGroupsResponse><placementGroupSet/></DescribePlacementGroupsResponse>"

Answer = tuple[int, CIMultiDict[str], bytes]


class Proxy:
    """`changed` is called when a call may have changed instances."""

    def __init__(self, moto: str, *, describe: Describe, changed: Callable[[], None]) -> None:
        self.faults = Faults()
        self._moto = moto
        self._describe, self._changed = describe, changed
        self._carried_out: dict[tuple[str, str], asyncio.Task[Answer]] = {}  # by the call's name and its token
        self._session: ClientSession | None = None
        self._server: asyncio.Server | None = None

    async def serve(self, listening: socket.socket) -> None:
        self._session = ClientSession(
            auto_decompress=False, cookie_jar=DummyCookieJar(), timeout=ClientTimeout(total=_TIMEOUT_S)
        )
        server = web.Server(self._handle, access_log=None, auto_decompress=False)
        self._server = await asyncio.get_running_loop().create_server(server, sock=listening)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        if self._session is not None:
            await self._session.close()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.headers.get("Expect", "").lower() == "100-continue" and request.transport is not None:
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = await request.content.read()
        call = call_of(request.method, request.raw_path, request.headers, body)
        fault = self.faults.of(call)
        answer = await self._answer(call, fault, request, body)
        status, headers, content = answer
        return web.Response(status=status, headers=headers, body=content)

    async def _answer(self, call: Call, fault: Fault | None, request: web.BaseRequest, body: bytes) -> Answer:
        """What moto says of it, or the fault."""
        if fault is not None and fault.kind == "refuse":
            status, content = error(call, fault)
            return status, CIMultiDict({"Content-Type": "text/xml"}), content
        if fault is not None:
            await asyncio.sleep(fault.delay_s)
        return await self._carry_out(call, request, body)

    async def _carry_out(self, call: Call, request: web.BaseRequest, body: bytes) -> Answer:
        """Once for each token, however often it is asked for."""
        token = (call.name, call.fields.get("ClientToken", ""))
        if not token[1]:
            return await self._hand_on(call, request, body)
        known = self._carried_out.get(token)
        if known is None or (known.done() and (known.exception() or known.result()[0] != _DONE)):
            known = self._carried_out[token] = asyncio.create_task(self._hand_on(call, request, body))
        return await asyncio.shield(known)  # who asked may have gone

    async def _hand_on(self, call: Call, request: web.BaseRequest, body: bytes) -> Answer:
        if call.name == "DescribePlacementGroups":  # moto has none, and no such call
            return _DONE, CIMultiDict({"Content-Type": "text/xml"}), _NO_GROUPS
        if call.name == "TerminateInstances":
            return await self._terminate(call, request)
        if call.name == "RunInstances":
            body = await asyncio.to_thread(with_template, call, self._describe) or body
        return await self._to_moto(call, request, body)

    async def _terminate(self, call: Call, request: web.BaseRequest) -> Answer:
        """One by one: moto refuses the second time, and then all; AWS does not."""
        each = each_terminated(call)
        for body in each.values():
            answer = await self._to_moto(call, request, body)
            if answer[0] != _DONE and _TERMINATED not in answer[2]:
                return answer
        return _DONE, CIMultiDict({"Content-Type": "text/xml"}), terminated(each)

    async def _to_moto(self, call: Call, request: web.BaseRequest, body: bytes) -> Answer:
        assert self._session is not None
        url = URL(self._moto + request.raw_path, encoded=True)
        headers = _handed_on(request.headers)
        async with self._session.request(
            request.method, url, headers=headers, data=body, allow_redirects=False
        ) as response:
            content = await response.read()
        answered = _handed_on(response.headers)
        if request.method == "HEAD" and "Content-Length" in response.headers:
            answered["Content-Length"] = response.headers["Content-Length"]
        if not call.reads:
            self._changed()
        return response.status, answered, content


def _handed_on(headers: Mapping[str, str]) -> CIMultiDict[str]:
    kept = CIMultiDict(headers)
    for name in _NOT_HANDED_ON:
        kept.popall(name, None)
    return kept
