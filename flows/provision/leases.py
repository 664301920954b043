"""The lease that the nodes of a run live by: who may change them, and until when they may live without anybody.

One object a run, `terraform/leases/RUN.json` of the store, out of reach of the nodes. It is written only over what was
read (`Storage.put_over`), so that of several who want it one has it, and whoever has lost it learns so from his next
write; who is about to change nodes writes first. It holds all that is needed to end the nodes without the one who made
them. A lease that was given back is an empty object, which a list tells; it stays, as the name of a run that was here.

Clocks. A lease says until when it is held by the wall clock of its holder, who renews it every third of its length. He
counts from before he asked, by a clock that goes on while his machine sleeps, and when that is over he stops, and so
does the terraform that he has started (guard.py), even where he himself stands still. Others take the lease `MARGIN_S`
later, by their own wall clocks: two of them may differ by so much, and nobody works beside another. Should they differ
by more, the first one still learns of it at his next write, at most a third of the lease's length later.
"""

from __future__ import annotations

import contextlib
import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, TypedDict

import msgspec

from areal_core.errors import ProvisionError, StorageError
from areal_core.storage.lease import LeaseLostError, Marked
from areal_core.storage.objects import Storage

By = Literal["flow", "command", "reaper"]
Number = Annotated[float, msgspec.Meta(ge=0.0, le=datetime(9999, 1, 1, tzinfo=UTC).timestamp())]

MARGIN_S = 60.0  # by which the wall clocks of two machines may differ
ROOT = "terraform/leases"
_LOOK_S = 2.0  # between two looks at a lease that is waited for
_UNREADABLE = (ValueError, RecursionError)  # msgspec's errors among them
_log = logging.getLogger(__name__)


class HeldError(ProvisionError):
    """Somebody else has the lease."""


@dataclass(frozen=True, slots=True)
class Clock:
    """Seconds since 1970; seconds that pass while the machine sleeps, too; and a way to let them pass."""

    wall: Callable[[], float] = time.time
    passed: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME)
    sleep: Callable[[float], None] = time.sleep


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimant:
    """Who wants a lease."""

    owner: str  # whose the nodes are: a person
    by: By
    where: str  # the one folder whose lock the claimant has: whoever had the lease there is dead
    holder: str = field(default_factory=lambda: secrets.token_hex(16))  # nobody else's


class Spent(TypedDict, total=False):
    """What cost.py notes."""

    prices: dict[str, Number]
    nodes: dict[str, tuple[str, Number, Number]]


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """What the object says. Times are seconds since 1970."""

    run: str
    owner: str
    by: By
    where: str
    holder: str
    beat: Annotated[int, msgspec.Meta(ge=0, lt=2**53)]  # how often it was written
    taken_at: Number
    held_until: Number | None  # None: nobody is at the nodes
    kept_until: Number | None = None  # how long they may live without anybody; None: not at all
    ending: bool = False  # somebody has begun to end the nodes, and his last call may be to come
    root: str = "run"  # the root module of infra/terraform
    request: dict[str, Any] | None = None  # all variables of it; None: not known
    spent: Spent = {}  # what the nodes have cost so far

    @property
    def expires_at(self) -> float:
        """After which the nodes are to be ended; 0.0: at once."""
        return max(self.held_until or 0.0, self.kept_until or 0.0)

    @property
    def expires(self) -> str:
        """The same, for people."""
        return _utc(self.expires_at)


