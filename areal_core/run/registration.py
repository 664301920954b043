"""Generation servers of one machine and the controller: who is ready is introduced, who was lost is ended.

The machine that heads a run and every other one that generates have one of these each. A controller that was started
again knows nobody: all servers are introduced to it. A server that the controller has taken out is killed, so that its
supervisor starts it again and it joins anew: the states of its life are in areal_core.controller.registry.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from areal_core.api.controller_client import ControllerClient
from areal_core.errors import ArealError
from areal_core.launch.supervisor import StopSignal
from areal_core.storage.rundir import RunDir

POLL_S = 1.0  # between two looks at where the controller is
_ANSWER_S = 10.0  # for a controller that is there


@dataclass(frozen=True, slots=True)
class _Server:
    name: str
    url: str
    pidfd: int


class ServerRegistration:
    """`running` has a thread of its own do it. `server_ready` and `wake` may be called from any thread."""

    def __init__(self, run_dir: RunDir, *, ranks: int, stop: StopSignal, log: Callable[[str], None] = print) -> None:
        """The first servers wait for all `ranks` of the trainer to be ready: RL wall time starts with them, and the
        start of processes is not part of it."""
        self._run_dir = run_dir
        self._ranks = ranks
        self._stop = stop
        self._log = log
        self._arrivals: queue.SimpleQueue[_Server | None] = queue.SimpleQueue()  # None: look again
        self._ranks_were_ready = False
        self._complaint = ""

    def server_ready(self, index: int, info: dict[str, Any]) -> None:
        """A server has written its ready file. Its supervisor calls this, so that it can't have been reaped yet."""
        self._arrivals.put(_Server(f"generation-{index}", info["url"], os.pidfd_open(info["pid"])))

    def wake(self) -> None:
        """Something has changed: the controller or a rank is ready, or `stop` is set."""
        self._arrivals.put(None)

    @contextmanager
    def running(self, guarded: Callable[[Callable[[], None]], None], patience_s: float | None = None) -> Iterator[None]:
        """Look after servers in a thread until the end of the `with`, which sets `stop`; `guarded` runs it there. It is
        waited for `patience_s`: it may be asking a controller that is out of reach."""
        thread = threading.Thread(target=guarded, args=(self._run,), name="register", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            self.wake()
            thread.join(patience_s)
            while not self._arrivals.empty():
                if (server := self._arrivals.get()) is not None:
                    os.close(server.pidfd)

    def _run(self) -> None:
        client = ControllerClient(self._run_dir, patience_s=POLL_S, timeout_s=_ANSWER_S)
        servers: dict[str, _Server] = {}  # by name
        unknown: set[str] = set()  # to the controller, as far as is known here
        controller: dict[str, Any] | None = None
        try:
            while not self._stop.is_set():
                with suppress(queue.Empty):
                    if (arrival := self._arrivals.get(timeout=POLL_S)) is not None:
                        _forget(servers, arrival.name)
                        servers[arrival.name] = arrival
                        unknown.add(arrival.name)
                now = self._run_dir.ready_info("controller")
                if now != controller:
                    controller, unknown = now, set(servers)
                    client.close()  # its connection is to the one before
                if controller is None or not self._ready():
                    continue
                for lost in self._lost(client, servers.values()):
                    self._kill(lost)
                    _forget(servers, lost.name)
                    unknown.discard(lost.name)
                for name in sorted(unknown):
                    if not self._stop.is_set() and self._register(client, servers[name]):
                        unknown.discard(name)
        finally:
            client.close()
            for name in list(servers):
                _forget(servers, name)

    def _ready(self) -> bool:
        """Whether every rank has been ready once; one that was restarted since is no reason to wait."""
        files = (self._run_dir.ready_file("trainer", rank) for rank in range(self._ranks))
        self._ranks_were_ready = self._ranks_were_ready or all(file.exists() for file in files)
        return self._ranks_were_ready

    def _lost(self, client: ControllerClient, servers: Iterable[_Server]) -> list[_Server]:
        """Servers of this machine that the controller has taken out; none are known while it can't be asked."""
        try:
            urls = client.status().lost_servers
        except ArealError:
            return []
        return [server for server in servers if server.url in urls]

    def _kill(self, server: _Server) -> None:
        with suppress(ProcessLookupError):  # it has ended by itself
            signal.pidfd_send_signal(server.pidfd, signal.SIGKILL)
            self._log(f"the generation server at {server.url} was taken out by the controller: killed")

    def _register(self, client: ControllerClient, server: _Server) -> bool:
        """Whether it is at work; one that takes its time to join must not keep others from being ended."""
        try:
            return client.register(server.name, server.url, timeout_s=POLL_S)
        except ArealError as error:  # the controller is being restarted, or the server has died meanwhile
            if str(error) != self._complaint:
                self._complaint = str(error)
                self._log(f"{server.name} is not at work yet: {error}")
            return False


def _forget(servers: dict[str, _Server], name: str) -> None:
    if name in servers:
        os.close(servers.pop(name).pidfd)
