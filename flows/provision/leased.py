"""The nodes of a run under its lease: one process at a time creates, replaces and destroys them.

A process needs the lease (leases.py), and renews it in the store before every change. So a process that has lost the
lease learns it first. A running terraform ends with the lease at the latest. Then the holder cleans up after an earlier
holder:

- It removes a lock of Terraform's state that is older than the lease. The terraform that took the lock has ended: it
  ends with its parent process, and at the latest with its lease (guard.py). This lease was taken after that one ran
  out, or from an earlier process in the same folder. A living terraform would still hold the lock of that folder.
- It deletes cloud resources of the run that no Terraform state holds. Such resources appear if terraform is killed or
  can't store its state.
- If an earlier holder was destroying the nodes, it deletes all resources of the run before it creates any. The earlier
  holder may be suspended just before its last call and make it later. By then the resource is gone, and its name is
  not reused (aws.py).

So the next `make` or `end` repairs a failed or killed change, on this machine or any other.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from areal_core.errors import ProvisionError, StorageError
from areal_core.launch.process import boot_id
from areal_core.storage.lease import LeaseLostError
from areal_core.storage.objects import MissingError, Storage
from flows.provision.cost import Meter
from flows.provision.leases import Claimant, HolderKind, Leases
from flows.provision.nodes import Host, Nodes, control_outputs, with_defaults
from flows.provision.terraform import KilledError, LockedError, Plan

if TYPE_CHECKING:
    from flows.provision.aws import Aws

T = TypeVar("T")

LEASE_S = 900.0
_PAUSE_S = 5.0  # before the first of three retries after a transient failure; doubles each time
_GRACE_S = 60.0  # upper limit, beside a sixth of the lease: time for terraform to end in order before the lease does
_STORE_S = 30.0  # upper limit, beside a sixth of the lease: patience with the store
_EPOCH = 6  # hexadecimal digits: IAM's names have room for no more
_BUSY_S = 5.0  # least patience with another command on this machine
_STOP_S = 3.0  # time for a running terraform to end in order once this process is asked to end
_TRANSIENT = re.compile(
    r"throttl|too many requests|rate exceeded|RequestLimitExceeded|SlowDown|ServiceUnavailable|StatusCode: 5\d\d"
    r"|Internal(Server)?(Error|Failure)|timeout|connection re(set|fused)|no such host|unexpected EOF"
    r"|could not connect|connection was closed|unable to parse response"
    r"|Saved plan is stale|IncorrectState|OperationAborted|interrupted|halted|canceled"
    r"|DependencyViolation|DeleteConflict|InvalidPlacementGroup\.InUse"  # the resource that uses it is being deleted
    r"|AlreadyExists|\.Duplicate",  # the creating call lost its response: not in a state; the next try deletes it
    re.IGNORECASE,
)
_PERMANENT = re.compile(r"(?<!Request)LimitExceeded|InsufficientInstanceCapacity|Unauthorized|AccessDenied")
_log = logging.getLogger(__name__)

Show = Callable[[Plan], None]


class LeasedNodes:
    """Context manager for the nodes of one run while this process holds their lease. Thread-safe.

    Leaving the context destroys no node. If it created nothing, the lease is given back. Otherwise a command puts the
    lease down. A flow's lease runs out, and the reaper destroys the nodes unless another process of the run takes the
    lease over before. If the process is asked to end (an exception that is no Exception), a flow hands its nodes over
    to the reaper.

    Raises ConfigError, StorageError, and ProvisionError with the message of Terraform or the cloud. Raises
    LeaseHeldError if another process holds the lease, and LeaseLostError, a ProcessError, once another process has
    taken it. Transient failures (throttling, 5xx, a killed terraform) are retried three times first."""

    def __init__(
        self,
        request: Mapping[str, Any],
        state: Path,
        *,
        length_s: float = LEASE_S,
        by: HolderKind = "flow",
        kept_until: float | None = None,
        patience_s: float | None = None,
        prices: Mapping[str, float | None] | None = None,
        leases: Leases | None = None,
        cloud: Aws | None = None,
        log: Callable[[str], None] = print,
    ) -> None:
        """Prepare; `request` and `state` are those of Nodes.

        `length_s` is the length of the lease in seconds; the holder renews it. Without a holder, nodes live until
        `kept_until` (seconds since 1970). `patience_s` is the longest wait for a held lease. By default a flow waits
        until a dead holder's lease would run out, and a command does not wait. `prices` are dollars an hour of a node,
        by role. `leases` and `cloud` default to those of the root module `control`."""
        self.request, self._state, self._log = with_defaults(request, control_outputs(state)), state, log
        self._by: HolderKind = by
        self._length_s, self._kept_until = length_s, kept_until
        foundation = self.request["foundation"]
        store_s = min(_STORE_S, length_s / 6)
        self._leases = leases or Leases(Storage.open(f"s3://{foundation['bucket']}", patience_s=store_s))
        self._cloud = cloud or cloud_of(foundation)
        if patience_s is None:
            patience_s = length_s + self._leases.margin_s + _BUSY_S if by == "flow" else 0.0
        self._patience_s = patience_s
        self._prices = prices or {}
        self.run = str(self.request["run"])
        self._changing = threading.RLock()
        self._metering = threading.Lock()
        self._hosts: list[Host] = []  # as last seen
        self._closing = threading.Event()  # the nodes are being handed over
        self._may_have_nodes = self._over = False  # a node may have been created; the lease has been let go
        self._failed = False  # a terraform has failed since the last cleanup
        self._stack = ExitStack()

    def __enter__(self) -> LeasedNodes:
        owner = str(self.request.get("lease", {}).get("owner", "unknown"))
        with ExitStack() as stack:
            self._nodes = nodes = Nodes(
                self.request,
                self._state,
                busy_s=max(_BUSY_S, self._patience_s),
                remaining_s=lambda: self._held.remaining_s(),
                grace_s=min(_GRACE_S, self._length_s / 6),
                stop_s=_STOP_S if self._by == "flow" else _GRACE_S,
                log=self._log,
            )
            stack.push(nodes.__exit__)
            self._held = held = self._leases.acquire(
                self.run,
                Claimant(owner=owner, by=self._by, where=_place(nodes.folder)),
                self._length_s,
                request=self.request,
                kept_until=self._kept_until,
                patience_s=self._patience_s,
            )
            nodes.variables["epoch"] = held.lease.holder[:_EPOCH]
            self._may_have_nodes = not held.fresh
            self._meter = Meter(self._prices, held.lease.spent)
            held.on_renewed, held.on_lost = nodes.terraform.extend, self._lost
            stack.push(self._leave)
            stack.enter_context(held)
            nodes.terraform.init()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._stack.__exit__(*raised)

    def check(self) -> None:
        """Raise LeaseLostError if another process has taken the lease or is about to take it."""
        if self._closing.is_set():
            raise LeaseLostError(f"run {self.run}: its nodes were handed over to the reaper, which destroys them")
        if self._held.lost is not None:
            raise LeaseLostError(self._held.lost)

    def make(self, on_plan: Show = lambda plan: None) -> list[Host]:
        """Create or change the nodes as requested, and return them.

        `on_plan` receives the plan and may refuse it by raising. Only the planned changes are applied. A stale plan is
        made and shown again."""
        return self._changed(self._nodes.plan, on_plan)

    def replace(self, names: Iterable[str], on_plan: Show = lambda plan: None) -> list[Host]:
        """Create the named hosts anew, and any missing ones; return all hosts of the run."""
        with self._changing:
            before = {host.name: host.id for host in self._nodes.hosts()}
            bad = {name: before.get(name) for name in names}

            def plan() -> Plan:  # a partly failed apply may have replaced some
                now = {host.name: host.id for host in self._nodes.hosts()}
                return self._nodes.plan(replace=[name for name, id_ in bad.items() if now.get(name) == id_])

            return self._changed(plan, on_plan)

    def end(self, on_plan: Show = lambda plan: None) -> None:
        """Destroy the nodes, check that nothing of them is left, and give the lease back.
        `on_plan` is that of `make`."""
        with self._changing:
            self._with_retries(lambda: self._end(on_plan))
            self._held.release()
            self._over = True
            self._nodes.terraform.clean()

    def hand_over(self) -> None:
        """Leave the nodes to the reaper, which destroys them on its next round.

        Takes a few seconds, and may be repeated. From now on no thread starts a change: terraform refuses to start,
        pauses end, and every step raises LeaseLostError. The lease is put down once no terraform runs, because the next
        holder may begin at once. If terraform does not end in time, its guard still kills it, and the next holder waits
        for the clock margin. A thread may still make one call to the cloud. That call deletes a resource that no state
        holds, and its id or name is not reused."""
        if self._over:
            return
        self._closing.set()
        ended = self._nodes.terraform.stop(_STOP_S)
        self._set_hosts(self._hosts)
        self._give_up_lease(lambda: self._held.put_down(keep=False, at_once=ended))

    def spent(self) -> Meter:
        """Cost of the nodes so far, including earlier processes of the run."""
        with self._metering:
            self._observe()
            return Meter({}, self._meter.state())

    # -- inside --------------------------------------------------------------------------------------------------------

    def _changed(self, plan: Callable[[], Plan], on_plan: Show) -> list[Host]:
        def change() -> list[Host]:
            self._clean_up()
            planned = plan()
            on_plan(planned)
            self._apply(planned)  # even without changes: the outputs may differ
            return self._nodes.hosts()

        with self._changing:
            return self._set_hosts(self._with_retries(change))

    def _end(self, on_plan: Show) -> None:
        self._clean_up(ending=True)
        there = {found.id for found in self._cloud.found(self.run)}
        self._set_hosts([host for host in self._nodes.hosts() if host.id in there])
        planned = self._nodes.plan_end()
        on_plan(planned)
        self._apply(planned)  # even if nothing is left: the state may still list resources
        self._set_hosts([])
        self._cloud.end(self._cloud.found(self.run), self._confirm)
        left = sorted(f"{kind} {id_}" for kind, id_ in self._nodes.terraform.resources())
        left += [str(found) for found in self._cloud.found(self.run)]
        if left:
            raise LeftoverError(f"run {self.run}: could not delete {', '.join(left)}")

    def _apply(self, plan: Plan) -> None:
        self.check()
        self._held.renew()
        self._may_have_nodes = True
        self._nodes.terraform.apply(plan)

    def _with_retries(self, change: Callable[[], T]) -> T:
        return with_retries(self.run, lambda: self._once(change), self._log, self._closing.wait)

    def _once(self, change: Callable[[], T]) -> T:
        self.check()
        try:
            return change()
        except ProvisionError as error:
            self._failed |= not isinstance(error, LockedError)
            self.check()  # the lost lease may be the reason
            raise

    def _clean_up(self, *, ending: bool = False) -> None:
        """Clean up after an earlier holder or a failure.

        After a failed terraform the lease is renewed as if taken now. Then the lock that terraform left is older than
        the lease. Any other holder of the lock was waited for."""
        begun = self._held.lease.ending and not ending
        self._held.renew(anew=self._failed, ending=ending or None)
        self._failed = False
        self._unlock()
        if found := self._cloud.found(self.run):
            in_state = set() if begun else self._nodes.terraform.resources()
            if strays := [each for each in found if each.key not in in_state]:
                why = "leftovers of an unfinished destruction" if begun else "resources that Terraform's state lacks"
                self._log(f"run {self.run}: deleting {why}: {', '.join(map(str, strays))}")
                self._cloud.end(strays, self._confirm)
        if begun:
            self._held.renew(ending=False)

    def _confirm(self) -> None:
        self.check()
        self._held.confirm()

    def _unlock(self) -> None:
        """Remove an old lock of Terraform's state by its id, so that a newer lock stays.
        Terraform checks and deletes in two steps, so a lock taken between them is lost."""
        lock = self._lock()
        if lock is None or datetime.fromisoformat(lock["Created"]).timestamp() > self._held.lease.taken_at:
            return
        self._log(f"run {self.run}: removing the state lock of a dead terraform, {lock['Who']}")
        try:
            self._nodes.terraform.unlock(lock["ID"])
        except ProvisionError:
            if self._lock() == lock:  # otherwise another process has removed it
                raise

    def _lock(self) -> dict[str, Any] | None:
        """The lock of Terraform's state: a dict with ID, Created and Who; None if there is none."""
        with suppress(MissingError):
            return json.loads(self._leases.storage.get_bytes(f"{self._nodes.state_name}.tflock"))
        return None

    def _set_hosts(self, hosts: list[Host]) -> list[Host]:
        with self._metering:
            self._observe()
            self._hosts = hosts
            self._observe()
        return hosts

    def _observe(self) -> None:
        self._meter.observe(self._hosts, self._leases.clock.wall())
        self._held.note(self._meter.state())

    def _lost(self, reason: str) -> None:
        self._nodes.terraform.extend()  # remaining_s is 0 now, so the guard ends terraform
        _log.error(reason)

    def _leave(self, kind: type[BaseException] | None, *_: object) -> None:
        """Give back, put down or hand over a lease that is still held when the context is left."""
        if self._over or self._held.lost is not None:
            return
        if not self._may_have_nodes:
            self._give_up_lease(self._held.release)
        elif self._by != "flow":
            self._give_up_lease(self._held.put_down)
        elif kind is not None and not issubclass(kind, Exception):
            self.hand_over()

    def _give_up_lease(self, how: Callable[[], None]) -> None:
        try:
            how()
            self._over = True
        except (StorageError, LeaseLostError) as error:
            self._log(f"run {self.run}: could not give up the lease of its nodes: {error}")