class Leases:
    """The leases of one store. Raises StorageError."""

    def __init__(self, storage: Storage, *, margin_s: float = MARGIN_S, clock: Clock | None = None) -> None:
        self.storage = storage
        self.margin_s = margin_s
        self.clock = clock or Clock()

    def acquire(
        self,
        run: str,
        claimant: Claimant,
        length_s: float,
        *,
        request: Mapping[str, Any] | None,
        kept_until: float | None = None,
        patience_s: float = 0.0,
    ) -> Held:
        """The lease of a run: a new one, one that has run out or was put down, or that of an earlier process in the
        same place. One that is held, perhaps by somebody who is dead, is waited for, for `patience_s`; but not once its
        holder has renewed it meanwhile. A reaper gets those alone that are over, with the `request` in them.

        Raises HeldError.
        """
        waits_since, first = self.clock.passed(), None
        while True:
            found, mark = self._read(run)
            if found and (refusal := self._refusal(found, claimant)):
                first = first or found
                lives = found.by != "reaper" and found.beat != first.beat  # a reaper is done soon
                if lives or claimant.by == "reaper" or self.clock.passed() - waits_since >= patience_s:
                    raise HeldError(refusal)
                self.clock.sleep(_LOOK_S)
                continue
            began, now = self.clock.passed(), self.clock.wall()
            lease = Lease(
                run=run,
                owner=found.owner if found and claimant.by == "reaper" else claimant.owner,
                by=claimant.by,
                where=claimant.where,
                holder=claimant.holder,
                beat=found.beat + 1 if found else 1,
                taken_at=now,
                held_until=now + length_s,
                kept_until=kept_until,
                ending=claimant.by == "reaper" or (found is not None and found.ending),
                request=dict(request) if request is not None else found and found.request,
                spent=found.spent if found else {},
            )
            held = Held(self, lease, mark, length_s, began, fresh=found is None)
            if held.write(lease):  # else somebody else was faster
                return held

    def read(self, run: str) -> Lease | None:
        """The lease of a run; None where there is none, or it was given back. An object that can't be read is told of
        and counts as one that is over, of which nobody knows what was asked for."""
        return self._read(run)[0]

    def is_over(self, lease: Lease) -> bool:
        """Whether nobody has its nodes, nor may they live on."""
        if lease.held_until is None and lease.kept_until is None:
            return True
        return self.clock.wall() > lease.expires_at + self.margin_s

    def live(self) -> list[str]:
        """Runs with a lease that was not given back, over or not."""
        return [PurePosixPath(name).stem for name, size in self.storage.sizes(ROOT).items() if size]

    def known(self) -> list[str]:
        """Runs that ever had a lease."""
        return [PurePosixPath(name).stem for name in self.storage.list(ROOT)]

    # -- inside --------------------------------------------------------------------------------------------------------

    def _refusal(self, found: Lease, claimant: Claimant) -> str | None:
        """Why a lease that is there can't be had."""
        now = self.clock.wall()
        if claimant.by == "reaper":
            return (
                None if self.is_over(found) else f"run {found.run}: {found.owner} has its nodes until {found.expires}"
            )
        died = (found.where, found.by) == (claimant.where, claimant.by)
        if found.held_until is not None and not died and now <= found.held_until + self.margin_s:
            whose = "the reaper" if found.by == "reaper" else f"a {found.by} of {found.owner}"
            until = f"until {_utc(found.held_until)} if not for longer"
            return f"run {found.run}: {whose} is at its nodes, on {found.where}, {until}"
        if claimant.by == "flow" and found.by == "command" and now <= found.expires_at + self.margin_s:
            return (
                f"run {found.run}: {found.owner} keeps its nodes by hand until {found.expires}; "
                "`areal nodes ACTION=destroy` ends them"
            )
        return None

    def _read(self, run: str) -> tuple[Lease | None, str | None]:
        """The lease, and the mark of its object."""
        data, mark = Marked(self.storage, name_of(run)).read()
        if not data:
            return None, mark
        try:
            lease = msgspec.json.decode(data, type=Lease)
            if lease.run != run:
                raise msgspec.ValidationError(f"it is one of run {lease.run!r}")
        except _UNREADABLE as error:
            _log.warning("%s/%s must be a lease, and counts as over: %s", self.storage.url, name_of(run), error)
            nobody: dict[str, Any] = {"owner": "-", "by": "command", "where": "-", "holder": "-"}
            lease = Lease(run=run, **nobody, beat=0, taken_at=0.0, held_until=None, ending=True)
        return lease, mark


