"""The nodes of a run under its lease (leases.py): made, replaced and ended by one at a time, whatever dies meanwhile.

Before anything is changed the lease is renewed in the store, so that whoever has lost it learns so first; and what
terraform is at ends with the lease. Then what an earlier holder may have left is put in order:

- A lock of Terraform's state that is older than the lease is removed. Its terraform has ended: it ends with the process
  that started it, and at the latest with the lease under which that was (guard.py); and this lease was taken once that
  one was over, or from a process in the same folder, whose lock a terraform that lives would still hold.
- What the cloud holds of the run and no state does, as it was made in the moment of a death or its state could not be
  stored, is ended.
- Where the earlier holder was ending the nodes, all that there is is ended before anything is made: he may stand still
  before his last call, and go on later. By then what it names is gone, and its name is not given again (aws.py).

So what failed or was killed half-way is put right by the next `make` or `end`, here or anywhere.
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
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from areal_core.errors import ProvisionError, StorageError
from areal_core.launch.process import boot_id
from areal_core.storage.lease import LeaseLostError
from areal_core.storage.objects import MissingError, Storage
from flows.provision.cost import Meter
from flows.provision.leases import By, Claimant, Leases
from flows.provision.nodes import Host, Nodes, completed, control_outputs
from flows.provision.terraform import KilledError, LockedError, Plan

if TYPE_CHECKING:
    from flows.provision.aws import Aws

T = TypeVar("T")

LEASE_S = 900.0
_PAUSE_S = 5.0  # before what failed for reasons that pass is tried again; each of three times twice as long
_GRACE_S = 60.0  # at most, and a sixth of the lease: for terraform to end in order before it is over
_STORE_S = 30.0  # likewise, of patience with the store
_EPOCH = 6  # digits: IAM's names have room for no more
_BUSY_S = 5.0  # at least, for another command of this machine
_STOP_S = 3.0  # for a terraform that runs to end in order, once this process is asked to end
_PASSING = re.compile(
    r"throttl|too many requests|rate exceeded|RequestLimitExceeded|SlowDown|ServiceUnavailable|StatusCode: 5\d\d"
    r"|Internal(Server)?(Error|Failure)|timeout|connection re(set|fused)|no such host|unexpected EOF"
    r"|could not connect|connection was closed|unable to parse response"
    r"|Saved plan is stale|IncorrectState|OperationAborted|interrupted|halted|canceled"
    r"|DependencyViolation|DeleteConflict|InvalidPlacementGroup\.InUse"  # what uses it is about to be gone
    r"|AlreadyExists|\.Duplicate",  # made by a call whose answer was lost: in no state, hence ended before the next try
    re.IGNORECASE,
)
_LASTING = re.compile(r"(?<!Request)LimitExceeded|InsufficientInstanceCapacity|Unauthorized|AccessDenied")
_log = logging.getLogger(__name__)

Show = Callable[[Plan], None]


class LeasedNodes:
    """A context: the nodes of one run, while this process has their lease. Threads may share it.

    Leaving it ends nothing. Where something was, or may have been, made, the lease of a flow then runs out, unless
    another process of the same run takes it over before, and the reaper ends the nodes; otherwise it is given back. A
    flow that leaves it because it is asked to end (an exception that is no Exception) hands its nodes over.

    Raises ConfigError; HeldError where somebody else is at the nodes; LeaseLostError, a ProcessError, once somebody
    else has taken the lease; StorageError; and ProvisionError with what Terraform or the cloud says. What fails for
    reasons that pass (throttling, 5xx, a killed terraform) has then been tried a few times.
    """

    def __init__(
        self,
        request: Mapping[str, Any],
        state: Path,
        *,
        length_s: float = LEASE_S,
        by: By = "flow",
        kept_until: float | None = None,
        patience_s: float | None = None,
        prices: Mapping[str, float | None] | None = None,
        leases: Leases | None = None,
        cloud: Aws | None = None,
        log: Callable[[str], None] = print,
    ) -> None:
        """`request` and `state` are those of Nodes. The lease is held for `length_s` at a time, and nodes live until
        `kept_until` (seconds since 1970) without a holder. One that is held, perhaps by somebody who is dead, is waited
        for, for `patience_s`: a flow's waits as long as a dead one's takes to run out, unless it is renewed. `prices`
        are those of a node by role, in dollars an hour. `leases` and `cloud` are those of what `control` has made."""
        self.request, self._state, self._log = completed(request, control_outputs(state)), state, log
        self._by: By = by
        self._length_s, self._kept_until = length_s, kept_until
        foundation = self.request["foundation"]
        store_s = min(_STORE_S, length_s / 6)
        self._leases = leases or Leases(Storage.open(f"s3://{foundation['bucket']}", patience_s=store_s))
        self._cloud = cloud or cloud_of(foundation)
        self._patience_s = patience_s
        if patience_s is None:
            self._patience_s = length_s + self._leases.margin_s + _BUSY_S if by == "flow" else 0.0
        self._prices = prices or {}
        self.run = str(self.request["run"])
        self._changing = threading.RLock()
        self._metering = threading.Lock()
        self._hosts: list[Host] = []  # as they were seen last
        self._closing = threading.Event()  # the nodes are being handed over
        self._touched = self._over = False  # something may have been made; the lease is no longer this one's
        self._failed = False  # a terraform since the state was put in order
        self._stack = ExitStack()

    def __enter__(self) -> LeasedNodes:
        owner = str(self.request.get("lease", {}).get("owner", "somebody"))
        with ExitStack() as stack:
            self._nodes = nodes = Nodes(
                self.request,
                self._state,
                busy_s=max(_BUSY_S, self._patience_s or 0.0),
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
                patience_s=self._patience_s or 0.0,
            )
            nodes.variables["epoch"] = held.lease.holder[:_EPOCH]
            self._touched = not held.fresh
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
        """Raises LeaseLostError once somebody else has the lease, or is to have it."""
        if self._closing.is_set():
            raise LeaseLostError(f"run {self.run}: its nodes were handed over, to be ended by the reaper")
        if self._held.lost is not None:
            raise LeaseLostError(self._held.lost)

    def make(self, on_plan: Show = lambda plan: None) -> list[Host]:
        """Have the nodes be as requested: `on_plan` is shown what would change, and may refuse it by raising; then just
        that is done. A plan that has become stale is made, and shown, again."""
        return self._changed(self._nodes.plan, on_plan)

    def replace(self, names: Iterable[str], on_plan: Show = lambda plan: None) -> list[Host]:
        """Make these hosts anew, by their names, and what else is missing; all hosts that there are then."""
        with self._changing:
            before = {host.name: host.id for host in self._nodes.hosts()}
            bad = {name: before.get(name) for name in names}

            def plan() -> Plan:  # an apply that failed half-way may have replaced some
                now = {host.name: host.id for host in self._nodes.hosts()}
                return self._nodes.plan(replace=[name for name, id_ in bad.items() if now.get(name) == id_])

            return self._changed(plan, on_plan)

    def end(self, on_plan: Show = lambda plan: None) -> None:
        """End the nodes, see that nothing is left of them, and give the lease back. A plan is shown as by `make`."""
        with self._changing:
            self._tried(lambda: self._end(on_plan))
            self._held.release()
            self._over = True
            self._nodes.terraform.clean()

    def hand_over(self) -> None:
        """Have the reaper end the nodes, as soon as it looks: for those who have no time for it. Takes a few seconds,
        whatever other threads are at; again is fine.

        From now on no thread starts anything: terraform refuses to start, pauses end, and every step raises
        LeaseLostError. The lease is put down once no terraform runs, as the next holder may begin at once; not before,
        as two would be at the nodes. A terraform whose end isn't seen in time, though its guard has been told to kill
        it, costs the next holder the margin of the clocks. What may be left of a thread is one call to the cloud, which
        ends something that no state holds, and whose id or name is not given again."""
        if self._over:
            return
        self._closing.set()
        ended = self._nodes.terraform.stop(_STOP_S)
        self._seen(self._hosts)
        self._let_go(lambda: self._held.put_down(keep=False, at_once=ended))

    def spent(self) -> Meter:
        """What the nodes have cost until now; earlier processes of the run included."""
        with self._metering:
            self._observe()
            return Meter({}, self._meter.noted())

    # -- inside --------------------------------------------------------------------------------------------------------

    def _changed(self, plan: Callable[[], Plan], on_plan: Show) -> list[Host]:
        def change() -> list[Host]:
            self._settle()
            planned = plan()
            on_plan(planned)
            self._apply(planned)  # even where nothing is to change: what it tells of the hosts may be
            return self._nodes.hosts()

        with self._changing:
            return self._seen(self._tried(change))

    def _end(self, on_plan: Show) -> None:
        self._settle(ending=True)
        there = {found.id for found in self._cloud.found(self.run)}
        self._seen([host for host in self._nodes.hosts() if host.id in there])
        planned = self._nodes.plan_end()
        on_plan(planned)
        self._apply(planned)  # even where nothing is left: the state may say otherwise
        self._seen([])
        self._cloud.end(self._cloud.found(self.run), self._confirm)
        left = sorted(f"{kind} {id_}" for kind, id_ in self._nodes.terraform.held())
        left += [str(found) for found in self._cloud.found(self.run)]
        if left:
            raise LeftError(f"run {self.run}: {', '.join(left)} could not be ended")

    def _apply(self, plan: Plan) -> None:
        self.check()
        self._held.renew()
        self._touched = True
        self._nodes.terraform.apply(plan)

    def _tried(self, change: Callable[[], T]) -> T:
        return tried(self.run, lambda: self._once(change), self._log, self._closing.wait)

    def _once(self, change: Callable[[], T]) -> T:
        self.check()
        try:
            return change()
        except ProvisionError as error:
            self._failed |= not isinstance(error, LockedError)
            self.check()  # it may have failed because the lease is lost
            raise

    def _settle(self, *, ending: bool = False) -> None:
        """Put in order what an earlier holder, or a failure, has left. What a terraform that has failed has left locked
        is older than a lease that is taken anew: whoever else had locked the state was waited for."""
        begun = self._held.lease.ending and not ending
        self._held.renew(anew=self._failed, ending=ending or None)
        self._failed = False
        self._unlock()
        if found := self._cloud.found(self.run):
            held = set() if begun else self._nodes.terraform.held()
            if strays := [each for each in found if each.key not in held]:
                why = "somebody has begun to end" if begun else "is in no state"
                self._log(f"run {self.run}: ending what {why}: {', '.join(map(str, strays))}")
                self._cloud.end(strays, self._confirm)
        if begun:
            self._held.renew(ending=False)

    def _confirm(self) -> None:
        self.check()
        self._held.confirm()

    def _unlock(self) -> None:
        """By its id: one that somebody has taken since is left, but for the moment in which terraform itself looks and
        deletes."""
        lock = self._lock()
        if lock is None or datetime.fromisoformat(lock["Created"]).timestamp() > self._held.lease.taken_at:
            return
        self._log(f"run {self.run}: removing the lock of a terraform that has ended, {lock['Who']}")
        try:
            self._nodes.terraform.unlock(lock["ID"])
        except ProvisionError:
            if self._lock() == lock:  # else it was removed meanwhile
                raise

    def _lock(self) -> dict[str, Any] | None:
        """Of Terraform's state."""
        try:
            return json.loads(self._leases.storage.get_bytes(f"{self._nodes.state_name}.tflock"))
        except MissingError:
            return None

    def _seen(self, hosts: list[Host]) -> list[Host]:
        with self._metering:
            self._observe()
            self._hosts = hosts
            self._observe()
        return hosts

    def _observe(self) -> None:
        self._meter.observe(self._hosts, self._leases.clock.wall())
        self._held.note(self._meter.noted())

    def _lost(self, reason: str) -> None:
        self._nodes.terraform.extend()  # to its end: nothing remains
        _log.error(reason)

    def _leave(self, kind: type[BaseException] | None, *_: object) -> None:
        """What becomes of a lease that was not given back."""
        if self._over or self._held.lost is not None:
            return
        if not self._touched:
            self._let_go(self._held.release)
        elif self._by != "flow":
            self._let_go(self._held.put_down)
        elif kind is not None and not issubclass(kind, Exception):
            self.hand_over()

    def _let_go(self, how: Callable[[], None]) -> None:
        try:
            how()
            self._over = True
        except (StorageError, LeaseLostError) as error:
            self._log(f"run {self.run}: its lease was left as it is: {error}")


