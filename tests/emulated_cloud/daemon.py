"""The process that holds an emulated cloud together, until its parent ends or asks it to.

It lives on the control host, a namespace at the same switch as the machines, as moto's server does. `EmulatedCloud`
asks it for what tests want where AWS's API is: `POST /emulated/NAME` with the arguments as JSON.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import signal
import time
import traceback
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web
from botocore.exceptions import ClientError

from areal_core.launch.process import die_with_parent
from tests.emulated_cloud.machines import PREFIX, Machine, Site, reach_all
from tests.emulated_cloud.proxy import TERMINATED, Proxy
from tests.support import namespaces
from tests.support.cloud import Cloud, emulated, tags_of
from tests.support.namespaces import Switch

ADDRESS, PORT = "10.64.255.1", 4566  # of the control host, and of the API on it
CONTROL_HOST = "control"
CONTROL = "/emulated/"  # how paths of what tests ask for begin
STARTS = "starts.jsonl"  # file in the cloud's folder
_LOOK_S = 1.0  # between two looks at moto's instances, where no call may have changed them


class Options(msgspec.Struct, forbid_unknown_fields=True):
    own: str  # how the names of its namespaces begin
    folder: str
    power_off_s: float


class Daemon:
    def __init__(self, options: Options, switch: Switch, moto: Cloud) -> None:
        self._folder = Path(options.folder)
        endpoint = f"http://{ADDRESS}:{PORT}"
        self._site = Site(options.own, self._folder, switch, endpoint, options.power_off_s)
        self._ec2 = moto.client("ec2")
        self._machines: dict[str, Machine] = {}
        self._boots = True  # machines that come run something
        self._tasks: set[asyncio.Task[None]] = set()
        self._look = asyncio.Event()
        self._stop = asyncio.Event()
        self._starts = (self._folder / STARTS).open("a", buffering=1)
        describe = self._ec2.describe_launch_template_versions
        self._proxy = Proxy(moto.endpoint, describe=describe, changed=self._look.set)

    async def run(self, ready: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._stop.set)
        server = web.Server(self._handle, access_log=None, auto_decompress=False)
        async with self._proxy, await loop.create_server(server, ADDRESS, PORT):
            self._spawn(self._follow())
            ready()
            try:
                await self._stop.wait()
            finally:
                await self._close()

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for machine in self._machines.values():
            machine.end("the cloud ends", at_once=True)
        for machine in self._machines.values():
            await machine.down()
            await machine.unplug()
        self._starts.close()

    # Machines follow moto's instances.

    async def _follow(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._look.wait(), _LOOK_S)
            self._look.clear()
            running = await asyncio.to_thread(self._running)
            for instance, described in running.items():
                if instance not in self._machines:
                    self._add(described)
            for instance, machine in self._machines.items():
                if instance not in running and machine.why is None:
                    machine.end("terminated", at_once=False)

    def _running(self) -> dict[str, Mapping[str, Any]]:
        filters = [{"Name": "instance-state-name", "Values": ["running"]}]
        reservations = self._ec2.describe_instances(Filters=filters)["Reservations"]
        found = [instance for reservation in reservations for instance in reservation["Instances"]]
        return {instance["InstanceId"]: instance for instance in found}

    def _add(self, described: Mapping[str, Any]) -> None:
        machine = Machine(self._site, len(self._machines), described, self._has_ended)
        self._machines[machine.instance] = machine
        self._spawn(self._boot(machine, boots=self._boots))

    async def _boot(self, machine: Machine, *, boots: bool) -> None:
        user_data = await asyncio.to_thread(self._user_data, machine.instance) if boots else None
        if machine.why is None:
            try:
                await machine.start(user_data)
                self._begins(machine)
            except BaseException:
                machine.end("crashed", at_once=True)
                raise
        if machine.over:
            await machine.unplug()

    def _user_data(self, instance: str) -> str | None:
        found = self._ec2.describe_instance_attribute(InstanceId=instance, Attribute="userData")
        coded = found["UserData"].get("Value")
        return base64.b64decode(coded).decode() if coded else None

    def _begins(self, machine: Machine) -> None:
        """Written once, before its end, whichever is noticed first."""
        if not machine.noted:
            machine.noted = True
            self._write("start", machine)

    def _has_ended(self, machine: Machine) -> None:
        self._begins(machine)
        self._write("end", machine, why=machine.why)
        self._look.set()
        self._spawn(machine.unplug())
        if machine.why == "powered off":
            self._spawn(asyncio.to_thread(self._terminate, machine.instance))

    def _terminate(self, instance: str) -> None:
        try:
            self._ec2.terminate_instances(InstanceIds=[instance])
        except ClientError as error:  # somebody else was faster
            if error.response["Error"]["Code"] != TERMINATED:
                raise

    def _write(self, event: str, machine: Machine, **what: object) -> None:
        run = tags_of(machine.described).get("areal:run")
        line = {"event": event, "at": time.time(), "instance": machine.instance, "run": run, **what}
        self._starts.write(json.dumps(line) + "\n")

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._is_done)

    def _is_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):  # nothing that a test could rely on
            traceback.print_exception(error)
            self._stop.set()

    # What tests ask for.

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if not request.path.startswith(CONTROL):
            return await self._proxy.handle(request)
        asked = {"have_boot": self._have_boot, "machines": self._tell, "reclaim": self._reclaim}
        try:
            return web.json_response(asked[request.path.removeprefix(CONTROL)](**await request.json()))
        except (KeyError, TypeError, ValueError) as error:
            return web.json_response(repr(error), status=400)

    def _tell(self) -> dict[str, int]:
        return {instance: pid for instance, machine in self._machines.items() if (pid := machine.pid) is not None}

    def _have_boot(self, boots: bool) -> None:
        self._boots = boots

    def _reclaim(self, instance: str, notice_s: float) -> None:
        machine = self._machines[instance]
        machine.reclaimed_at = time.time() + notice_s
        self._spawn(self._reclaimed(machine, notice_s))

    async def _reclaimed(self, machine: Machine, notice_s: float) -> None:
        await asyncio.sleep(notice_s)
        if machine.why is None:
            machine.end("reclaimed", at_once=False)
            await asyncio.to_thread(self._terminate, machine.instance)


def serve(options: Options) -> None:
    """Until it is asked to end; in the end nothing is left of it. Says on standard output when it is ready."""
    die_with_parent(signal.SIGTERM)
    parent = os.getppid()
    namespaces.sweep()
    try:
        switch = Switch(f"{options.own}-switch")
        host = f"{options.own}-{CONTROL_HOST}"
        switch.plug_in(host, CONTROL_HOST, ADDRESS, PREFIX)
        reach_all(host)
        namespaces.enter(host)
        with emulated(Path(options.folder)) as moto:
            asyncio.run(Daemon(options, switch, moto).run(lambda: print("ready", flush=True)))
    finally:
        namespaces.end(options.own, but=[parent])
