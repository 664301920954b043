"""`python -m areal_core.rewards.host`: run reward workers on another machine than the controller's.

    controller --WebSocket /rewards/{place}: work--> a thread --pipe--> its worker
    controller <--outcomes of groups-- another thread <--pipe-- its worker

The host opens no port and stores nothing. Each connection starts a new worker process. Groups that were suspended in a
lost worker begin again in another one.
"""

from __future__ import annotations

import argparse
import logging
import queue
import threading
import time
from contextlib import suppress
from pathlib import Path

from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException
from websockets.sync.client import ClientConnection, connect

from areal_core.api.access import authorization
from areal_core.environments.registry import open_environment
from areal_core.errors import ArealError, ConfigError, GenerationError, ProcessError, RewardError
from areal_core.launch import logs, process
from areal_core.models.tokenizer import Tokenizer
from areal_core.rewards.remote import SILENT_S, decode_work, encode_outcome
from areal_core.rewards.worker import Groups, WorkerProcess
from areal_core.storage.rundir import RunDir

logger = logging.getLogger(__name__)
_PATIENCE_S, _RETRY_S = 60.0, 0.2  # limit for reaching the controller; pause between two attempts


class Host:
    """The reward workers of this machine, each with its own thread."""

    def __init__(self, run: RunDir, first: int, count: int) -> None:
        """Take `count` of the run's worker places, from `first` on.
        Raises ConfigError if this machine lacks something that the run's environment needs."""
        self._run = run
        config, model_path = run.config(), run.info().model_path
        self._limit_s = config.rollout.reward_timeout_s
        self._function = Groups(config, model_path)
        open_environment(config, Tokenizer.from_folder(model_path))
        self._events: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()  # None: a worker is ready
        self._threads = [
            threading.Thread(target=self._work, args=(place,), name=f"reward-{place}", daemon=True)
            for place in range(first, first + count)
        ]

    def serve(self, ready_file: Path) -> None:
        """Serve until an error ends a worker's thread, and raise this error."""
        for thread in self._threads:
            thread.start()
        for _ in self._threads:
            self._next_event()
        process.announce_ready(ready_file)
        while True:
            self._next_event()

    def _next_event(self) -> None:
        if (failure := self._events.get()) is not None:
            raise failure

    def _work(self, place: int) -> None:
        try:
            while True:
                self._connected(place)
        except Exception as error:  # noqa: BLE001 - raised in the main thread
            self._events.put(error)

    def _connected(self, place: int) -> None:
        """Run one worker until it loses its process or its connection."""
        worker = WorkerProcess(self._function, place, self._run.timeline_file("rewards", place), self._limit_s)
        try:
            worker.start()
            worker.open()
            self._events.put(None)
            with suppress(ConnectionClosed), self._connect(place) as socket:
                threading.Thread(target=self._send_outcomes, args=(worker, socket), daemon=True).start()
                for message in socket:
                    assert isinstance(message, bytes)
                    worker.send(decode_work(message))
        finally:
            worker.kill()

    def _connect(self, place: int) -> ClientConnection:
        """Connect to the controller, which may have restarted at another address. Raises ProcessError."""
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                if (url := self._run.controller_url()) is None:
                    raise ConnectionError("the controller is not ready")
                return connect(
                    f"ws{url.removeprefix('http')}/rewards/{place}",
                    additional_headers=authorization(self._run.token()),
                    compression=None,
                    max_size=None,
                    proxy=None,
                    ping_interval=SILENT_S / 2,
                    ping_timeout=_PATIENCE_S,  # a long message delays pings
                )
            except (OSError, WebSocketException) as error:
                if time.monotonic() > deadline:  # the controller frees a place once it misses the last connection
                    why = error.response.body or b"" if isinstance(error, InvalidStatus) else str(error).encode()
                    said = why.decode(errors="replace")[:200]
                    raise ProcessError(f"controller: reward worker {place} can't connect: {said}") from error
            time.sleep(_RETRY_S)

    def _send_outcomes(self, worker: WorkerProcess, socket: ClientConnection) -> None:
        """Send the outcomes of the worker's groups until it loses its process or its connection.
        An error that is not about a group is raised in the main thread: this machine can't do the work."""
        with suppress(ConnectionClosed), socket:
            try:
                while True:
                    group, outcome = worker.receive()
                    if isinstance(outcome, ArealError) and not isinstance(outcome, RewardError | GenerationError):
                        self._events.put(outcome)
                        return
                    socket.send(encode_outcome(group, outcome))
            except RewardError as error:
                worker.kill()
                socket.send(encode_outcome(worker.running, error))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--first", type=int, required=True, help="number of the first worker in the run")
    parser.add_argument("--workers", type=int, required=True)
    options = parser.parse_args()
    run = RunDir(options.run_dir)
    ready_file = run.ready_file("rewards", options.first)
    logs.start("rewards")
    process.tie_to_parent(ready_file)
    try:
        Host(run, options.first, options.workers).serve(ready_file)
    except ArealError as error:
        logger.error("%s", error)
        raise SystemExit(process.EXIT_FINAL if isinstance(error, ConfigError) else 1) from None


if __name__ == "__main__":
    main()
