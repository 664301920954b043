"""Register one machine's generation servers with the controller, and kill servers that it has lost.

The head node and every remote worker of generation run one registration each. A restarted controller knows no servers,
so all of them are registered again. A server that the controller took out is killed. Its supervisor restarts it, and
the new process joins. The states of a server are in areal_core.controller.registry.
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

POLL_S = 1.0  # between two reads of the controller's ready file
_RESPONSE_S = 10.0  # response time limit of a reachable controller
_LEAVE_S = 60.0  # for a server to finish a running update and hand over its completions


@dataclass(frozen=True, slots=True)
class _Server:
    name: str
    url: str
    pidfd: int

    def __del__(self) -> None:
        os.close(self.pidfd)


@dataclass(eq=False)
class ServerRegistration:
    """Registers this machine's servers, in a thread (`running`). Thread-safe: `server_ready`, `wake`."""

    run_dir: RunDir
    _: KW_ONLY
    ranks: int  # trainer ranks; servers join once all are ready, so that RL wall time excludes start-up
    stop: StopSignal
    stager: str | None = None  # URL of the stager, which fetches versions onto a remote machine
    log: Callable[[str], None] = print

    def __post_init__(self) -> None:
        self._arrivals: queue.SimpleQueue[_Server | None] = queue.SimpleQueue()  # None: check again
        self._ranks_were_ready = False
        self._complaint = ""
        self._leaving = False

    def server_ready(self, index: int, info: dict[str, Any]) -> None:
        """Add a server that has written its ready file.
        The server's supervisor calls this, so the process is not reaped before its pidfd is open."""
        self._arrivals.put(_Server(f"generation-{index}", info["url"], os.pidfd_open(info["pid"])))

    def wake(self, *_: object) -> None:
        """Check again now: the controller or a rank is ready, or `stop` is set."""
        self._arrivals.put(None)

    def leave(self) -> None:
        """Let the servers of this machine leave the run with their completions so far, then set `stop`.
        May be called from any thread and from signal handlers."""
        self._leaving = True
        self.wake()

    @contextmanager
    def running(self, supervision: Supervision, patience_s: float | None = None) -> Iterator[None]:
        """Register servers in a thread until the end of the `with`, which sets `stop`.
        Waits at most `patience_s` for the thread, which may be waiting for an unreachable controller."""
        with supervision.thread("register", self._run, patience_s=patience_s):
            try:
                yield
            finally:
                self.stop.set()
                self.wake()

    def _run(self) -> None:
        servers: dict[str, _Server] = {}  # server name -> server
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
                    client.close()  # the old connection leads to the previous controller
                if controller is None or not self._ready():
                    continue
                for lost in self._lost(client, servers.values()):
                    with suppress(ProcessLookupError):  # the server has already exited
                        signal.pidfd_send_signal(lost.pidfd, signal.SIGKILL)
                        self.log(f"the controller removed the generation server at {lost.url}: killed")
                    del servers[lost.name]
                    unregistered.discard(lost.name)
                for name in sorted(unregistered):
                    if not self.stop.is_set() and self._register(client, servers[name]):
                        unregistered.discard(name)

    def _ready(self) -> bool:
        """Whether every rank has been ready once; servers do not wait for a rank that was restarted since."""
        files = (self.run_dir.ready_file("trainer", rank) for rank in range(self.ranks))
        self._ranks_were_ready = self._ranks_were_ready or all(file.exists() for file in files)
        return self._ranks_were_ready

    def _lost(self, client: ControllerClient, servers: Iterable[_Server]) -> list[_Server]:
        """Servers of this machine that the controller has taken out; empty while it is unreachable."""
        try:
            urls = client.status().lost_servers
        except ArealError:
            return []
        return [server for server in servers if server.url in urls]

    def _register(self, client: ControllerClient, server: _Server) -> bool:
        """Whether the server has joined. The wait is short: a slow server must not delay killing lost ones."""
        try:
            return client.register(server.name, server.url, timeout_s=POLL_S, stager=self.stager)
        except ArealError as error:  # the controller is restarting, or the server has died
            if str(error) != self._complaint:
                self._complaint = str(error)
                self.log(f"{server.name} has not joined yet: {error}")
            return False

    def _leave(self, names: Iterable[str]) -> None:
        """Let all servers leave at the same time, as each may first wait for an update to end."""
        with ThreadPoolExecutor(max(1, len(servers := list(names))), "leave") as threads:
            list(threads.map(self._leave_one, servers))

    def _leave_one(self, name: str) -> None:
        with closing(ControllerClient(self.run_dir, patience_s=_RESPONSE_S, timeout_s=_LEAVE_S)) as client:
            try:
                client.leave(name)
                self.log(f"{name} has left the run")
            except ArealError as error:
                self.log(f"{name} stops without having left the run: {error}")
