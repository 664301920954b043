"""The nodes of one run and their shares of it, supervised until the run ends.

A *share* is the work of one node: serve as `generation`, or train. The first trainer share leads, and the run ends with
it. Shares are flow runs in a work queue per role; any node of the role may take a waiting share. `reconcile` compares
the actual with the wanted state:

    a node is reclaimed, bad, silent, or did not boot          replace it, and give its share out again
    a share has failed or crashed                              give it out again, `launch.restarts` times
    the leading share has ended                                the run has ended

This module does not use Prefect: the protocol `Work` stands for it.
"""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from areal_core.config.groups import ProvisionConfig
from areal_core.errors import ConfigError, ProcessError, ProvisionError
from flows.provision.nodes import Host

if TYPE_CHECKING:
    from flows.provision.leased import LeasedNodes

_RETRY_S = 60.0  # pause after a failed replacement
_MAX_FAILED = 10  # failed replacements in a row before the run fails, while a trainer share is not running
_GAP_S = 15.0  # a longer gap between checks means that Prefect's server was down, so silence proves nothing


class Stage(Enum):
    """State of a share."""

    WAITING = "waits"  # waits for a node
    RUNNING = "runs"
    DONE = "done"
    RECLAIMED = "reclaimed"  # its node was reclaimed
    BAD_NODE = "bad node"
    REFUSED = "refused"  # permanent error: a retry would fail too
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        return self not in (Stage.WAITING, Stage.RUNNING)


@dataclass(frozen=True, slots=True)
class ShareState:
    """A share as last seen."""

    stage: Stage
    node: str | None  # the cloud's id of the share's node; None: not taken yet
    message: str


class Work(Protocol):
    """Interface that gives out shares; `flows.shares` implements it."""

    def submit(self, role: str, index: int) -> str:
        """Give out a share, and return its id."""
        ...

    def states(self, ids: Iterable[str]) -> Mapping[str, ShareState]: ...

    def mark_lost(self, share: str, reason: str) -> None:
        """Mark a share as lost: no node runs it."""
        ...

    def heartbeat_age_s(self) -> Mapping[str, float]:
        """Seconds since each worker's last heartbeat, by node id."""
        ...


@dataclass
class Share:
    """A share, its last seen state and its failures."""

    role: str
    index: int
    id: str
    state: ShareState = field(default_factory=lambda: ShareState(Stage.WAITING, None, ""))
    failures: int = 0
    given_up: bool = False
    handled: bool = True  # `_handle_change` has handled the last stage

    @property
    def name(self) -> str:
        return f"{self.role}-{self.index}"


