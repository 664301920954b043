"""One run from its folder to its summary, for flows, benchmarks and `python -m areal_core` alike.

    prepare   (areal_core.prepare) checks what can be checked, makes the base model, opens the tracking run
    Run       supervises the five roles, each in a thread of its caller's; what they are is `role_specs`
    execute   all of it, in this process's threads

The order of an orderly end: the trainer finishes, the controller writes summary.json and exits, generation servers are
stopped, the evaluator leaves by itself, the tracker sends what is left. The first failure of a role stops all others
and is the one reported; a failed run never leaves a summary.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import queue
import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal

from areal_core.config import RunConfig
from areal_core.controller_client import ControllerClient
from areal_core.errors import ArealError, ProcessError, TrackingError
from areal_core.launch import FileLock, RoleSpec, StopSignal, Supervisor
from areal_core.prepare import Log, preflight, prepare, python, run_folder, sole_owner
from areal_core.rundir import RunDir
from areal_core.tracking.outbox import Outbox
from areal_core.types import RunStatus, RunSummary, TokenLedger

__all__ = ["Run", "execute", "preflight", "prepare", "read_summary", "role_specs", "run_folder"]

Role = Literal["generation", "controller", "trainer", "evaluator"]

_ROLES: frozenset[Role] = frozenset(("generation", "controller", "trainer", "evaluator"))
_TRAINER = ("trainer", "")  # among the arrivals: all its ranks are ready
_POLL_S = 1.0  # between two looks at the controller's status


def role_specs(run: RunDir, config: RunConfig, cores: Sequence[int]) -> dict[str, RoleSpec]:
    """How the processes of a run are started. `cores` are those that this process may use."""
    servers, ranks = config.generation_servers, config.trainer_processes
    pinned = config.launch.pin and config.mode == "async" and servers + ranks <= min(len(cores), config.launch.devices)

    def core(position: int) -> set[int] | None:
        """Of generation and training alone: all that a run may use, in either mode, are `launch.devices` cores."""
        if config.emulated:
            return None  # its devices are no cores, and its processes sleep
        return {cores[position]} if pinned else set(cores[: config.launch.devices])

    def server_argv(index: int) -> list[str]:
        return python(
            "areal_core.generation.server",
            *("--model", run.info().model_path, "--host", "127.0.0.1", "--port", 0),
            *("--ready-file", run.ready_file("generation", index), "--weight-version", 0),
            *("--timeline", run.timeline_file("generation", index)),
            *("--slots", config.generation.slots),
            *("--context", config.task.max_prompt_tokens + config.task.max_new_tokens),
            *(["--deterministic"] if config.generation.deterministic else []),
            *(["--emulate", run.root / "config.json"] if config.emulated else []),
        )

    def role(module: str, *options: Any) -> list[str]:
        return python(module, "--run-dir", run.root, *options)

    specs = (
        RoleSpec(
            name="generation",
            argv=server_argv,
            count=servers,
            cpus=core,
            nice=config.launch.generation_nice,
            exits=False,
        ),
        RoleSpec(
            name="controller",
            argv=lambda _: role("areal_core.service"),
            cpus=lambda _: set(cores[servers : servers + ranks]) if pinned else None,  # servers have none to spare
        ),
        RoleSpec(
            name="trainer",
            argv=lambda index: role("areal_core.training.trainer", "--index", index),
            count=ranks,
            cpus=lambda index: core(servers + index),
            gang=ranks > 1,
            env={"GLOO_SOCKET_IFNAME": "lo"},  # ranks of one machine meet on its loopback
        ),
        RoleSpec(name="evaluator", argv=lambda _: role("areal_core.evaluation"), nice=config.launch.evaluator_nice),
        RoleSpec(name="tracker", argv=lambda _: role("areal_core.tracking"), nice=config.launch.evaluator_nice),
    )
    return {spec.name: spec for spec in specs}


class Run:
    """A prepared run. `generate`, `rollout`, `train`, `evaluate` and `track` each supervise one role and block until it
    has ended; each needs a thread of its own. When one fails, all of them raise that first failure.

    Raises ProcessError when another launcher runs this run.
    """

    def __init__(self, run_dir: RunDir, *, log: Log = print) -> None:
        self.run_dir = run_dir
        self.config = run_dir.config()
        self._info = run_dir.info()
        self._log = log
        self._lock: FileLock | None = sole_owner(run_dir, self.config)  # its children hold it too
        self._specs = role_specs(run_dir, self.config, sorted(os.sched_getaffinity(0)))
        self._state = threading.Lock()  # guards the seven below and the lock
        self._failure: BaseException | None = None
        self._stopped: str | None = None
        self._started: set[Role] = set()
        self._over: set[Role] = set()
        self._closed = False  # the end is settled
        self._tracking = False  # the tracker runs
        self._abort = StopSignal()
        self._stop_servers = StopSignal()
        self._stop_tracker = StopSignal()
        self._servers: dict[str, int] = {}  # URL of a generation server -> a pidfd of it
        self._arrivals: queue.Queue[tuple[str, str] | None] = queue.Queue()  # None: the controller is ready
        self._ready_ranks: set[int] = set()

    # -- the five roles ------------------------------------------------------------------------------------------------

    def generate(self) -> None:
        """Keep the generation servers running until the controller has ended."""
        with self._role("generation"):
            introducing = threading.Thread(target=self._guarded, args=(self._introduce,), name="introduce", daemon=True)
            introducing.start()
            try:
                self._supervise("generation", self._stop_servers, self._server_ready)
            finally:
                self._stop_servers.set()
                self._arrivals.put(None)
                introducing.join()
                while self._servers:
                    os.close(self._servers.popitem()[1])

    def rollout(self) -> None:
        """Keep the controller running until it has written the summary."""
        with self._role("controller"):
            watching = threading.Thread(target=self._guarded, args=(self._watch_progress,), name="watch", daemon=True)
            watching.start()
            try:
                self._supervise("controller", self._abort, lambda index, info: self._arrivals.put(None))
                if not self._abort.is_set() and not self.run_dir.summary.exists():
                    raise ProcessError("controller-0 exited with code 0 and left no summary.json")
            finally:
                self._stop_servers.set()
                watching.join()
            _later(self.config.launch.stop_timeout_s, self._abort.set)  # nobody else has anything left to do

    def train(self) -> None:
        """Keep the trainer's ranks running until they have finished."""
        with self._role("trainer"):
            self._supervise("trainer", self._abort, self._rank_ready)

    def evaluate(self) -> None:
        """Keep the evaluator running until there is nothing more to score; an emulation has nothing to score."""
        with self._role("evaluator"):
            if not self.config.emulated:
                self._supervise("evaluator", self._abort)

    def track(self) -> None:
        """Keep the tracker running until all other roles have ended and it has sent what there is, within
        tracking.flush_timeout_s. A tracker that fails stops nothing."""
        if self._info.tracking_uri is None:
            return
        with self._state:
            self._tracking = True
        try:
            self._supervise("tracker", self._stop_tracker)
        except (ProcessError, OSError) as error:
            self._log(f"the run goes on untracked; its points wait in {self.run_dir.outbox}: {error}")
        finally:
            with self._state:
                self._tracking = False
                self._release_when_over()

    # -- for the caller ------------------------------------------------------------------------------------------------

    def status(self) -> RunStatus | None:
        """A look at the run; None while its controller does not answer."""
        client = ControllerClient(self.run_dir, patience_s=0.0)
        try:
            return client.status()
        except ArealError:
            return None
        finally:
            client.close()

    def stop(self, reason: str) -> None:
        """End the run now; the roles return, and the run can be resumed. Does nothing once the run has ended."""
        with self._state:
            self._stopped = self._stopped or reason
        self._end_all()

    def report(self) -> RunSummary:
        """The summary of a run that has ended in order. Raises the first failure, or ProcessError for a stopped run."""
        if self._failure is not None:
            raise self._failure
        if not self.run_dir.summary.exists():
            why = self._stopped or "its roles did not run to their end"
            raise ProcessError(f"run {self._info.run_id} was stopped ({why}); it can be resumed by its run_id")
        return read_summary(self.run_dir)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _supervise(
        self, role: str, stop: StopSignal, on_ready: Callable[[int, dict[str, Any]], None] | None = None
    ) -> None:
        Supervisor(
            self.run_dir,
            self._specs[role],
            self.config.launch,
            stop=stop,
            on_ready=on_ready,
            log=self._log,
            pass_fds=(self._lock.fd,) if self._lock else (),
        ).run()

    @contextmanager
    def _role(self, role: Role) -> Iterator[None]:
        """The life of a role: its failure is the run's, and the last one to end closes the run."""
        with self._state:
            self._started.add(role)
        try:
            yield
        except ArealError as error:
            self._fail(error)
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            with self._state:
                self._over.add(role)
            self._close_when_over()
        if self._failure is not None:
            raise self._failure

    def _guarded(self, action: Callable[[], None]) -> None:
        """A thread of ours that ends with an error ends the run."""
        try:
            action()
        except BaseException as error:
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        with self._state:
            if self._failure is not None or self._stopped:
                return  # a consequence
            if "controller" in self._over:  # it has ended in order: the run is complete
                self._log(f"after the end of the run: {error}")
                return
            self._failure = error
        self._log(f"the run has failed: {error}")
        self._end_all()

    def _end_all(self) -> None:
        self._abort.set()
        self._stop_servers.set()
        self._close_when_over()

    def _close_when_over(self) -> None:
        """Once no role runs or will run: settle how the run ended, and let the tracker finish."""
        with self._state:
            expected = self._started if self._abort.is_set() else _ROLES
            if self._closed or not expected <= self._over:
                return
            self._closed = True
        if self._failure is not None:
            self.run_dir.summary.unlink(missing_ok=True)
        finished = self.run_dir.summary.exists()
        self._close_tracking("FINISHED" if finished else "FAILED" if self._failure else "KILLED")
        with self._state:
            self._release_when_over()

    def _release_when_over(self) -> None:
        if self._closed and not self._tracking and self._lock:
            self._lock.release()
            self._lock = None

    def _close_tracking(self, status: str) -> None:
        if self._info.tracking_uri is None:
            return
        try:
            outbox = Outbox(self.run_dir.outbox, self._info.run_id)
            outbox.end(status)
            outbox.close()
        except (TrackingError, sqlite3.Error) as error:
            self._log(f"the end of the run can't be tracked: {error}")
            self._stop_tracker.set()
            return
        patience_s = self.config.tracking.flush_timeout_s + self.config.launch.stop_timeout_s
        _later(patience_s, self._stop_tracker.set)

    def _server_ready(self, index: int, info: dict[str, Any]) -> None:
        self._servers[info["url"]] = os.pidfd_open(info["pid"])  # it can't have been reaped yet
        self._arrivals.put((f"generation-{index}", info["url"]))

    def _rank_ready(self, index: int, info: dict[str, Any]) -> None:
        self._ready_ranks.add(index)
        if self._trainer_is_ready:
            self._arrivals.put(_TRAINER)

    @property
    def _trainer_is_ready(self) -> bool:
        return len(self._ready_ranks) == self._specs["trainer"].count

    def _introduce(self) -> None:
        """Tell the controller of every server that is ready, and of all of them when it was started again. The first
        ones wait for the trainer: RL wall time starts with them, and the start of processes is not part of it."""
        client = ControllerClient(self.run_dir, patience_s=_POLL_S)
        servers: dict[str, str] = {}
        unknown: set[str] = set()
        complaint = ""
        while not self._stop_servers.is_set():
            with suppress(queue.Empty):
                arrival = self._arrivals.get(timeout=_POLL_S if unknown else None)
                if arrival is None:
                    unknown = set(servers)
                elif arrival != _TRAINER:
                    servers[arrival[0]] = arrival[1]
                    unknown.add(arrival[0])
            for name in sorted(unknown):
                waiting = not self._trainer_is_ready or self.run_dir.controller_url() is None
                if self._stop_servers.is_set() or waiting:
                    break  # the end, or a ready event will come
                try:
                    client.join(name, servers[name])
                    unknown.discard(name)
                except ArealError as error:  # the controller is being restarted, or the server has died meanwhile
                    if str(error) != complaint:
                        complaint = str(error)
                        self._log(f"{name} is not at work yet: {complaint}")
        client.close()

    def _end_server(self, url: str) -> None:
        """Kill a server that the controller has taken out, so that it is started again and joins anew."""
        pidfd = self._servers.pop(url, None)
        if pidfd is not None:
            with suppress(ProcessLookupError):  # it has ended by itself
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                self._log(f"the generation server at {url} was taken out by the controller: killed")
            os.close(pidfd)

    def _watch_progress(self) -> None:
        """Fail a run that makes no new step for launch.stall_timeout_s; end servers that the controller has lost."""
        limit_s = self.config.launch.stall_timeout_s
        seen: tuple[int, str | None] | None = None
        since = time.monotonic()
        while not self._stop_servers.wait(_POLL_S):
            status = self.status()
            for url in status.lost_servers if status else ():
                self._end_server(url)
            progress = (status.step, status.finished) if status else seen
            if progress != seen:
                seen, since = progress, time.monotonic()
            elif time.monotonic() - since > limit_s:
                where = f"after step {seen[0]} of {self.config.training.steps}" if seen else "since the start"
                logs = self.run_dir.logs
                self._fail(ProcessError(f"no new step {where} for {limit_s:g} s (launch.stall_timeout_s); see {logs}"))


