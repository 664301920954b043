"""Where a remote worker has its run's folder: shared with the head node, or a copy of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from areal_core.config.schema import RunConfig
from areal_core.errors import ConfigError, ProcessError
from areal_core.launch.supervisor import FileLock, StopSignal
from areal_core.run.remote.share import Share
from areal_core.storage.rundir import RunDir

POLL_S = 1.0  # between two looks at the run
_NO_LAUNCHER_S = 10.0  # a run without a launcher for so long is over
_OWNER_S = 5.0  # beyond launch.stop_timeout_s, for the processes of an earlier command to end


class RunLostError(ProcessError):
    """The run has ended, and not in order, or its head node is out of reach: another one may go on with it."""


Guarded = Callable[[Callable[[], None]], None]  # calls something in a thread of the worker; its error ends the work


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What a share is worked on with, while it is one's own."""

    run: RunDir
    locks: tuple[int, ...]  # inherited by the processes here: a command that takes their place waits for them
    stager: str | None = None  # URL of what brings versions onto this machine; None: they are there
    ended: Callable[[], bool]  # whether the run has ended in order; raises RunLostError


class SharedFolder:
    """The run's folder itself, on a file system that all machines share. CopiedFolder has the same methods."""

    def __init__(self, run: RunDir) -> None:
        self._run = run

    @property
    def name(self) -> str:
        """Of the run, once it is found."""
        return self._run.root.name

    def find(self, patience_s: float, stop: StopSignal) -> RunConfig | None:
        """The run's configuration once a launcher runs it; None where it has ended in order, or `stop` is set. Raises
        ConfigError where none does within `patience_s`."""
        run, deadline = self._run, time.monotonic() + patience_s
        while not ((run.root / "run.json").exists() and FileLock.is_held(run.launcher_lock)):
            if run.summary.exists():
                return None
            if time.monotonic() >= deadline:
                raise ConfigError(f"--run-dir: nobody has started a run in {run.root} within {patience_s:g} s (--wait)")
            if stop.wait(min(POLL_S, patience_s)):
                return None
        return run.config()

    @contextmanager
    def taken(
        self, share: Share, config: RunConfig, address: str, *, guarded: Guarded, stop: StopSignal
    ) -> Iterator[Place]:
        """Within, the share is this worker's alone, whose machine has `address`: it has a lock for each server or
        machine of the share. Waits for the processes of an earlier command to end.

        Raises ProcessError where the share is another worker's, and what keeps the folder from being made."""
        run = self._run
        with ExitStack() as locks:
            held = [
                locks.enter_context(
                    FileLock(
                        run.root / f"host-{share.role}-{index}.lock",
                        timeout_s=config.launch.stop_timeout_s + _OWNER_S,
                        busy=f"--run-dir: {share.role} {index} of run {self.name} is run by another command already",
                    )
                )
                for index in share.indices
            ]
            yield Place(run=run, locks=tuple(lock.fd for lock in held), ended=_Launcher(run).ended)


class _Launcher:
    """A look at the launcher of a run whose folder is shared."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._seen_at = time.monotonic()

    def ended(self) -> bool:
        if self._run.summary.exists():
            return True
        if FileLock.is_held(self._run.launcher_lock):
            self._seen_at = time.monotonic()
        elif time.monotonic() - self._seen_at > _NO_LAUNCHER_S:
            raise RunLostError(f"run {self._run.root.name} has ended and left no summary")
        return False