class LeftError(ProvisionError):
    """Something of a run is still there, or still listed, after it was ended."""


def tried(
    run: str, change: Callable[[], T], log: Callable[[str], None], pause: Callable[[float], object] = time.sleep
) -> T:
    """Return what `change` returns. It is called up to four times, while it fails for reasons that pass."""
    for pause_s in (_PAUSE_S, 2 * _PAUSE_S, 4 * _PAUSE_S):
        try:
            return change()
        except (ProvisionError, StorageError) as error:
            if not passes(error):
                raise
            log(f"run {run}: trying again in {pause_s:g} s: {error}")
            pause(pause_s)
    return change()


def passes(error: ProvisionError | StorageError) -> bool:
    """Whether the same may succeed a little later."""
    if isinstance(error, KilledError | LockedError | LeftError | StorageError):
        return True
    return bool(_PASSING.search(str(error))) and not _LASTING.search(str(error))


def cloud_of(foundation: Mapping[str, Any]) -> Aws:
    """What `control` has made it in."""
    from flows.provision.aws import Aws  # boto3 is dear to import

    return Aws(foundation.get("region"), foundation.get("vpc_id"))


def _place(folder: Path) -> str:
    """The folder, as no other on any machine, clones of this one's disk included. After a boot it is another place: an
    earlier process's lease is waited for, as others wait for it."""
    mark = folder / "place"
    if not mark.exists():
        mark.write_text(secrets.token_hex(8))
    return f"{socket.gethostname()}:{folder} ({mark.read_text()}, {boot_id()})"