def _later(seconds: float, action: Callable[[], None]) -> None:
    timer = threading.Timer(seconds, action)
    timer.daemon = True
    timer.start()


def read_summary(run: RunDir) -> RunSummary:
    values = json.loads(run.summary.read_text())
    return RunSummary(**{**values, "tokens": TokenLedger(**values["tokens"])})


def execute(
    config: RunConfig,
    *,
    run_id: str | None = None,
    flow_run_id: str | None = None,
    tags: Mapping[str, str] | None = None,
    log: Log = print,
    on_status: Callable[[RunStatus], None] | None = None,
) -> RunSummary:
    """Prepare a run, run it to its end and return its summary; `on_status` is called about once a second.

    Raises what `prepare` raises, and the run's first failure. An exception raised into the calling thread, such as
    KeyboardInterrupt, stops the run before it goes on its way.
    """
    run_dir = prepare(config, run_id=run_id, flow_run_id=flow_run_id, tags=tags, log=log)
    if run_dir.summary.exists():
        return read_summary(run_dir)
    run = Run(run_dir, log=log)
    roles = (run.track, run.rollout, run.generate, run.train, run.evaluate)
    with concurrent.futures.ThreadPoolExecutor(len(roles), "role") as threads:
        try:
            running = [threads.submit(role) for role in roles]
            while concurrent.futures.wait(running, _POLL_S).not_done:
                if on_status is not None and (status := run.status()):
                    on_status(status)
        except BaseException as error:
            run.stop(type(error).__name__)
            raise
    return run.report()
