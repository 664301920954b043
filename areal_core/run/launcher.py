"""Run one training run to its summary, for flows, benchmarks and `python -m areal_core`.

    prepare   (areal_core.run.prepare) checks the configuration, makes the base model, opens the tracking run
    Run       supervises the five roles, each in a thread of its caller's; `role_specs` lists their processes
    execute   both, in threads of this process

The roles of a complete run end in this order. The trainer finishes. The controller writes summary.json and exits. The
launcher stops the generation servers. The evaluator exits, and the tracker sends its remaining points. A stopped run
ends with a checkpoint instead of a summary. The first role that fails stops all others, and its error is reported. A
failed run never leaves a summary.
"""

from __future__ import annotations

import concurrent.futures
import json
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import Any, Literal

import msgspec

from areal_core.api.controller_client import ControllerClient
from areal_core.config.schema import RunConfig
from areal_core.errors import ArealError, ProcessError, TrackingError
from areal_core.evaluation.servers import ROLE as EVALUATION
from areal_core.launch.heartbeat import CheckTimer, Standstill
from areal_core.launch.logs import Journal
from areal_core.launch.supervisor import StopSignal
from areal_core.run.folders import DiskSpace, Log, run_folder
from areal_core.run.ownership import Ownership
from areal_core.run.preflight import preflight
from areal_core.run.prepare import prepare
from areal_core.run.registration import POLL_S, ServerRegistration
from areal_core.run.roles import role_specs
from areal_core.run.supervision import Supervision
from areal_core.storage.lease import LeaseLostError
from areal_core.storage.rundir import RunDir
from areal_core.tracking.outbox import EndStatus, Outbox
from areal_core.types import STOPPED, RunStatus, RunSummary

__all__ = ["Run", "execute", "preflight", "prepare", "read_summary", "role_specs", "run_folder", "summary_of"]

Role = Literal["generation", "controller", "trainer", "evaluator"]

_STOP_POLL_S = 0.2
_ROLES: frozenset[Role] = frozenset(("generation", "controller", "trainer", "evaluator"))


