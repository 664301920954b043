"""`python -m areal_core.rewards.host`: reward workers of a run on another machine than its controller's.

    controller --POST /rewards/{place}, which brings an answer and waits for work--> a thread --pipe--> its worker

Nothing here listens, and nothing is kept: what was suspended in a worker that is gone begins again in another one. A
worker that has lost its process, or that the controller has given up, begins a new incarnation. SIGTERM ends all of
them: the controller is told.
"""

from __future__ import annotations

import argparse
import functools
import logging
import queue
import secrets
import signal
import threading
import time
from contextlib import closing
from pathlib import Path

from areal_core.api.controller_client import WORK_S, ControllerClient
from areal_core.environments.registry import open_environment
from areal_core.errors import ArealError, ConfigError, GenerationError, RewardError
from areal_core.launch import logs, process
from areal_core.models.tokenizer import Tokenizer
from areal_core.rewards.remote import Work, decode_work, encode_outcome
from areal_core.rewards.worker import WorkerProcess, advance
from areal_core.storage.rundir import RunDir

logger = logging.getLogger(__name__)
_SILENT_S = 3 * WORK_S  # of a controller, after which it is asked again
_LAST_WORDS_S = 2.0


class Host:
    """The workers of this machine, each with a thread of its own."""

    def __init__(self, run: RunDir, first: int, count: int) -> None:
        """`count` of them, in the run's places from `first` on. Raises ConfigError where this machine lacks what the
        run's environment needs."""
        self._run = run
        config, model_path = run.config(), run.info().model_path
        self._limit_s = config.rollout.reward_timeout_s
        self._function = functools.partial(advance, config, model_path)
        open_environment(config, Tokenizer.from_folder(model_path))
        self._name = secrets.token_hex(8)  # what incarnations here begin with
        self._happened: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()  # None: a worker is ready
        self._threads = [
            threading.Thread(target=self._work, args=(place,), name=f"reward-{place}", daemon=True)
            for place in range(first, first + count)
        ]

    def serve(self, ready_file: Path) -> None:
        """Work until an error ends it, which is raised, or `stop`."""
        for thread in self._threads:
            thread.start()
        for _ in self._threads:
            self._next_one()
        process.announce_ready(ready_file)
        while True:
            self._next_one()

    def stop(self) -> None:
        """Have the workers leave, and `serve` raise SystemExit. For handlers of signals."""
        self._happened.put(SystemExit(128 + signal.SIGTERM))

    def leave(self) -> None:
        """Tell the controller that all of them end."""
        with closing(ControllerClient(self._run, patience_s=0.0, timeout_s=_LAST_WORDS_S)) as controller:
            try:
                controller.rewards_leave(self._name)
            except ArealError as error:  # it finds out by itself
                logger.debug("the controller does not hear that its reward workers here end: %s", error)

    def _next_one(self) -> None:
        if (failure := self._happened.get()) is not None:
            raise failure

    def _work(self, place: int) -> None:
        try:
            with closing(ControllerClient(self._run, timeout_s=_SILENT_S)) as controller:
                self._incarnate(controller, place, first=True)
                while True:
                    self._incarnate(controller, place)
        except Exception as error:  # noqa: BLE001 - raised in the main thread
            self._happened.put(error)

    def _incarnate(self, controller: ControllerClient, place: int, *, first: bool = False) -> None:
        """One incarnation of a worker, to its end."""
        worker = WorkerProcess(self._function, place, self._run.timeline_file("rewards", place))
        try:
            worker.start()
            if first:
                self._happened.put(None)
            incarnation, answered, answer = f"{self._name}-{secrets.token_hex(8)}", 0, b""
            while (work := decode_work(controller.reward_work(place, incarnation, answered, answer))) is not None:
                since = time.monotonic()
                answered, answer = work.number, self._answer(worker, work)
                if time.monotonic() - since > WORK_S:
                    controller.close()  # on its way a connection that was idle may have been forgotten
        finally:
            worker.kill()

    def _answer(self, worker: WorkerProcess, work: Work) -> bytes:
        """Raises what says nothing of the group: this machine can't do the work."""
        worker.forgotten += work.forgotten
        try:
            outcome = worker.ask(work.arrived, self._limit_s)
        except RewardError as error:
            return encode_outcome(error, lost=True)
        if isinstance(outcome, ArealError) and not isinstance(outcome, RewardError | GenerationError):
            raise outcome
        return encode_outcome(outcome)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--first", type=int, required=True, help="place of the first worker in the run")
    parser.add_argument("--workers", type=int, required=True)
    options = parser.parse_args()
    run = RunDir(options.run_dir)
    ready_file = run.ready_file("rewards", options.first)
    logs.start("rewards")
    process.adopt(ready_file)
    try:
        host = Host(run, options.first, options.workers)
        signal.signal(signal.SIGTERM, lambda *_: host.stop())
        try:
            host.serve(ready_file)
        finally:
            host.leave()
    except ArealError as error:
        logger.error("%s", error)
        raise SystemExit(process.SPENT if isinstance(error, ConfigError) else 1) from None


if __name__ == "__main__":
    main()
