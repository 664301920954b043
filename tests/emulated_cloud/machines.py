"""One machine of the cloud: a network namespace at the switch, its first process, and its metadata service."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from aiohttp import web

from flows.places import FILES
from tests.emulated_cloud import init
from tests.support import namespaces
from tests.support.namespaces import Switch

PREFIX = 16
_METADATA = "169.254.169.254"
_TOKEN = "emulated-token"
_ROLE = "node"  # whose credentials every machine has
_CREDENTIALS_S = 6 * 3600.0
_PRIVATE = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")  # instances outside of the control host's network
_KILL_AFTER_S = 3.0  # beyond what the first process takes to power off in order


@dataclass(frozen=True)
class Site:
    """What all machines of a cloud have in common."""

    own: str  # how its namespaces' names begin
    folder: Path
    switch: Switch
    endpoint: str
    power_off_s: float


def reach_all(namespace: str) -> None:
    """All private addresses are at the switch."""
    for network in _PRIVATE:
        namespaces.ip("-n", namespace, "route", "add", network, "dev", "eth0")


class Machine:
    def __init__(self, site: Site, number: int, described: Mapping[str, Any], ended: Callable[[Machine], None]) -> None:
        """`described`: by DescribeInstances; `ended` is called when it has ended."""
        self.instance: str = described["InstanceId"]
        self.address: str = described["PrivateIpAddress"]
        self.described = described
        self.reclaimed_at: float | None = None  # once there is a notice
        self.why: str | None = None  # it ends or has ended
        self.noted = False  # that it has started
        self._site, self._port, self._ended = site, str(number), ended
        self._up, self._down = asyncio.Event(), asyncio.Event()
        self._namespace = f"{site.own}-{self.instance}"
        self._servers: tuple[asyncio.Server, web.Server] | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Of its first process, from when it is a machine until it ends."""
        runs = self._process is not None and self._up.is_set() and not self._down.is_set()
        return self._process.pid if self._process is not None and runs else None

    @property
    def over(self) -> bool:
        """Nothing of it runs, and nothing will."""
        return self.why is not None and (self._process is None or self._down.is_set())

    async def start(self, user_data: str | None) -> None:
        """Power it on; returns once it is up, or down."""
        self._site.switch.plug_in(self._namespace, self._port, self.address, PREFIX)
        reach_all(self._namespace)
        namespaces.ip("-n", self._namespace, "address", "add", f"{_METADATA}/32", "dev", "lo")
        with namespaces.entered(self._namespace):
            listening = socket.create_server((_METADATA, 80))
        server = web.Server(self._answer, access_log=None)
        self._servers = await asyncio.get_running_loop().create_server(server, sock=listening), server
        if self.why is None:  # it was not ended meanwhile
            await self._boot(user_data)

    async def _boot(self, user_data: str | None) -> None:
        up, told_up = os.pipe()
        process = self._process = self._first_process(told_up)
        os.close(told_up)
        loop = asyncio.get_running_loop()
        loop.add_reader(up, self._is_up, up)
        descriptor = os.pidfd_open(process.pid)
        loop.add_reader(descriptor, self._has_ended, descriptor)
        folder = self._site.folder / "machines" / self.instance
        folder.mkdir(parents=True, exist_ok=True)
        made = init.Machine(
            namespace=self._namespace,
            address=self.address,
            hostname="ip-" + self.address.replace(".", "-"),
            folder=str(folder),
            kept=_kept(),
            hidden=[str(self._site.folder), str(FILES / ".areal")],
            endpoint=self._site.endpoint,
            user_data=user_data,
            power_off_s=self._site.power_off_s,
            up=told_up,
        )
        assert process.stdin is not None
        with process.stdin as told:
            told.write(json.dumps(made._asdict()).encode())
        await self._up.wait()

    def _first_process(self, told_up: int) -> subprocess.Popen[bytes]:
        """Of a PID namespace. It waits to be told what to make."""
        path = self._site.folder / "logs" / f"{self.instance}.log"
        path.parent.mkdir(exist_ok=True)
        with path.open("ab") as log, namespaces.new_pids():
            return subprocess.Popen(
                [sys.executable, "-S", "-P", init.__file__],
                cwd=FILES,
                env={"PYTHONPATH": str(FILES), "PATH": init.ENVIRONMENT["PATH"]},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=[told_up],
            )

    def _is_up(self, descriptor: int) -> None:
        """It says so, or has ended before it could."""
        asyncio.get_running_loop().remove_reader(descriptor)
        os.close(descriptor)
        self._up.set()

    def _has_ended(self, descriptor: int) -> None:
        asyncio.get_running_loop().remove_reader(descriptor)
        os.close(descriptor)
        assert self._process is not None
        code = self._process.wait()
        if self.why is None:
            self.why = "powered off" if code == 0 else "crashed"
        self._down.set()
        self._ended(self)

    async def _answer(self, request: web.BaseRequest) -> web.Response:
        """The metadata service, version 2: what is asked without a token is refused."""
        if request.method == "PUT":
            return web.Response(text=_TOKEN)
        if request.headers.get("X-aws-ec2-metadata-token") != _TOKEN:
            return web.Response(status=401)
        known = {"instance-id": self.instance, "iam/security-credentials/": _ROLE}
        known[f"iam/security-credentials/{_ROLE}"] = json.dumps(
            {
                "Code": "Success",
                "AccessKeyId": "ASIAEMULATED" + self.instance[-8:].upper(),
                "SecretAccessKey": "emulated",
                "Token": "emulated",
                "Expiration": _utc(time.time() + _CREDENTIALS_S),
            }
        )
        if self.reclaimed_at is not None:
            notice = {"action": "terminate", "time": _utc(self.reclaimed_at)}
            known["spot/instance-action"] = json.dumps(notice)
        text = known.get(request.path.removeprefix("/latest/meta-data/"))
        return web.Response(status=404) if text is None else web.Response(text=text)

    async def down(self) -> None:
        """Wait for the end of what runs of it."""
        if self._process is not None:
            await self._down.wait()

    async def unplug(self) -> None:
        """Give up what it has of this host, once it is over."""
        servers, self._servers = self._servers, None
        if servers is not None:
            listening, server = servers
            listening.close()
            await server.shutdown(0)
            namespaces.delete(self._namespace)

    def end(self, why: str, *, at_once: bool) -> None:
        """Power it off, in order unless `at_once`: whichever comes first says why."""
        self.why = self.why or why
        if at_once:
            self._send(signal.SIGKILL)
        else:
            self._send(signal.SIGTERM)
            asyncio.get_running_loop().call_later(self._site.power_off_s + _KILL_AFTER_S, self._send, signal.SIGKILL)

    def _send(self, signum: signal.Signals) -> None:
        if self._process is not None and not self._down.is_set():
            self._process.send_signal(signum)


def _kept() -> list[str]:
    """Folders that software needs and that the file system of a machine would not have: on another one than the root,
    or in what is fresh there."""
    mounted = {line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()} - {"/"}
    needed = {str(FILES), *(str(Path(folder).resolve()) for folder in (FILES, sys.prefix, sys.base_prefix))}
    apart = mounted | set(init.FRESH)
    return sorted(path for path in needed if any(path == place or path.startswith(f"{place}/") for place in apart))


def _utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