class Run:
    """A prepared run: `generate`, `rollout`, `train`, `evaluate` and `track` each supervise one role.

    Each of these methods blocks until its role has ended, and needs a thread of its own. When one role fails, all of
    them raise that first failure. The constructor raises ProcessError when another launcher runs this run.
    """

    def __init__(self, run_dir: RunDir, *, log: Log = print) -> None:
        self.run_dir = run_dir
        self.config = run_dir.config()
        self._log = Journal(run_dir.log_file("launcher"), "launcher-0", log)
        self._state = threading.Lock()  # guards the attributes below, and the ownership
        self._stopped: str | None = None
        self._started: set[Role] = set()
        self._over: set[Role] = set()
        self._closed = False  # whether the end of the run is recorded
        self._tracking = False  # whether the tracker is running
        self._abort = StopSignal()
        self._stop_servers = StopSignal()
        self._stop_files = StopSignal()
        self._stop_tracker = StopSignal()
        self._supervision = Supervision(
            run_dir, self.config.launch, log=self._log, forward=log, end=self._failed, counts=self._counts
        )
        self._owned: Ownership | None = Ownership(
            run_dir, self.config, run_dir.info().checkpoint_url, log=self._log, on_lost=self._supervision.fail
        )
        self._info = run_dir.numbered(self._owned.number)
        run_dir.forget_ready()
        if not self.config.admits_machines:
            run_dir.forget_ports()
        self._specs = role_specs(run_dir, self.config, sorted(os.sched_getaffinity(0)))
        self._registration = ServerRegistration(
            run_dir, ranks=self.config.trainer_processes, stop=self._stop_servers, log=self._log
        )

    # -- the five roles ------------------------------------------------------------------------------------------------

    def generate(self) -> None:
        """Keep the generation servers running until the controller has ended, unless remote workers run them.
        If other machines may join, keep the data server running until all remote workers have ended."""
        with self._role("generation"), ExitStack() as beside:
            if self.config.admits_machines:  # until remote workers know how the run ended
                serves = self._supervision.thread("files", lambda: self._supervise("files", self._stop_files))
                beside.enter_context(serves)
            if "generation" in self.config.remote_roles:
                return
            with self._registration.running(self._supervision):
                self._supervise("generation", self._stop_servers, self._registration.server_ready)

    def rollout(self) -> None:
        """Keep the controller running until it has written the summary."""
        with self._role("controller"):
            with self._supervision.thread("watch", self._watch):
                try:
                    self._supervise("controller", self._abort, self._registration.wake)
                    if not (self._abort.is_set() or self._stopped or self.run_dir.summary.exists()):
                        raise ProcessError("controller-0 exited with code 0 without writing summary.json")
                finally:
                    self._stop_servers.set()
            _later(self.config.launch.stop_timeout_s, self._abort.set)  # the other roles have no work left

    def train(self) -> None:
        """Keep the ranks of the trainer running until they have finished.

        If other machines train, the ranks of this machine, if any, are the first ones and run under torchrun. The
        rendezvous then runs until the controller has ended.
        """
        with self._role("trainer"):
            if "trainer" not in self.config.remote_roles:
                self._supervise("trainer", self._abort, self._registration.wake)
                return
            with self._supervision.thread("rendezvous", lambda: self._supervise("rendezvous", self._stop_servers)):
                if self.config.launch.head_trains:
                    self._supervise("node", self._abort)

    def evaluate(self) -> None:
        """Keep the evaluator and its own servers running until every version is scored.
        Returns at once if the run scores no versions."""
        with self._role("evaluator"):
            if not self.config.evaluated:
                return
            done = StopSignal()
            with ExitStack() as beside:
                if self.config.evaluation_servers:
                    servers = self._supervision.thread(EVALUATION, lambda: self._supervise(EVALUATION, done))
                    beside.enter_context(servers)
                beside.callback(done.set)
                self._supervise("evaluator", self._abort)

    def track(self) -> None:
        """Keep the tracker running until all other roles have ended and it has sent the remaining points.
        Sending takes at most tracking.flush_timeout_s. A failed tracker stops no other role."""
        if self._info.tracking_uri is None:
            return
        with self._state:
            self._tracking = True
        try:
            self._supervise("tracker", self._stop_tracker)
        except (ProcessError, OSError) as error:
            self._log(f"the run continues without tracking; its metrics are queued in {self.run_dir.outbox}: {error}")
        finally:
            with self._state:
                self._tracking = False
                self._release_when_over()

    # -- for the caller ------------------------------------------------------------------------------------------------

    def status(self) -> RunStatus | None:
        """The current status of the run; None while its controller does not respond."""
        with closing(ControllerClient(self.run_dir, patience_s=0.0)) as client, suppress(ArealError):
            return client.status()
        return None

    def stop(self, reason: str) -> None:
        """Stop the run, which can be resumed. Does nothing once the run has ended.
        The trainer ends its step and writes a checkpoint, within launch.stop_timeout_s; then the roles return."""
        with self._state:
            self._stopped = self._stopped or reason
        try:
            self._save()
        finally:
            self._end_all()

    def report(self) -> RunSummary:
        """The summary of a complete run. Raises the first failure, or ProcessError for a stopped run."""
        if self._supervision.failure is not None:
            raise self._supervision.failure
        if not self.run_dir.summary.exists():
            why = self._stopped or "its roles did not finish"
            raise ProcessError(f"run {self._info.run_id} was stopped ({why}); resume it by its run_id")
        return read_summary(self.run_dir)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _save(self) -> None:
        """Let a running trainer end its step and write a checkpoint, for at most launch.stop_timeout_s."""
        if not (self._training and self.run_dir.ready_info("trainer")):
            return
        bound_s = self.config.launch.stop_timeout_s
        deadline, client = time.monotonic() + bound_s, ControllerClient(self.run_dir, patience_s=0.0, timeout_s=bound_s)
        self._log(f"stopping the run: the trainer finishes its step and writes a checkpoint, within {bound_s:g} s")
        with closing(client), suppress(ArealError):  # the controller ends once the checkpoint is written
            while self._training:
                if time.monotonic() > deadline:
                    self._log(
                        "the trainer did not finish its step within launch.stop_timeout_s; a resumed run repeats it"
                    )
                    break
                client.stop(STOPPED)  # repeated, because a restarted controller has lost the request
                self._abort.wait(_STOP_POLL_S)

    @property
    def _training(self) -> bool:
        return not (self._abort.is_set() or self._over & {"controller", "trainer"})

    def _supervise(
        self, role: str, stop: StopSignal, on_ready: Callable[[int, dict[str, Any]], None] | None = None
    ) -> None:
        locks = (self._owned.fd,) if self._owned else ()  # child processes hold the run's lock too
        self._supervision.run(self._specs[role], stop, on_ready, locks=locks)

    @contextmanager
    def _role(self, role: Role) -> Iterator[None]:
        """Track the life of a role: its failure fails the run, and the last role to end closes the run."""
        with self._state:
            self._started.add(role)
        try:
            yield
        except BaseException as error:
            self._supervision.fail(error)
            if not isinstance(error, ArealError):
                raise
        finally:
            with self._state:
                self._over.add(role)
            self._close_when_over()
        if self._supervision.failure is not None:
            raise self._supervision.failure

    def _counts(self, error: BaseException) -> bool:
        """Whether an error is a failure of the run."""
        if self._stopped:
            return False  # a consequence of the stop
        if "controller" in self._over:  # the controller ended in order, so the run is complete
            self._log(f"after the end of the run: {error}")
            return False
        return True

    def _failed(self) -> None:
        self._log(f"the run has failed: {self._supervision.failure}", logging.ERROR)
        self._end_all()

    def _end_all(self) -> None:
        self._abort.set()
        self._stop_servers.set()
        self._stop_files.set()
        self._close_when_over()

    def _close_when_over(self) -> None:
        """Once no role runs or will run: record how the run ended, and let the tracker finish."""
        with self._state:
            expected = self._started if self._abort.is_set() else _ROLES
            if self._closed or not expected <= self._over:
                return
            self._closed = True
        if self._owned is not None:
            try:
                self._owned.confirm()
            except LeaseLostError as error:
                self._supervision.failure = self._supervision.failure or error
                self._log(f"the run has failed: {error}", logging.ERROR)
        if self._supervision.failure is not None:
            self.run_dir.summary.unlink(missing_ok=True)
        finished = self.run_dir.summary.exists()
        self._close_tracking("FINISHED" if finished else "FAILED" if self._supervision.failure else "KILLED")
        with self._state:
            self._release_when_over()

    def _release_when_over(self) -> None:
        if self._closed and not self._tracking and self._owned:
            self._owned.release()
            self._owned = None

    def _close_tracking(self, status: EndStatus) -> None:
        if self._info.tracking_uri is None:
            return
        try:
            with closing(Outbox(self.run_dir.outbox, self._info.run_id)) as outbox:
                outbox.end(status)
        except (TrackingError, sqlite3.Error) as error:
            self._log(f"can't record the end of the run for tracking: {error}")
            self._stop_tracker.set()
            return
        patience_s = self.config.tracking.flush_timeout_s + self.config.launch.stop_timeout_s
        _later(patience_s, self._stop_tracker.set)

    def _watch(self) -> None:
        """Fail a run whose processes all wait for each other, or whose disk is nearly full."""
        standstill, timer = Standstill(self.run_dir.heartbeats, self.config.launch), CheckTimer()
        disk = DiskSpace(self.run_dir, self.config, self._log)
        while not self._stop_servers.wait(POLL_S):
            disk.check()
            if (elapsed_s := timer.elapsed()) and (how := standstill.check(elapsed_s)):
                self._supervision.explain()
                raise ProcessError(f"{how}; stacks are in {self.run_dir.logs}")


