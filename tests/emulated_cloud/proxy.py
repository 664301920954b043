"""What stands before moto's server: hands calls on, and does what AWS does and moto doesn't.

- RunInstances with a launch template: the instance is in the subnet and the security groups of the template.
- TerminateInstances of one that is terminated: moto looks for its interface, and refuses.
- DescribePlacementGroups: there are none.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, urlencode

from aiohttp import ClientSession, ClientTimeout, DummyCookieJar, web
from multidict import CIMultiDict
from yarl import URL

TERMINATED = "InvalidNetworkInterfaceID.NotFound"  # moto's refusal
# Of one connection; the body has its length, and is whole when it is handed on.
_NOT_HANDED_ON = ("Connection", "Keep-Alive", "Transfer-Encoding", "Content-Length", "Expect")
_SCOPE = re.compile(r"Credential=[^/]+/\d+/[^/]+/([^/]+)/aws4_request")  # of a signature
_TIMEOUT_S = 300.0
_DONE = 200

Answer = tuple[int, CIMultiDict[str], bytes]


@dataclass(frozen=True)
class _Call:
    service: str  # ec2, iam, sts, s3, ssm
    name: str  # RunInstances, CreateRole, GetParameters; empty of S3
    fields: Mapping[str, str]  # of those that come as a form


class Proxy:
    """`changed` is called when a call may have changed instances; `describe` is DescribeLaunchTemplateVersions."""

    def __init__(self, moto: str, *, describe: Callable[..., Any], changed: Callable[[], None]) -> None:
        self._moto, self._describe, self._changed = moto, describe, changed

    async def __aenter__(self) -> Proxy:
        timeout = ClientTimeout(total=_TIMEOUT_S)
        self._session = ClientSession(auto_decompress=False, cookie_jar=DummyCookieJar(), timeout=timeout)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.headers.get("Expect", "").lower() == "100-continue" and request.transport is not None:
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = await request.content.read()
        call = _call_of(request, body)
        status, headers, content = await self._hand_on(call, request, body)
        return web.Response(status=status, headers=headers, body=content)

    async def _hand_on(self, call: _Call, request: web.BaseRequest, body: bytes) -> Answer:
        if call.name == "DescribePlacementGroups":
            return _written("DescribePlacementGroupsResponse", "<placementGroupSet/>")
        if call.name == "TerminateInstances":
            return await self._terminate(call, request)
        if call.name == "RunInstances" and "LaunchTemplate.LaunchTemplateId" in call.fields:
            body = await asyncio.to_thread(self._with_template, call)
        return await self._to_moto(call, request, body)

    def _with_template(self, call: _Call) -> bytes:
        """The body of a RunInstances that says itself in which network its launch template has it."""
        template, version = (call.fields[f"LaunchTemplate.{name}"] for name in ("LaunchTemplateId", "Version"))
        (found,) = self._describe(LaunchTemplateId=template, Versions=[version])["LaunchTemplateVersions"]
        (interface,) = found["LaunchTemplateData"]["NetworkInterfaces"]
        groups = {f"SecurityGroupId.{place}": group for place, group in enumerate(interface["Groups"], 1)}
        return urlencode({**call.fields, "SubnetId": interface["SubnetId"], **groups}).encode()

    async def _terminate(self, call: _Call, request: web.BaseRequest) -> Answer:
        """One by one: moto refuses the second time, and then all; AWS does not."""
        ids = [value for field, value in call.fields.items() if field.startswith("InstanceId.")]
        rest = {field: value for field, value in call.fields.items() if not field.startswith("InstanceId.")}
        for instance in ids:
            answer = await self._to_moto(call, request, urlencode({**rest, "InstanceId.1": instance}).encode())
            if answer[0] != _DONE and TERMINATED.encode() not in answer[2]:
                return answer
        state = "<code>32</code><name>shutting-down</name>"
        states = f"<currentState>{state}</currentState><previousState>{state}</previousState>"
        items = "".join(f"<item><instanceId>{instance}</instanceId>{states}</item>" for instance in ids)
        return _written("TerminateInstancesResponse", f"<instancesSet>{items}</instancesSet>")

    async def _to_moto(self, call: _Call, request: web.BaseRequest, body: bytes) -> Answer:
        url = URL(self._moto + request.raw_path, encoded=True)
        headers = _handed_on(request.headers)
        async with self._session.request(
            request.method, url, headers=headers, data=body, allow_redirects=False
        ) as response:
            content = await response.read()
        answered = _handed_on(response.headers)
        if request.method == "HEAD" and "Content-Length" in response.headers:
            answered["Content-Length"] = response.headers["Content-Length"]
        if call.service == "ec2" and not call.name.startswith(("Describe", "Get")):
            self._changed()
        return response.status, answered, content


def _call_of(request: web.BaseRequest, body: bytes) -> _Call:
    scope = _SCOPE.search(request.headers.get("Authorization", ""))
    service = scope[1] if scope else "s3"
    if target := request.headers.get("X-Amz-Target"):
        return _Call(service, target.rpartition(".")[2], {})
    if request.headers.get("Content-Type", "").startswith("application/x-www-form-urlencoded"):
        fields = dict(parse_qsl(body.decode(), keep_blank_values=True))
        return _Call(service, fields.get("Action", ""), fields)
    return _Call(service, "", {})


def _written(name: str, text: str) -> Answer:
    return _DONE, CIMultiDict({"Content-Type": "text/xml"}), f"<{name}>{text}</{name}>".encode()


def _handed_on(headers: Mapping[str, str]) -> CIMultiDict[str]:
    kept = CIMultiDict(headers)
    for name in _NOT_HANDED_ON:
        kept.popall(name, None)
    return kept
