"""Sole ownership of a run: one launcher at a time prepares and runs it, across all machines.

A run has two locks, because each alone has a gap. The operating system frees the lock of the run folder as soon as the
launcher and its children are gone, but only this machine sees that lock. Every launcher sees the lease in the run's
store (areal_core.storage.lease), but needs time to tell a dead launcher from a silent one.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

from areal_core.config.schema import RunConfig
from areal_core.errors import StorageError
from areal_core.launch.process import boot_id
from areal_core.launch.supervisor import FileLock
from areal_core.storage import checkpoint
from areal_core.storage.lease import Lease, LeaseLostError
from areal_core.storage.objects import Storage
from areal_core.storage.rundir import RunDir

_PATIENCE_S = 5.0  # retries of a failing store; the lease is then renewed at the next interval
_OWNER_S = 5.0  # beyond launch.stop_timeout_s: time for processes of an earlier launcher to end


class Ownership(AbstractContextManager["Ownership"]):
    """The lock and the lease of one run, from construction until `release`.

    Raises ProcessError while another launcher runs the run, and StorageError.
    """

    def __init__(
        self,
        run: RunDir,
        config: RunConfig,
        checkpoint_url: str,
        *,
        log: Callable[[str], None],
        on_lost: Callable[[LeaseLostError], None] = lambda error: None,
    ) -> None:
        """`checkpoint_url` is the run's store.
        `on_lost` is called, in a thread, when another launcher has taken over the run; this launcher must then end."""
        self._log = log
        self._on_lost = on_lost
        self._lock = FileLock(
            run.launcher_lock,
            timeout_s=config.launch.stop_timeout_s + _OWNER_S,
            busy=f"run_id: {run.root.name} is already running; wait for its end or choose another",
        )
        try:
            storage = Storage.open(checkpoint_url, config.storage.endpoint_url, _PATIENCE_S)
            self._lease = Lease(storage, _where(run), ttl_s=config.storage.lease_s)
            self.number = self._lease.acquire(above=lambda: checkpoint.highest_number(storage))
        except BaseException:
            self._lock.release()
            raise
        self._over = threading.Event()
        self._renewing = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._renewing.start()

    @property
    def fd(self) -> int:
        """File descriptor of the lock, for child processes to inherit."""
        return self._lock.fd

    def confirm(self) -> None:
        """Renew the lease a last time. Raises LeaseLostError if another launcher has taken over the run."""
        self._stop_renewing()
        try:
            self._lease.renew()
        except StorageError as error:
            self._log(f"can't confirm the lease of the run: {error}")

    def release(self) -> None:
        """Release lease and lock. If the store is unreachable, other launchers wait for the lease to expire."""
        self._stop_renewing()
        try:
            self._lease.release()
        except StorageError as error:
            self._log(f"can't release the lease of the run: {error}")
        finally:
            self._lock.release()

    def __exit__(self, *_: object) -> None:
        self.release()

    def _stop_renewing(self) -> None:
        self._over.set()
        if self._renewing is not threading.current_thread():  # this thread itself reports the lost lease
            self._renewing.join()

    def _renew(self) -> None:
        """Renew the lease periodically. During a store outage no other launcher can take over either."""
        silent = False
        while not self._over.wait(self._lease.renewal_s):
            try:
                self._lease.renew()
                if silent:
                    self._log("renewed the lease of the run again")
                silent = False
            except LeaseLostError as error:
                self._on_lost(error)
                return
            except StorageError as error:
                if not silent:
                    self._log(f"can't renew the lease of the run: {error}; will retry")
                silent = True


def _where(run: RunDir) -> str:
    """Name the folder of a run on this machine since its last boot, uniquely.
    The boot id tells apart machines made from copies of one disk; device and inode tell apart containers."""
    found = os.stat(run.launcher_lock)
    return f"{socket.gethostname()}:{run.root} ({found.st_dev:x}.{found.st_ino:x}, {boot_id()})"