class Held:
    """A lease, in the hands of its holder; as a context it is renewed, by a thread. Threads may share it.

    Raises LeaseLostError once somebody else has it, and StorageError.
    """

    def __init__(
        self, leases: Leases, lease: Lease, mark: str | None, length_s: float, began: float, *, fresh: bool
    ) -> None:
        """`began` is when it was asked for."""
        self.lease = lease
        self.fresh = fresh  # there was none before
        self.lost: str | None = None  # why
        self._over: str | None = None  # how this holder has ended it
        self._spent: Mapping[str, Any] = lease.spent
        self._leases, self._mark, self._length_s, self._began = leases, mark, length_s, began
        self._writing = threading.RLock()
        self._ended = threading.Event()
        self._renewing: threading.Thread | None = None
        self.on_renewed: Callable[[], None] = lambda: None
        self.on_lost: Callable[[str], None] = lambda reason: None

    def remaining_s(self) -> float:
        """For how long it is held, whatever happens to it."""
        if self.lost is not None or self._over is not None:
            return 0.0
        return self._began + self._length_s - self._leases.clock.passed()

    def renew(self, *, anew: bool = False, ending: bool | None = None) -> None:
        """Show that it is held, and hold it for its whole length from now on. `anew`: as if it were taken now.
        `ending`: whether somebody is ending the nodes; None: as before."""
        with self._writing:
            began, now = self._leases.clock.passed(), self._leases.clock.wall()
            changes: dict[str, Any] = {"held_until": now + self._length_s} | ({"taken_at": now} if anew else {})
            changes |= {} if ending is None else {"ending": ending}
            self._change(**changes)
            self._began = began
        self.on_renewed()

    def confirm(self) -> None:
        """Before each of many changes: raises LeaseLostError where it is lost; a lease that is nearly over is renewed
        first."""
        self._check()
        if self.remaining_s() < self._length_s / 3:
            self.renew()

    def note(self, spent: Mapping[str, Any]) -> None:
        """What the nodes have cost, to be written with the next renewal."""
        self._spent = dict(spent)

    def put_down(self, *, keep: bool = True, at_once: bool = True) -> None:
        """Hold it no longer: anybody may take it, and the nodes live as long as they are kept, if they are. Not
        `at_once`: others take it as one that runs out now, once clocks can't differ over that."""
        with self._writing:
            self._began = -math.inf  # should the answer be lost, it is renewed first
            until = None if at_once else self._leases.clock.wall()
            self._change(held_until=until, **({} if keep else {"kept_until": None}))
            self._over = "put down"

    def release(self) -> None:
        """Give it back; nothing may be left of the nodes."""
        with self._writing:
            self._check()
            self._began = -math.inf
            if not self.write(None):
                raise self._is_lost()
            self._over = "given back"

    def __enter__(self) -> Held:
        self._renewing = threading.Thread(target=self._keep, name="lease", daemon=True)
        self._renewing.start()
        return self

    def __exit__(self, *_: object) -> None:
        """It is neither given back nor put down."""
        assert self._renewing is not None
        self._ended.set()
        self._renewing.join()

    def write(self, lease: Lease | None) -> bool:
        """Write it over what was there when this holder wrote, or read, it last; whether it is his now. None: give it
        back."""
        data = msgspec.json.encode(lease) if lease else b""
        mark = Marked(self._leases.storage, name_of(self.lease.run)).write(data, self._mark, self._is_ours)
        if mark is None:
            return False
        self._mark = mark
        if lease:
            self.lease = lease
        return True

    def _change(self, **changes: Any) -> None:
        self._check()
        if not self.write(msgspec.structs.replace(self.lease, beat=self.lease.beat + 1, spent=self._spent, **changes)):
            raise self._is_lost()

    def _is_ours(self, data: bytes | None) -> bool:
        try:
            return data is not None and msgspec.json.decode(data, type=Lease).holder == self.lease.holder
        except _UNREADABLE:
            return False

    def _check(self) -> None:
        if self.lost is not None:
            raise LeaseLostError(self.lost)
        if self._over is not None:
            raise LeaseLostError(f"run {self.lease.run}: the lease of its nodes was {self._over}")

    def _is_lost(self) -> LeaseLostError:
        self.lost = f"run {self.lease.run}: the lease of its nodes is lost, somebody else has taken it over"
        with contextlib.suppress(StorageError):
            if found := self._leases.read(self.lease.run):
                self.lost = f"run {self.lease.run}: the lease of its nodes is lost to a {found.by} on {found.where}"
        return LeaseLostError(self.lost)

    def _keep(self) -> None:
        """Renew it every third of its length; oftener once that has failed."""
        wait_s = self._length_s / 3
        while not self._ended.wait(wait_s):
            try:
                self.renew()
                wait_s = self._length_s / 3
            except LeaseLostError as error:
                if self.lost is not None:
                    self.on_lost(str(error))
                return
            except StorageError as error:
                if wait_s == self._length_s / 3:
                    _log.warning("the lease of run %s could not be renewed: %s", self.lease.run, error)
                wait_s = self._length_s / 12


def _utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def name_of(run: str) -> str:
    """The object of a run's lease."""
    return f"{ROOT}/{run}.json"