class Fleet:
    """Context manager for the nodes and shares of a run.
    One thread calls `reconcile`; another replaces nodes meanwhile."""

    def __init__(
        self,
        config: ProvisionConfig,
        hosts: Iterable[Host],
        work: Work,
        supply: LeasedNodes | None,
        *,
        restarts: int,
        log: Callable[[str], None] = print,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Give out all shares.
        With `supply` None, hosts are given and never replaced. `restarts` is the limit per share."""
        self.config, self._work, self._supply, self._restarts = config, work, supply, restarts
        self._log, self._clock = log, clock
        self._first_seen: dict[str, float] = {}  # time, by node id
        self._with_heartbeat: set[str] = set()  # ids of nodes whose workers have sent a heartbeat
        self._checked_at = self._monitored_since = self._clock()
        self.hosts: list[Host] = []
        self._set_hosts(hosts)
        self._bad: dict[str, str] = {}  # reasons of nodes to replace, by node name
        self._replacements = config.replacements
        self._replacing: concurrent.futures.Future[list[Host]] | None = None
        self._replaced: dict[str, str] = {}  # nodes in replacement, as in `_bad`
        self._not_before = 0.0
        self._failed = 0
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "replace")
        self.shares = [
            Share(role, index, work.submit(role, index))
            for role, nodes in (("trainer", config.trainer), ("generation", config.generation))
            for index in range(nodes.count)
        ]

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait for a replacement in progress, so that no node starts after the end.
        If this process is asked to end, do not wait: `supply` is then responsible for the nodes."""
        self._thread.shutdown(wait=kind is None or issubclass(kind, Exception), cancel_futures=True)

    @property
    def over(self) -> bool:
        """Whether the run has ended in order."""
        return self.leading.state.stage is Stage.DONE

    @property
    def cancelled(self) -> bool:
        return self.leading.state.stage is Stage.CANCELLED

    @property
    def leading(self) -> Share:
        return self.shares[0]

    @property
    def ended(self) -> bool:
        """Whether every share has ended."""
        return all(share.state.stage.ended for share in self.shares)

    def of(self, role: str) -> list[Share]:
        return [share for share in self.shares if share.role == role]

    def reconcile(self) -> None:
        """Read the shares' states and act on changes. If `work` raises an error, the next call continues.

        Raises ConfigError, ProcessError or ProvisionError if the run can't continue."""
        now = self._work.states([share.id for share in self.shares if not share.state.stage.ended])
        for share in self.shares:
            if share.id in now and now[share.id] != share.state:
                share.state, share.handled = now[share.id], share.handled and now[share.id].stage is share.state.stage
            if not share.handled:
                self._handle_change(share)
                share.handled = True
        if not (self.over or self.cancelled):
            self._check_heartbeats()
            self._start_replacement()

    # -- shares --------------------------------------------------------------------------------------------------------

    def _handle_change(self, share: Share) -> None:
        stage, why = share.state.stage, share.state.message
        if stage is Stage.RUNNING:
            self._log(f"{share.name}: started on node {share.state.node}")
        elif stage is Stage.REFUSED:
            raise ConfigError(why)
        elif stage in (Stage.RECLAIMED, Stage.BAD_NODE):
            self._log(f"{share.name}: {why}")
            self._replace_node_of(share, why)
        elif stage is Stage.FAILED:
            if share.failures >= self._restarts:
                self._give_up(share, why)
                return
            self._submit(share)
            share.failures += 1
            self._log(f"{share.name} failed, will retry: {why}")
        elif stage is Stage.CANCELLED and share is not self.leading:
            self._give_up(share, "its flow run was cancelled")

    def _submit(self, share: Share) -> None:
        share.id, share.state = self._work.submit(share.role, share.index), ShareState(Stage.WAITING, None, "")

    def _give_up(self, share: Share, why: str) -> None:
        if share.role == "trainer":
            raise ProcessError(f"{share.name}: {why}")
        share.given_up = True
        if all(other.given_up for other in self.of(share.role)):
            raise ProcessError(f"no generation node is left; {share.name} was the last: {why}")
        self._log(f"{share.name} failed for good; the run continues without it: {why}")

    # -- nodes ---------------------------------------------------------------------------------------------------------

    def _set_hosts(self, hosts: Iterable[Host]) -> None:
        self.hosts = list(hosts)
        for host in self.hosts:
            self._first_seen.setdefault(host.id, self._clock())

    def _check_heartbeats(self) -> None:
        ages = self._work.heartbeat_age_s()
        now, before = self._clock(), self._checked_at
        self._checked_at = now
        if now - before > _GAP_S:
            self._monitored_since = now
        monitored = now - self._monitored_since > self.config.lost_s
        self._with_heartbeat |= ages.keys()
        for host in self.hosts:
            if host.name in self._bad or host.name in self._replaced:
                continue
            if host.id not in self._with_heartbeat:
                if (age := self._clock() - self._first_seen[host.id]) > self.config.boot_s:
                    self._on_lost(host, f"has sent no heartbeat {age:.0f} s after its start (provision.boot_s)")
            elif monitored and ages.get(host.id, self.config.lost_s + 1) > self.config.lost_s:
                self._on_lost(host, f"has sent no heartbeat for more than {self.config.lost_s:g} s (provision.lost_s)")

    def _on_lost(self, host: Host, why: str) -> None:
        why = f"node {host.name} ({host.id}) {why}"
        self._log(why)
        for share in self.shares:
            if share.state.node == host.id and not share.state.stage.ended:
                self._work.mark_lost(share.id, why)
                share.state = ShareState(Stage.BAD_NODE, host.id, why)
        self._request_replacement(host, why)

    def _replace_node_of(self, share: Share, why: str) -> None:
        host = next((host for host in self.hosts if host.id == share.state.node), None)
        if host is not None:
            self._request_replacement(host, why)
        elif share.role == "trainer" or self._supply is None:
            self._give_up(share, why)  # an unknown or given host can't be replaced
        else:
            self._submit(share)  # its node was replaced meanwhile

    def _request_replacement(self, host: Host, why: str) -> None:
        if self._supply is not None:
            if self._replacements > 0:
                self._replacements -= 1
                self._bad[host.name] = why
                return
            why += f"; no replacement is left (provision.replacements={self.config.replacements})"
        for share in self.shares:
            if share.state.node == host.id:
                self._give_up(share, why)

    def _start_replacement(self) -> None:
        if self._replacing is not None and self._replacing.done():
            self._finish_replacement(self._replacing)
            self._replacing = None
        if self._bad and self._replacing is None and self._clock() >= self._not_before:
            assert self._supply is not None
            self._replaced, self._bad = self._bad, {}
            self._log(f"replacing nodes {', '.join(self._replaced)}")
            self._replacing = self._thread.submit(self._supply.replace, [*self._replaced])

    def _finish_replacement(self, replacing: concurrent.futures.Future[list[Host]]) -> None:
        try:
            self._set_hosts(replacing.result())
        except ProvisionError as error:  # quota, capacity, the API: the run continues with fewer nodes
            self._failed += 1
            if self._failed >= _MAX_FAILED and any(one.state.stage is not Stage.RUNNING for one in self.of("trainer")):
                raise
            self._log(f"could not replace nodes, retrying in {_RETRY_S:g} s: {error}")
            self._not_before = self._clock() + _RETRY_S
            self._bad, self._replaced = self._replaced | self._bad, {}
            return
        self._replaced, self._failed = {}, 0
        known = {host.id for host in self.hosts}
        for share in self.shares:
            its = share.state
            if its.node is None or its.node in known or share.given_up:
                continue
            if not its.stage.ended:  # the replaced node had taken it meanwhile
                self._work.mark_lost(share.id, f"node {its.node} was replaced")
            if its.stage in (Stage.RECLAIMED, Stage.BAD_NODE) or not its.stage.ended:
                self._submit(share)
