"""Supervise the roles of one machine: the launcher and every remote worker have one Supervision each.

Each role has a thread, and so does each watcher. The first error is kept as the failure of all roles, and stops them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from areal_core.config.groups import LaunchConfig
from areal_core.errors import ArealError, ProcessError
from areal_core.launch.supervisor import RoleSpec, StopSignal, Supervisor
from areal_core.run.folders import Log
from areal_core.storage.rundir import RunDir


class Supervision:
    """Supervises roles in threads that end together. All methods are thread-safe."""

    def __init__(
        self,
        run_dir: RunDir,
        launch: LaunchConfig,
        *,
        log: Log,
        forward: Log,
        end: Callable[[], None],
        counts: Callable[[BaseException], bool] = lambda error: True,
    ) -> None:
        """`log` receives events of processes, `forward` receives the log lines of the processes themselves.
        `end` stops all roles after a failure. `counts` says whether an error is a failure."""
        self.failure: BaseException | None = None
        self._run_dir, self._launch = run_dir, launch
        self._log, self._forward = log, forward
        self._end, self._counts = end, counts
        self._state = threading.Lock()
        self._supervisors: list[Supervisor] = []

    def run(
        self,
        spec: RoleSpec,
        stop: StopSignal,
        on_ready: Callable[[int, dict[str, Any]], None] | None = None,
        *,
        locks: tuple[int, ...] = (),
    ) -> None:
        """Supervise the processes of a role until they have ended or `stop` is set; they inherit `locks`.
        Raises ProcessError when one of them has no restart left."""
        supervisor = Supervisor(
            self._run_dir,
            spec,
            self._launch,
            stop=stop,
            on_ready=on_ready,
            log=self._log,
            forward=self._forward,
            pass_fds=locks,
        )
        with self._state:
            self._supervisors.append(supervisor)
        supervisor.run()

    @contextmanager
    def thread(
        self, name: str, work: Callable[[], None], *, patience_s: float | None = None
    ) -> Iterator[threading.Thread]:
        """Run `work` in a thread during the `with`, then wait for the thread, at most `patience_s` seconds.
        An error within the `with` is also a failure, so that it stops the thread."""
        thread = threading.Thread(target=self.guarded, args=(work,), name=name, daemon=True)
        thread.start()
        try:
            yield thread
        except BaseException as error:
            self.fail(error)
            raise
        finally:
            thread.join(patience_s)

    def guarded(self, work: Callable[[], None]) -> None:
        """Run `work` in the calling thread and record its error as a failure."""
        try:
            work()
        except OSError as error:
            where = f": {error.filename}" if error.filename else ""
            self.fail(ProcessError(f"can't use the run's folder{where}: {error.strerror or error}"))
        except BaseException as error:
            self.fail(error)
            if not isinstance(error, ArealError):
                raise

    def fail(self, error: BaseException) -> None:
        """Keep the first failure, and stop all roles."""
        with self._state:
            if self.failure is not None or not self._counts(error):
                return
            self.failure = error
        self._end()

    def explain(self) -> None:
        """From now on, make stopped processes write their stacks to their logs."""
        with self._state:
            for supervisor in self._supervisors:
                supervisor.explains = True
