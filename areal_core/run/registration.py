"""Registration of one machine's generation servers with the controller, and the end of servers that it has lost.

The head node and every remote worker of generation have one of these each. A restarted controller knows no servers: all
are registered again. A server that the controller has taken out is killed, so that its supervisor starts it again and
it joins anew: the states of a server are in areal_core.controller.registry.
"""

from __future__ import annotations

import os
import queue
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import KW_ONLY, dataclass
from typing import Any

from areal_core.api.controller_client import ControllerClient
from areal_core.errors import ArealError
from areal_core.launch.supervisor import StopSignal
from areal_core.run.supervision import Supervision
from areal_core.storage.rundir import RunDir

POLL_S = 1.0  # between two looks at the controller's ready file
_RESPONSE_S = 10.0  # for a controller that is reachable
_LEAVE_S = 60.0  # for a server to hand over what it has, and before it for an update that is under way


@dataclass(frozen=True, slots=True)
class _Server:
    name: str
    url: str
    pidfd: int

    def __del__(self) -> None:
        os.close(self.pidfd)


@dataclass(eq=False)
class ServerRegistration:
    """Registers the servers of this machine, in a thread (`running`). `server_ready` and `wake` are thread-safe."""

    run_dir: RunDir
    _: KW_ONLY
    ranks: int  # of the trainer, all ready before the first server joins: RL wall time leaves their start out
    stop: StopSignal
    stager: str | None = None  # URL of what brings versions onto this machine, where that is needed
    log: Callable[[str], None] = print

    def __post_init__(self) -> None:
        self._arrivals: queue.SimpleQueue[_Server | None] = queue.SimpleQueue()  # None: look again
        self._ranks_were_ready = False
        self._complaint = ""
        self._leaving = False

    def server_ready(self, index: int, info: dict[str, Any]) -> None:
        """A server has written its ready file. Its supervisor calls this, so that it can't have been reaped yet."""
        self._arrivals.put(_Server(f"generation-{index}", info["url"], os.pidfd_open(info["pid"])))

    def wake(self, *_: object) -> None:
        """Something has changed: the controller or a rank is ready, or `stop` is set."""
        self._arrivals.put(None)

    def leave(self) -> None:
        """Have the servers of this machine leave the run, with what they have sampled so far, and set `stop` then. For
        any thread, and handlers of signals."""
        self._leaving = True
        self.wake()

    @contextmanager
    def running(self, beside: Supervision, patience_s: float | None = None) -> Iterator[None]:
        """Register servers in a thread until the end of the `with`, which sets `stop`. The thread is waited for
        `patience_s` at most: it may be waiting for a controller that is out of reach."""
        with beside.beside("register", self._run, patience_s=patience_s):
            try:
                yield
            finally:
                self.stop.set()
                self.wake()

    def _run(self) -> None:
        servers: dict[str, _Server] = {}  # by name
        unregistered: set[str] = set()  # names of servers that the controller does not know yet
        controller: dict[str, Any] | None = None
        with closing(ControllerClient(self.run_dir, patience_s=POLL_S, timeout_s=_RESPONSE_S)) as client:
            while not self.stop.is_set():
                with suppress(queue.Empty):
                    if (arrival := self._arrivals.get(timeout=POLL_S)) is not None:
                        servers[arrival.name] = arrival
                        unregistered.add(arrival.name)
                if self._leaving:
                    self._leave(servers)
                    self.stop.set()
                    return
                now = self.run_dir.ready_info("controller")
                if now != controller:
                    controller, unregistered = now, set(servers)
                    client.close()  # its connection is to the one before
                if controller is None or not self._ready():
                    continue
                for lost in self._lost(client, servers.values()):
                    self._kill(lost)
                    del servers[lost.name]
                    unregistered.discard(lost.name)
                for name in sorted(unregistered):
                    if not self.stop.is_set() and self._register(client, servers[name]):
                        unregistered.discard(name)

    def _ready(self) -> bool:
        """Whether every rank has been ready once; one that was restarted since is no reason to wait."""
        files = (self.run_dir.ready_file("trainer", rank) for rank in range(self.ranks))
        self._ranks_were_ready = self._ranks_were_ready or all(file.exists() for file in files)
        return self._ranks_were_ready

    def _lost(self, client: ControllerClient, servers: Iterable[_Server]) -> list[_Server]:
        """Servers of this machine that the controller has taken out; empty while it can't be reached."""
        try:
            urls = client.status().lost_servers
        except ArealError:
            return []
        return [server for server in servers if server.url in urls]

    def _kill(self, server: _Server) -> None:
        with suppress(ProcessLookupError):  # it has ended by itself
            signal.pidfd_send_signal(server.pidfd, signal.SIGKILL)
            self.log(f"the generation server at {server.url} was taken out by the controller: killed")

    def _register(self, client: ControllerClient, server: _Server) -> bool:
        """Whether the server has joined; the wait for a slow one must not delay the end of lost ones."""
        try:
            return client.register(server.name, server.url, timeout_s=POLL_S, stager=self.stager)
        except ArealError as error:  # the controller is being restarted, or the server has died meanwhile
            if str(error) != self._complaint:
                self._complaint = str(error)
                self.log(f"{server.name} is not at work yet: {error}")
            return False

    def _leave(self, names: Iterable[str]) -> None:
        """Each waits for what the servers are busy with, an update for instance: all of them at once."""
        with ThreadPoolExecutor(max(1, len(servers := list(names))), "leave") as threads:
            list(threads.map(self._leave_one, servers))

    def _leave_one(self, name: str) -> None:
        with closing(ControllerClient(self.run_dir, patience_s=_RESPONSE_S, timeout_s=_LEAVE_S)) as client:
            try:
                client.leave(name)
                self.log(f"{name} has left the run")
            except ArealError as error:
                self.log(f"{name} ends without having left the run: {error}")
