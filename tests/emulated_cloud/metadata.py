"""The metadata service of one machine, version 2: what is asked without a token is refused."""

from __future__ import annotations

import json
import secrets
import socket
import time
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from aiohttp import web

from tests.support.cloud import tags_of
from tests.support.terraform import REGION

ADDRESS, PORT = "169.254.169.254", 80
_TOKEN, _TTL = "X-aws-ec2-metadata-token", "X-aws-ec2-metadata-token-ttl-seconds"
_TTL_S = range(1, 21601)
_CREDENTIALS_S = 6 * 3600.0
_ACCOUNT = "123456789012"  # moto's


class Metadata:
    """`described` is the instance as DescribeInstances tells of it, and is kept up to date by who made this."""

    def __init__(self, described: Mapping[str, Any], role: str | None) -> None:
        """`role`: of the instance's profile."""
        self.described = described
        self.reclaimed_at: float | None = None  # once there is a notice
        self._role = role
        self._tokens: dict[str, float] = {}  # and when they end

    def serve(self) -> web.Server:
        return web.Server(self._handle, access_log=None)

    async def _handle(self, request: web.BaseRequest) -> web.Response:
        if request.method == "PUT":
            return self._token(request)
        if self._tokens.get(request.headers.get(_TOKEN, ""), 0.0) < time.time():
            return web.Response(status=401)
        text = self._text(request.path)
        return web.Response(status=404) if text is None else web.Response(text=text)

    def _token(self, request: web.BaseRequest) -> web.Response:
        asked = request.headers.get(_TTL, "")
        if request.path != "/latest/api/token" or "X-Forwarded-For" in request.headers:
            return web.Response(status=403)
        if not asked.isdecimal() or int(asked) not in _TTL_S:
            return web.Response(status=400)
        token = secrets.token_urlsafe(40)
        self._tokens[token] = time.time() + int(asked)
        return web.Response(text=token, headers={_TTL: asked})

    def _text(self, path: str) -> str | None:
        """What is at a path; of a folder, the names in it."""
        files = self._files()
        if path in files:
            return files[path]
        folder = path if path.endswith("/") else f"{path}/"
        below = [name.removeprefix(folder).partition("/") for name in files if name.startswith(folder)]
        return "\n".join(sorted({first + slash for first, slash, _ in below})) or None

    def _files(self) -> dict[str, str]:
        found, zone = self.described, self.described["Placement"]["AvailabilityZone"]
        values = {
            "ami-id": found["ImageId"],
            "instance-id": found["InstanceId"],
            "instance-life-cycle": found.get("InstanceLifecycle", "on-demand"),
            "instance-type": found["InstanceType"],
            "local-hostname": host_name(found["PrivateIpAddress"]) + ".ec2.internal",
            "local-ipv4": found["PrivateIpAddress"],
            "placement/availability-zone": zone,
            "placement/region": REGION,
        }
        if found.get("MetadataOptions", {}).get("InstanceMetadataTags") == "enabled":
            values |= {f"tags/instance/{key}": value for key, value in tags_of(found).items()}
        if self.reclaimed_at is not None:
            notice = {"action": "terminate", "time": _utc(datetime.fromtimestamp(self.reclaimed_at, UTC))}
            values["spot/instance-action"] = json.dumps(notice)
        if self._role is not None:
            values[f"iam/security-credentials/{self._role}"] = json.dumps(self._credentials())
        files = {f"/latest/meta-data/{name}": value for name, value in values.items()}
        return files | {"/latest/dynamic/instance-identity/document": json.dumps(self._document())}

    def _credentials(self) -> dict[str, str]:
        now = datetime.now(UTC)
        return {
            "Code": "Success",
            "LastUpdated": _utc(now),
            "Type": "AWS-HMAC",
            "AccessKeyId": "ASIAEMULATED" + self.described["InstanceId"][-8:].upper(),
            "SecretAccessKey": "emulated",
            "Token": "emulated",
            "Expiration": _utc(now + timedelta(seconds=_CREDENTIALS_S)),
        }

    def _document(self) -> dict[str, str]:
        found = self.described
        return {
            "accountId": _ACCOUNT,
            "architecture": found["Architecture"],
            "availabilityZone": found["Placement"]["AvailabilityZone"],
            "imageId": found["ImageId"],
            "instanceId": found["InstanceId"],
            "instanceType": found["InstanceType"],
            "pendingTime": _utc(found["LaunchTime"]),
            "privateIp": found["PrivateIpAddress"],
            "region": REGION,
            "version": "2017-09-30",
        }


def listen() -> socket.socket:
    """In the network of the calling thread, which has the address."""
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind((ADDRESS, PORT))
    return listening


def host_name(address: str) -> str:
    """The host name that AWS gives by an address."""
    return "ip-" + address.replace(".", "-")


def _utc(at: datetime) -> str:
    return at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
