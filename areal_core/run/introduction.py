"""Generation servers of one machine and the controller: who is ready is introduced, who was lost is ended.

The machine that heads a run and every other one that generates have one of these each. A controller that was started
again knows nobody: all servers are introduced to it. A server that the controller has taken out is killed, so that its
supervisor starts it again and it joins anew.
"""

from __future__ import annotations

import os
import queue
import signal
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from areal_core.api.controller_client import ControllerClient
from areal_core.errors import ArealError
from areal_core.launch.supervisor import StopSignal
from areal_core.storage.rundir import RunDir

POLL_S = 1.0  # between two looks at where the controller is
_Server = tuple[str, str]  # name, URL


class Introductions:
    """`run` blocks, in a thread of its own, until `stop` is set and `wake` is called. The other methods may be called
    from any thread."""

    def __init__(self, run_dir: RunDir, *, ranks: int, stop: StopSignal, log: Callable[[str], None] = print) -> None:
        """The first servers wait for all `ranks` of the trainer to be ready: RL wall time starts with them, and the
        start of processes is not part of it."""
        self._run_dir = run_dir
        self._ranks = ranks
        self._stop = stop
        self._log = log
        self._pidfds: dict[str, int] = {}  # by URL
        self._arrivals: queue.SimpleQueue[_Server | None] = queue.SimpleQueue()  # None: look again
        self._ranks_were_ready = False

    def server_ready(self, index: int, info: dict[str, Any]) -> None:
        """A server has written its ready file. Its supervisor calls this, so that it can't have been reaped yet."""
        self._pidfds[info["url"]] = os.pidfd_open(info["pid"])
        self._arrivals.put((f"generation-{index}", info["url"]))

    def wake(self) -> None:
        """Something has changed: the controller or a rank is ready, or `stop` is set."""
        self._arrivals.put(None)

    def run(self) -> None:
        client = ControllerClient(self._run_dir, patience_s=POLL_S)
        servers: dict[str, str] = {}
        unknown: set[str] = set()
        controller: dict[str, Any] | None = None
        complaint = ""
        while not self._stop.is_set():
            with suppress(queue.Empty):
                if (arrival := self._arrivals.get(timeout=POLL_S)) is not None:
                    servers[arrival[0]] = arrival[1]
                    unknown.add(arrival[0])
            now = self._run_dir.ready_info("controller")
            if now != controller:
                controller, unknown = now, set(servers)
                client.close()  # its connection is to the one before
            if controller is None or not self._ready():
                continue
            for name in sorted(unknown):
                if self._stop.is_set():
                    break
                try:
                    client.join(name, servers[name])
                    unknown.discard(name)
                except ArealError as error:  # the controller is being restarted, or the server has died meanwhile
                    if str(error) != complaint:
                        complaint = str(error)
                        self._log(f"{name} is not at work yet: {complaint}")
        client.close()

    def end(self, urls: Iterable[str]) -> None:
        """Kill those servers of this machine that the controller has taken out."""
        for url in urls:
            pidfd = self._pidfds.pop(url, None)
            if pidfd is not None:
                with suppress(ProcessLookupError):  # it has ended by itself
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                    self._log(f"the generation server at {url} was taken out by the controller: killed")
                os.close(pidfd)

    def close(self) -> None:
        while self._pidfds:
            os.close(self._pidfds.popitem()[1])

    def _ready(self) -> bool:
        """Whether every rank has been ready once; one that was restarted since is no reason to wait."""
        files = (self._run_dir.ready_file("trainer", rank) for rank in range(self._ranks))
        self._ranks_were_ready = self._ranks_were_ready or all(file.exists() for file in files)
        return self._ranks_were_ready
