"""The nodes of one run and their shares of it, supervised until the run ends.

A *share* is the work of one node: serve as `generation`, or train. The first trainer share leads, and the run ends with
it. Shares are flow runs in a work queue per role; any node of the role may take a waiting share. `look` compares the
actual with the wanted state:

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

_AGAIN_S = 60.0  # pause after a failed replacement
_VAIN = 10  # failed replacements in a row before the run fails, while a trainer share is not running
_GAP_S = 15.0  # a longer gap between looks means that Prefect's server was down, so silence proves nothing


class Stage(Enum):
    """State of a share."""

    WAITS = "waits"  # waits for a node
    RUNS = "runs"
    DONE = "done"
    RECLAIMED = "reclaimed"  # its node was reclaimed
    BAD_NODE = "bad node"
    REFUSED = "refused"  # permanent error: a retry would fail too
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def over(self) -> bool:
        return self not in (Stage.WAITS, Stage.RUNS)


@dataclass(frozen=True, slots=True)
class Seen:
    """A share as last seen."""

    stage: Stage
    node: str | None  # the cloud's id of the share's node; None: not taken yet
    message: str


class Work(Protocol):
    """Interface that gives out shares; `flows.shares` implements it."""

    def give(self, role: str, index: int) -> str:
        """Give out a share, and return its id."""
        ...

    def seen(self, ids: Iterable[str]) -> Mapping[str, Seen]: ...

    def lose(self, share: str, reason: str) -> None:
        """Mark a share as lost: no node runs it."""
        ...

    def silent_s(self) -> Mapping[str, float]:
        """Seconds since each worker's last heartbeat, by node id."""
        ...


@dataclass
class Share:
    """A share, its last seen state and its failures."""

    role: str
    index: int
    id: str
    seen: Seen = field(default_factory=lambda: Seen(Stage.WAITS, None, ""))
    failures: int = 0
    given_up: bool = False
    seen_to: bool = True  # `_changed` has handled the last seen stage

    @property
    def name(self) -> str:
        return f"{self.role}-{self.index}"