def _later(seconds: float, action: Callable[[], None]) -> None:
    timer = threading.Timer(seconds, action)
    timer.daemon = True
    timer.start()


def read_summary(run: RunDir) -> RunSummary:
    return summary_of(run.summary.read_text())


def summary_of(text: str) -> RunSummary:
    """Parse the text of a summary.json."""
    return msgspec.convert(json.loads(text), RunSummary)  # msgspec's own JSON reader accepts no NaN


def execute(
    config: RunConfig,
    *,
    run_id: str | None = None,
    tags: Mapping[str, str] | None = None,
    log: Log = print,
    on_status: Callable[[RunStatus], None] | None = None,
    on_stop: Callable[[], object] = list,
) -> RunSummary:
    """Prepare a run, run it to its end and return its summary; `on_status` is called about once a second.

    An exception raised into the calling thread, such as KeyboardInterrupt, stops the run and is then raised again.
    `on_stop` is called when such a stop begins: the process may be killed before the stop has ended. Raises the errors
    of `prepare`, and the run's first failure.
    """
    run_dir = prepare(config, run_id=run_id, tags=tags, log=log)
    if run_dir.summary.exists():
        return read_summary(run_dir)
    run = Run(run_dir, log=log)
    roles = (run.track, run.rollout, run.generate, run.train, run.evaluate)
    with concurrent.futures.ThreadPoolExecutor(len(roles), "role") as threads:
        try:
            running = [threads.submit(role) for role in roles]
            while concurrent.futures.wait(running, POLL_S).not_done:
                if on_status is not None and (status := run.status()):
                    on_status(status)
        except BaseException as error:
            run.stop(type(error).__name__)
            on_stop()
            raise
    return run.report()
