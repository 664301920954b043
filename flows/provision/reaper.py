"""The reaper: destroys nodes whose lease is over, and resources of runs without a lease.

The reaper takes the lease, so that a returning owner learns that the lease is lost. It deletes the run's resources with
the cloud's own calls, checks that nothing is left, and gives the lease back. It needs no Terraform; Terraform's next
plan notices the deleted resources. At last it sweeps resources of runs without a lease. They have no owner, because a
lease is written before the first resource and given back after the last.

The reaper may be killed at any point, and several reapers may run at once. After the lease of a killed reaper has run
out, the next reaper does its work.
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
from flows.provision.leased import LeftoverError, cloud_of, with_retries
from flows.provision.leases import Claimant, HeldLease, Lease, LeaseHeldError, Leases
from flows.provision.nodes import NODE, CloudResource, control_outputs

if TYPE_CHECKING:
    from flows.provision.aws import Aws

LEASE_S = 300.0  # short, so that the next reaper soon takes over from a killed one
YOUNG_S = 300.0  # younger resources without a lease are left to the next reaper
_AT_ONCE = 4
_STORE_S = 30.0  # patience with the store


@dataclass(frozen=True, slots=True, kw_only=True)
class ReapResult:
    """Result of reaping one run."""

    run: str
    owner: str = "-"
    over_since: str = "-"  # end of the lease
    ended: str = ""  # number of deleted resources of each kind
    cost: str = "-"  # cost of all nodes of the run; "-" if no node is known
    failed: str | None = None  # reason of a failure; the next reaper retries

    def __str__(self) -> str:
        done = f"run {self.run}: deleted {self.ended or 'nothing'}"
        return f"{done}; failed, the next reaper retries: {self.failed}" if self.failed else done


def reaper_of(
    state: Path, store: str | None, log: Callable[[str], None], forget: Callable[[str], None] = lambda run: None
) -> Reaper | None:
    """The reaper of the store at URL `store`, or of the store of `control`; None if neither is known.
    Raises StorageError."""
    foundation = control_outputs(state).get("foundation", {})
    url = store or (f"s3://{foundation['bucket']}" if foundation else None)
    if url is None:
        return None
    leases = Leases(Storage.open(url, patience_s=_STORE_S))
    return Reaper(leases, state, cloud_of=cloud_of, foundation=foundation, forget=forget, log=log)


class Reaper:
    """The reaper of one store and of the clouds of its runs."""

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
        """`state` is the state folder of this checkout. `cloud_of` returns the cloud of a foundation.

        `foundation` is the foundation to sweep, as far as known: region and vpc_id. `forget` removes other traces of a
        destroyed run; it is called while this reaper holds the run's lease."""
        self._leases, self._state, self._cloud_of, self._foundation = leases, state, cloud_of, foundation
        self._length_s, self._young_s, self._forget, self._log = length_s, young_s, forget, log

    def reap(self) -> list[ReapResult]:
        """Destroy all nodes that are due.
        Failures are logged and returned, not raised. Raises StorageError if the leases can't be listed."""
        with ThreadPoolExecutor(_AT_ONCE, "reap") as threads:
            each = list(threads.map(self._reap, sorted(self._leases.live())))
        return [one for one in (*each, *self._sweep()) if one is not None]

    def _reap(self, run: str) -> ReapResult | None:
        """Destroy the nodes of a run if its lease is over; None if there is nothing to do."""
        try:
            lease = self._leases.read(run)
        except ArealError as error:
            return self._logged(ReapResult(run=run, failed=str(error)))
        if lease is None or not self._leases.is_over(lease):
            return None
        since = lease.expires if lease.expires_at else "no holder"
        return self._end(ReapResult(run=run, owner=lease.owner, over_since=since))

    def _end(self, known: ReapResult) -> ReapResult | None:
        """Destroy the nodes of a run, and complete `known` with the result.
        None if another process was faster."""
        run = known.run
        try:
            claimant = Claimant(owner="-", by="reaper", where=f"{socket.gethostname()}:{self._state}")
            with self._leases.acquire(run, claimant, self._length_s, request=None) as held:
                cloud = self._cloud_of(_foundation(held.lease, self._foundation))
                found, meter = set[CloudResource](), Meter({}, held.lease.spent)
                with_retries(run, partial(self._end_found, cloud, held, found, meter), self._log)
                held.confirm()
                self._forget(run)
                held.release()
        except LeaseHeldError as error:
            self._log(f"run {run}: skipped, as another process was faster: {error}")
            return None
        except ArealError as error:
            return self._logged(replace(known, failed=str(error)))
        counts = sorted(Counter(each.kind for each in found).items())
        ended = ", ".join(f"{count} {kind}" for kind, count in counts) or "nothing (no resource was left)"
        return self._logged(replace(known, ended=ended, cost=_cost(meter)))

    def _end_found(self, cloud: Aws, held: HeldLease, found: set[CloudResource], meter: Meter) -> None:
        """Delete the run's cloud resources, and add them to `found` and `meter`. Raises LeftoverError."""
        run = held.lease.run
        there = cloud.found(run)
        found.update(there)
        meter.observe((each for each in there if each.kind == NODE), self._leases.clock.wall())
        cloud.end(there, held.confirm)
        if left := cloud.found(run):
            raise LeftoverError(f"run {run}: could not delete {', '.join(map(str, left))}")

    # -- the sweep -----------------------------------------------------------------------------------------------------

    def _sweep(self) -> Iterator[ReapResult | None]:
        """Destroy resources of runs without a lease.
        Resources are listed before leases, so that every resource of a live run has its lease in the list."""
        try:
            found = self._cloud_of(self._foundation).found()
            if not found:
                return
            live = set(self._leases.live())
            known = set(self._leases.known())
        except ArealError as error:
            yield self._logged(ReapResult(run="-", failed=f"could not search for resources without a lease: {error}"))
            return
        for run in sorted({each.run for each in found} - live):
            its = [each for each in found if each.run == run]
            is_ours = run in known or any(each.own_vpc for each in its)  # an account may have several stores
            youngest = max((each.since for each in its if each.since is not None), default=0.0)
            if is_ours and self._leases.clock.wall() - youngest >= self._young_s:
                yield self._end(ReapResult(run=run, over_since="no lease"))

    def _logged(self, reaped: ReapResult) -> ReapResult:
        self._log(str(reaped))
        return reaped


def _cost(meter: Meter) -> str:
    if not meter.state()["nodes"]:
        return "-"
    dollars = meter.dollars()
    return "unknown" if dollars is None else f"${dollars:.2f}"


def _foundation(lease: Lease, default: Mapping[str, Any]) -> Mapping[str, Any]:
    """The foundation in the lease's request; `default` if it has none."""
    said = (lease.request or {}).get("foundation")
    return said if isinstance(said, dict) and isinstance(said.get("region"), str) else default
