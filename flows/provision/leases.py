"""Leases: which process may change a run's nodes, and how long nodes may live without an owner.

A lease is one object per run in the store, `terraform/leases/RUN.json`. Nodes can't reach it. Every write is a
compare-and-swap (`Storage.put_if_unchanged`): exactly one claimant wins, and a former holder learns of its loss at its
next write. A holder therefore writes before it changes nodes. The lease holds everything needed to destroy the nodes
without their creator. A returned lease is an empty object, which records that the run existed.

Clocks: a lease names its end by the wall clock of its holder, who renews it after every third of its length. The holder
counts from before its request, by a clock that runs while the machine sleeps. At the end it stops, and guard.py stops
its terraform, even if the holder itself is suspended. Others take the lease `MARGIN_S` later by their own wall clocks.
So two processes never work on the nodes at once if their clocks differ by at most `MARGIN_S`. If they differ by more,
the former holder learns it at its next write, at most a third of the lease's length later.
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
from areal_core.storage.lease import CasObject, LeaseLostError
from areal_core.storage.objects import Storage

HolderKind = Literal["flow", "command", "reaper"]
Number = Annotated[float, msgspec.Meta(ge=0.0, le=datetime(9999, 1, 1, tzinfo=UTC).timestamp())]

MARGIN_S = 60.0  # largest difference of two machines' wall clocks
ROOT = "terraform/leases"
_POLL_S = 2.0  # interval of reads while waiting for a lease
_UNREADABLE = (ValueError, RecursionError)  # includes msgspec's errors
_log = logging.getLogger(__name__)


class LeaseHeldError(ProvisionError):
    """Another process holds the lease."""


@dataclass(frozen=True, slots=True)
class Clock:
    """Clocks in seconds: wall time since 1970, elapsed time with machine sleep, and a sleep function."""

    wall: Callable[[], float] = time.time
    passed: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME)
    sleep: Callable[[float], None] = time.sleep


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimant:
    """A process that wants a lease."""

    owner: str  # the person who owns the nodes
    by: HolderKind
    where: str  # the folder whose lock the claimant has, so an earlier holder there is dead
    holder: str = field(default_factory=lambda: secrets.token_hex(16))  # unique


class MeterState(TypedDict, total=False):
    """State of a cost meter (cost.py)."""

    prices: dict[str, Number]
    nodes: dict[str, tuple[str, Number, Number]]


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """Content of a lease object. Times are in seconds since 1970."""

    run: str
    owner: str
    by: HolderKind
    where: str
    holder: str
    beat: Annotated[int, msgspec.Meta(ge=0, lt=2**53)]  # number of writes
    taken_at: Number
    held_until: Number | None  # None: no holder
    kept_until: Number | None = None  # end of the nodes without a holder; None: at once
    ending: bool = False  # a process has begun to destroy the nodes, and its last call may still come
    root: str = "run"  # the root module of infra/terraform
    request: dict[str, Any] | None = None  # all variables of `root`; None: unknown
    spent: MeterState = {}  # cost of the nodes so far

    @property
    def expires_at(self) -> float:
        """Time after which the nodes are to be destroyed; 0.0 means at once."""
        return max(self.held_until or 0.0, self.kept_until or 0.0)

    @property
    def expires(self) -> str:
        """`expires_at` as text, in UTC."""
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
    ) -> HeldLease:
        """Take a run's lease if it is new, over, put down, or held by an earlier process in the same place.

        A lease that another process holds is waited for, up to `patience_s`, unless its holder renews it meanwhile. A
        reaper gets only leases that are over, and keeps the `request` in them. Raises LeaseHeldError if the lease can't
        be had."""
        waits_since, first = self.clock.passed(), None
        while True:
            found, etag = self._read(run)
            if found and (refusal := self._refusal(found, claimant)):
                first = first or found
                lives = found.by != "reaper" and found.beat != first.beat  # a reaper ends soon
                if lives or claimant.by == "reaper" or self.clock.passed() - waits_since >= patience_s:
                    raise LeaseHeldError(refusal)
                self.clock.sleep(_POLL_S)
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
            held = HeldLease(self, lease, etag, length_s, began, fresh=found is None)
            if held.write(lease):  # otherwise another claimant was faster
                return held

    def read(self, run: str) -> Lease | None:
        """The lease of a run; None if there is none or it was given back.
        An unreadable object is logged and counts as a lease that is over, with an unknown request."""
        return self._read(run)[0]

    def is_over(self, lease: Lease) -> bool:
        """Whether the lease has no holder and its nodes may not live on."""
        if lease.held_until is None and lease.kept_until is None:
            return True
        return self.clock.wall() > lease.expires_at + self.margin_s

    def live(self) -> list[str]:
        """Runs whose lease was not given back, over or not."""
        return [PurePosixPath(name).stem for name, size in self.storage.sizes(ROOT).items() if size]

    def known(self) -> list[str]:
        """Runs that ever had a lease."""
        return [PurePosixPath(name).stem for name in self.storage.list(ROOT)]

    # -- inside --------------------------------------------------------------------------------------------------------

    def _refusal(self, found: Lease, claimant: Claimant) -> str | None:
        """Why the claimant can't have the existing lease; None if it can."""
        now = self.clock.wall()
        if claimant.by == "reaper":
            runs = f"run {found.run}: the lease of {found.owner} on its nodes runs until {found.expires}"
            return None if self.is_over(found) else runs
        died = (found.where, found.by) == (claimant.where, claimant.by)
        if found.held_until is not None and not died and now <= found.held_until + self.margin_s:
            whose = "the reaper" if found.by == "reaper" else f"a {found.by} of {found.owner}"
            until = f"until {_utc(found.held_until)} or longer"
            return f"run {found.run}: {whose} on {found.where} holds the lease of its nodes {until}; retry later"
        if claimant.by == "flow" and found.by == "command" and now <= found.expires_at + self.margin_s:
            return (
                f"run {found.run}: {found.owner} created its nodes by hand and keeps them until {found.expires}; "
                "destroy them with `areal nodes destroy FILE`"
            )
        return None

    def _read(self, run: str) -> tuple[Lease | None, str | None]:
        """The lease and its ETag for the next compare-and-swap."""
        data, etag = CasObject(self.storage, name_of(run)).read()
        if not data:
            return None, etag
        try:
            lease = msgspec.json.decode(data, type=Lease)
            if lease.run != run:
                raise msgspec.ValidationError(f"run: must be {run!r}, got {lease.run!r}")
        except _UNREADABLE as error:
            _log.warning("%s/%s: damaged lease, treated as expired: %s", self.storage.url, name_of(run), error)
            nobody: dict[str, Any] = {"owner": "-", "by": "command", "where": "-", "holder": "-"}
            lease = Lease(run=run, **nobody, beat=0, taken_at=0.0, held_until=None, ending=True)
        return lease, etag


