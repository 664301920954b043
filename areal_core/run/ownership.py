"""Sole ownership of a run: one launcher at a time prepares it and runs it, wherever it runs.

Two ties, as each has a hole. The lock of the run's folder knows at once when its holder is gone, and its children with
it; but only this machine sees it. The lease in the run's store (areal_core.storage.lease) is seen by everybody
who could run it, and takes time to tell a dead launcher from a silent one.
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

_PATIENCE_S = 5.0  # with a store that fails; then its lease is renewed the next time
_OWNER_S = 5.0  # beyond launch.stop_timeout_s, for the processes of an earlier launcher to end


class Ownership(AbstractContextManager["Ownership"]):
    """The lock and the lease of one run, from its making until `release`.

    Raises ProcessError while another launcher runs the run, and StorageError."""

    def __init__(
        self,
        run: RunDir,
        config: RunConfig,
        checkpoint_url: str,
        *,
        log: Callable[[str], None],
        on_lost: Callable[[LeaseLostError], None] = lambda error: None,
    ) -> None:
        """`checkpoint_url` is the run's store. `on_lost` is called, in a thread, when another launcher has taken the
        run over: this one is to end."""
        self._log = log
        self._on_lost = on_lost
        self._lock = FileLock(
            run.launcher_lock,
            timeout_s=config.launch.stop_timeout_s + _OWNER_S,
            busy=f"run_id: {run.root.name} is running already; wait for its end or choose another",
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
        """Of the lock, for children to hold it too."""
        return self._lock.fd

    def confirm(self) -> None:
        """Look a last time. Raises LeaseLostError where another launcher has taken the run over."""
        self._stop_renewing()
        try:
            self._lease.renew()
        except StorageError as error:
            self._log(f"the lease of the run can't be confirmed: {error}")

    def release(self) -> None:
        """Let other launchers have the run. A store that can't be told lets them wait for a while."""
        self._stop_renewing()
        try:
            self._lease.release()
        except StorageError as error:
            self._log(f"the lease of the run is not released: {error}")
        finally:
            self._lock.release()

    def __exit__(self, *_: object) -> None:
        self.release()

    def _stop_renewing(self) -> None:
        self._over.set()
        if self._renewing is not threading.current_thread():  # it reports that the lease is lost
            self._renewing.join()

    def _renew(self) -> None:
        """A store that is away for a while costs nothing: nobody else can take the run over meanwhile."""
        silent = False
        while not self._over.wait(self._lease.renewal_s):
            try:
                self._lease.renew()
                if silent:
                    self._log("the lease of the run is renewed again")
                silent = False
            except LeaseLostError as error:
                self._on_lost(error)
                return
            except StorageError as error:
                if not silent:
                    self._log(f"the lease of the run can't be renewed for now: {error}")
                silent = True


def _where(run: RunDir) -> str:
    """Names the folder of a run on this machine, since it was started, and no other one: a machine made from a copy of
    its disk has started another time, and a container beside this one has another file system."""
    found = os.stat(run.launcher_lock)
    return f"{socket.gethostname()}:{run.root} ({found.st_dev:x}.{found.st_ino:x}, {boot_id()})"
