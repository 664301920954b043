"""The reaper ends nodes that nobody has any more: those whose lease is over, and what is left of runs without a lease.

It takes the lease, so that an owner who comes back learns that it is lost. It ends what the cloud holds of the run, by
the cloud's own calls, sees that nothing is left, and gives the lease back. It needs no Terraform, whose next plan finds
what is gone. Last comes the sweep. A lease comes before everything that is made under it, and is given back once
nothing is left. So what has none is nobody's.

It may be killed at any point, and several may run at once: what is not done, the next one does, once the lease of this
one has run out.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_core.errors import ArealError
from areal_core.storage.objects import Storage
from flows.provision.cost import Meter
from flows.provision.leased import LeftError, cloud_of, tried
from flows.provision.leases import Claimant, Held, HeldError, Lease, Leases
from flows.provision.nodes import NODE, Found, control_outputs

if TYPE_CHECKING:
    from flows.provision.aws import Aws

LEASE_S = 300.0  # so that the next reaper finds those over that were a killed one's
YOUNG_S = 300.0  # what is younger is left to the next one, if it has no lease
_AT_ONCE = 4
_STORE_S = 30.0  # of patience with the store


@dataclass(frozen=True, slots=True, kw_only=True)
class Reaped:
    """What has become of a run's nodes."""

    run: str
    owner: str = "-"
    over_since: str = "-"  # when the lease was over
    ended: str = ""  # what was ended: how many of each kind
    cost: str = "-"  # of all nodes of the run; "-" where it is not known whether there were any
    failed: str | None = None  # why it is to be tried again

    def __str__(self) -> str:
        done = f"run {self.run}: {self.ended or 'nothing'} ended"
        return f"{done}; to be tried again: {self.failed}" if self.failed else done


def reaper_of(
    state: Path, store: str | None, log: Callable[[str], None], forget: Callable[[str], None] = lambda run: None
) -> Reaper | None:
    """The reaper of the store at this location, or of the one that `control` has made here; None where neither is.
    Raises StorageError."""
    foundation = control_outputs(state).get("foundation", {})
    url = store or (f"s3://{foundation['bucket']}" if foundation else None)
    if url is None:
        return None
    leases = Leases(Storage.open(url, patience_s=_STORE_S))
    return Reaper(leases, state, cloud_of=cloud_of, foundation=foundation, forget=forget, log=log)


class Reaper:
    """Of one store and the clouds of its runs."""

    def __init__(
        self,
        leases: Leases,
        state: Path,
        *,
        cloud_of: Callable[[Mapping[str, Any]], Aws],
        foundation: Mapping[str, Any],
        length_s: float = LEASE_S,
        young_s: float = YOUNG_S,
        forget: Callable[[str], None] = lambda run: None,
        log: Callable[[str], None] = print,
    ) -> None:
        """`state` is the state folder of this checkout; `cloud_of` gives the cloud of a foundation, and `foundation` is
        the one that is swept, as far as it is known: region and vpc_id. `forget` removes what else there is of a run
        that has ended, while nobody else can have its lease."""
        self._leases, self._state, self._cloud_of, self._foundation = leases, state, cloud_of, foundation
        self._length_s, self._young_s, self._forget, self._log = length_s, young_s, forget, log

    def reap(self) -> list[Reaped]:
        """End what is to be ended; what has failed is told, and raises nothing. Raises StorageError where the leases
        can't be listed."""
        with ThreadPoolExecutor(_AT_ONCE, "reap") as threads:
            each = list(threads.map(self._reap, sorted(self._leases.live())))
        return [one for one in (*each, *self._sweep()) if one is not None]

    def _reap(self, run: str) -> Reaped | None:
        """None where there is nothing to do."""
        try:
            lease = self._leases.read(run)
        except ArealError as error:
            return self._told(Reaped(run=run, failed=str(error)))
        if lease is None or not self._leases.is_over(lease):
            return None
        since = lease.expires if lease.expires_at else "it was put down"
        return self._end(Reaped(run=run, owner=lease.owner, over_since=since))

    def _end(self, known: Reaped) -> Reaped | None:
        """What is known of a run, and what was ended of it; None where somebody else was faster."""
        run = known.run
        try:
            claimant = Claimant(owner="-", by="reaper", where=f"{socket.gethostname()}:{self._state}")
            with self._leases.acquire(run, claimant, self._length_s, request=None) as held:
                cloud = self._cloud_of(_foundation(held.lease, self._foundation))
                found, meter = set[Found](), Meter({}, held.lease.spent)
                tried(run, partial(self._end_found, cloud, held, found, meter), self._log)
                held.confirm()
                self._forget(run)
                held.release()
        except HeldError as error:
            self._log(f"run {run}: left to another one: {error}")
            return None
        except ArealError as error:
            return self._told(replace(known, failed=str(error)))
        counts = Counter(each.kind for each in found)
        ended = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())) or "nothing was left"
        return self._told(replace(known, ended=ended, cost=_cost(meter)))

    def _end_found(self, cloud: Aws, held: Held, found: set[Found], meter: Meter) -> None:
        """End what the cloud holds of the run; `found` and `meter` learn of it. Raises LeftError."""
        run = held.lease.run
        there = cloud.found(run)
        found.update(there)
        meter.observe((each for each in there if each.kind == NODE), self._leases.clock.wall())
        cloud.end(there, held.confirm)
        if left := cloud.found(run):
            raise LeftError(f"run {run}: {', '.join(map(str, left))} could not be ended")

    # -- the sweep -----------------------------------------------------------------------------------------------------

    def _sweep(self) -> Iterator[Reaped | None]:
        """What there is of runs without a lease. What there is is looked at first: its lease was there before."""
        try:
            found = self._cloud_of(self._foundation).found()
            if not found:
                return
            live = set(self._leases.live())
            known = set(self._leases.known())
        except ArealError as error:
            yield self._told(Reaped(run="-", failed=f"the sweep: {error}"))
            return
        for run in sorted({each.run for each in found} - live):
            its = [each for each in found if each.run == run]
            is_ours = run in known or any(each.near for each in its)  # an account may have several stores
            youngest = max((each.since for each in its if each.since is not None), default=0.0)
            if is_ours and self._leases.clock.wall() - youngest >= self._young_s:
                yield self._end(Reaped(run=run, over_since="no lease"))

    def _told(self, reaped: Reaped) -> Reaped:
        self._log(str(reaped))
        return reaped


def _cost(meter: Meter) -> str:
    if not meter.noted()["nodes"]:
        return "-"
    dollars = meter.dollars()
    return "unknown" if dollars is None else f"${dollars:.2f}"


def _foundation(lease: Lease, default: Mapping[str, Any]) -> Mapping[str, Any]:
    """Where the nodes of a lease are, as far as it says so."""
    said = (lease.request or {}).get("foundation")
    return said if isinstance(said, dict) and isinstance(said.get("region"), str) else default