class HeldLease:
    """A lease held by this process. As a context manager it renews the lease in a thread. Thread-safe.

    Raises StorageError, and LeaseLostError once another process has the lease."""

    def __init__(
        self, leases: Leases, lease: Lease, etag: str | None, length_s: float, began: float, *, fresh: bool
    ) -> None:
        """`began` is the elapsed time (`Clock.passed`) just before the request for the lease."""
        self.lease = lease
        self.fresh = fresh  # there was no lease before
        self.lost: str | None = None  # reason of the loss
        self._over: str | None = None  # "put down" or "given back"
        self._spent: Mapping[str, Any] = lease.spent
        self._leases, self._etag, self._length_s, self._began = leases, etag, length_s, began
        self._writing = threading.RLock()
        self._ended = threading.Event()
        self._renewing: threading.Thread | None = None
        self.on_renewed: Callable[[], None] = lambda: None
        self.on_lost: Callable[[str], None] = lambda reason: None

    def remaining_s(self) -> float:
        """Seconds until the lease ends without a renewal."""
        if self.lost is not None or self._over is not None:
            return 0.0
        return self._began + self._length_s - self._leases.clock.passed()

    def renew(self, *, anew: bool = False, ending: bool | None = None) -> None:
        """Renew the lease for its whole length from now on.

        `anew` also sets `taken_at` to now. `ending` sets whether the nodes are being destroyed; None leaves it
        unchanged."""
        with self._writing:
            began, now = self._leases.clock.passed(), self._leases.clock.wall()
            changes: dict[str, Any] = {"held_until": now + self._length_s} | ({"taken_at": now} if anew else {})
            changes |= {} if ending is None else {"ending": ending}
            self._change(**changes)
            self._began = began
        self.on_renewed()

    def confirm(self) -> None:
        """Raise LeaseLostError if the lease is lost; renew it if less than a third remains.
        Call it before each of many changes."""
        self._check()
        if self.remaining_s() < self._length_s / 3:
            self.renew()

    def note(self, spent: Mapping[str, Any]) -> None:
        """Set the cost of the nodes; the next renewal writes it."""
        self._spent = dict(spent)

    def put_down(self, *, keep: bool = True, at_once: bool = True) -> None:
        """Let go of the lease, so that any process may take it.

        With `keep` the nodes live on until `kept_until`. Without `at_once`, others treat the lease as one that runs out
        now, and wait for the clock margin."""
        with self._writing:
            self._began = -math.inf  # if the response is lost, the next step renews the lease first
            until = None if at_once else self._leases.clock.wall()
            self._change(held_until=until, **({} if keep else {"kept_until": None}))
            self._over = "put down"

    def release(self) -> None:
        """Give the lease back. No node may be left."""
        with self._writing:
            self._check()
            self._began = -math.inf
            if not self.write(None):
                raise self._is_lost()
            self._over = "given back"

    def __enter__(self) -> HeldLease:
        self._renewing = threading.Thread(target=self._keep, name="lease", daemon=True)
        self._renewing.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop renewing. The lease is neither given back nor put down."""
        assert self._renewing is not None
        self._ended.set()
        self._renewing.join()

    def write(self, lease: Lease | None) -> bool:
        """Write over this holder's last read or write, and return whether the lease is ours.
        None gives the lease back."""
        data = msgspec.json.encode(lease) if lease else b""
        etag = CasObject(self._leases.storage, name_of(self.lease.run)).write(data, self._etag, self._is_ours)
        if etag is None:
            return False
        self._etag = etag
        if lease:
            self.lease = lease
        return True

    def _change(self, **changes: Any) -> None:
        self._check()
        if not self.write(msgspec.structs.replace(self.lease, beat=self.lease.beat + 1, spent=self._spent, **changes)):
            raise self._is_lost()

    def _is_ours(self, data: bytes | None) -> bool:
        with contextlib.suppress(*_UNREADABLE):
            return data is not None and msgspec.json.decode(data, type=Lease).holder == self.lease.holder
        return False

    def _check(self) -> None:
        if self.lost is not None:
            raise LeaseLostError(self.lost)
        if self._over is not None:
            raise LeaseLostError(f"run {self.lease.run}: the lease of its nodes was {self._over}")

    def _is_lost(self) -> LeaseLostError:
        self.lost = f"run {self.lease.run}: another process has taken over the lease of its nodes"
        with contextlib.suppress(StorageError):
            if found := self._leases.read(self.lease.run):
                self.lost = f"run {self.lease.run}: a {found.by} on {found.where} has taken over the lease of its nodes"
        return LeaseLostError(self.lost)

    def _keep(self) -> None:
        """Renew the lease after every third of its length, and more often after a failure."""
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
                    _log.warning(
                        "run %s: could not renew the lease of its nodes, will retry: %s", self.lease.run, error
                    )
                wait_s = self._length_s / 12


def _utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def name_of(run: str) -> str:
    """Name of a run's lease object in the store."""
    return f"{ROOT}/{run}.json"