class LeftoverError(ProvisionError):
    """A resource of a run still exists, or is still listed, after its deletion."""


def with_retries(
    run: str, change: Callable[[], T], log: Callable[[str], None], pause: Callable[[float], object] = time.sleep
) -> T:
    """Return the result of `change`. Repeat it up to three times if it fails with a transient error."""
    for pause_s in (_PAUSE_S, 2 * _PAUSE_S, 4 * _PAUSE_S):
        try:
            return change()
        except (ProvisionError, StorageError) as error:
            if not is_transient(error):
                raise
            log(f"run {run}: retrying in {pause_s:g} s: {error}")
            pause(pause_s)
    return change()


def is_transient(error: ProvisionError | StorageError) -> bool:
    """Whether an error is transient: the same call may succeed a little later."""
    if isinstance(error, KilledError | LockedError | LeftoverError | StorageError):
        return True
    return bool(_TRANSIENT.search(str(error))) and not _PERMANENT.search(str(error))


def cloud_of(foundation: Mapping[str, Any]) -> Aws:
    """The cloud account and region of a foundation, an output of the root module `control`."""
    from flows.provision.aws import Aws  # boto3 is slow to import

    return Aws(foundation.get("region"), foundation.get("vpc_id"))


def _place(folder: Path) -> str:
    """An identifier of this folder, this machine's disk and this boot.
    A process of an earlier boot counts as elsewhere, so its lease is waited for."""
    mark = folder / "place"
    if not mark.exists():
        mark.write_text(secrets.token_hex(8))
    return f"{socket.gethostname()}:{folder} ({mark.read_text()}, {boot_id()})"