class Fleet:
    """Context manager for the nodes and shares of a run.
    One thread calls `look`; another replaces nodes meanwhile."""

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
        self._born: dict[str, float] = {}  # time of first sight, by node id
        self._heard: set[str] = set()  # ids of nodes whose workers have sent a heartbeat
        self._looked = self._heard_since = self._clock()
        self.hosts: list[Host] = []
        self._know(hosts)
        self._bad: dict[str, str] = {}  # reasons of nodes to replace, by node name
        self._replacements = config.replacements
        self._replacing: concurrent.futures.Future[list[Host]] | None = None
        self._replaced: dict[str, str] = {}  # nodes in replacement, as in `_bad`
        self._not_before = 0.0
        self._vain = 0
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "replace")
        self.shares = [
            Share(role, index, work.give(role, index))
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
        return self.leading.seen.stage is Stage.DONE

    @property
    def cancelled(self) -> bool:
        return self.leading.seen.stage is Stage.CANCELLED

    @property
    def leading(self) -> Share:
        return self.shares[0]

    @property
    def ended(self) -> bool:
        """Whether every share has ended."""
        return all(share.seen.stage.over for share in self.shares)

    def of(self, role: str) -> list[Share]:
        return [share for share in self.shares if share.role == role]

    def look(self) -> None:
        """Read the shares' states and act on changes. If `work` raises an error, the next look continues.

        Raises ConfigError, ProcessError or ProvisionError if the run can't continue."""
        seen = self._work.seen([share.id for share in self.shares if not share.seen.stage.over])
        for share in self.shares:
            if share.id in seen and seen[share.id] != share.seen:
                share.seen, share.seen_to = seen[share.id], share.seen_to and seen[share.id].stage is share.seen.stage
            if not share.seen_to:
                self._changed(share)
                share.seen_to = True
        if not (self.over or self.cancelled):
            self._look_at_nodes()
            self._replace()

    # -- shares --------------------------------------------------------------------------------------------------------

    def _changed(self, share: Share) -> None:
        stage, why = share.seen.stage, share.seen.message
        if stage is Stage.RUNS:
            self._log(f"{share.name}: started on node {share.seen.node}")
        elif stage is Stage.REFUSED:
            raise ConfigError(why)
        elif stage in (Stage.RECLAIMED, Stage.BAD_NODE):
            self._log(f"{share.name}: {why}")
            self._to_replace(share, why)
        elif stage is Stage.FAILED:
            if share.failures >= self._restarts:
                self._give_up(share, why)
                return
            self._give(share)
            share.failures += 1
            self._log(f"{share.name} failed, will retry: {why}")
        elif stage is Stage.CANCELLED and share is not self.leading:
            self._give_up(share, "its flow run was cancelled")

    def _give(self, share: Share) -> None:
        share.id, share.seen = self._work.give(share.role, share.index), Seen(Stage.WAITS, None, "")

    def _give_up(self, share: Share, why: str) -> None:
        if share.role == "trainer":
            raise ProcessError(f"{share.name}: {why}")
        share.given_up = True
        if all(other.given_up for other in self.of(share.role)):
            raise ProcessError(f"no generation node is left; {share.name} was the last: {why}")
        self._log(f"{share.name} failed for good; the run continues without it: {why}")

    # -- nodes ---------------------------------------------------------------------------------------------------------

    def _know(self, hosts: Iterable[Host]) -> None:
        self.hosts = list(hosts)
        for host in self.hosts:
            self._born.setdefault(host.id, self._clock())

    def _look_at_nodes(self) -> None:
        silent = self._work.silent_s()
        now, before = self._clock(), self._looked
        self._looked = now
        if now - before > _GAP_S:
            self._heard_since = now
        hears = now - self._heard_since > self.config.lost_s
        self._heard |= silent.keys()
        for host in self.hosts:
            if host.name in self._bad or host.name in self._replaced:
                continue
            if host.id not in self._heard:
                if (age := self._clock() - self._born[host.id]) > self.config.boot_s:
                    self._lost(host, f"has sent no heartbeat {age:.0f} s after its start (provision.boot_s)")
            elif hears and silent.get(host.id, self.config.lost_s + 1) > self.config.lost_s:
                self._lost(host, f"has sent no heartbeat for more than {self.config.lost_s:g} s (provision.lost_s)")

    def _lost(self, host: Host, why: str) -> None:
        why = f"node {host.name} ({host.id}) {why}"
        self._log(why)
        for share in self.shares:
            if share.seen.node == host.id and not share.seen.stage.over:
                self._work.lose(share.id, why)
                share.seen = Seen(Stage.BAD_NODE, host.id, why)
        self._mark(host, why)

    def _to_replace(self, share: Share, why: str) -> None:
        host = next((host for host in self.hosts if host.id == share.seen.node), None)
        if host is not None:
            self._mark(host, why)
        elif share.role == "trainer" or self._supply is None:
            self._give_up(share, why)  # an unknown or given host can't be replaced
        else:
            self._give(share)  # its node was replaced meanwhile

    def _mark(self, host: Host, why: str) -> None:
        if self._supply is not None:
            if self._replacements > 0:
                self._replacements -= 1
                self._bad[host.name] = why
                return
            why += f"; no replacement is left (provision.replacements={self.config.replacements})"
        for share in self.shares:
            if share.seen.node == host.id:
                self._give_up(share, why)

    def _replace(self) -> None:
        if self._replacing is not None and self._replacing.done():
            self._take_replaced(self._replacing)
            self._replacing = None
        if self._bad and self._replacing is None and self._clock() >= self._not_before:
            assert self._supply is not None
            self._replaced, self._bad = self._bad, {}
            self._log(f"replacing nodes {', '.join(self._replaced)}")
            self._replacing = self._thread.submit(self._supply.replace, [*self._replaced])

    def _take_replaced(self, replacing: concurrent.futures.Future[list[Host]]) -> None:
        try:
            self._know(replacing.result())
        except ProvisionError as error:  # quota, capacity, the API: the run continues with fewer nodes
            self._vain += 1
            if self._vain >= _VAIN and any(share.seen.stage is not Stage.RUNS for share in self.of("trainer")):
                raise
            self._log(f"could not replace nodes, retrying in {_AGAIN_S:g} s: {error}")
            self._not_before = self._clock() + _AGAIN_S
            self._bad, self._replaced = self._replaced | self._bad, {}
            return
        self._replaced, self._vain = {}, 0
        known = {host.id for host in self.hosts}
        for share in self.shares:
            its = share.seen
            if its.node is None or its.node in known or share.given_up:
                continue
            if not its.stage.over:  # the replaced node had taken it meanwhile
                self._work.lose(share.id, f"node {its.node} was replaced")
            if its.stage in (Stage.RECLAIMED, Stage.BAD_NODE) or not its.stage.over:
                self._give(share)
