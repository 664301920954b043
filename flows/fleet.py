"""The nodes of one run and their shares of it, kept together until the run has ended.

A *share* is what one node does: serve as `generation`, or train; the first one that trains leads, and its end is the
run's. Shares are flow runs, which nodes take from the queue of their role; a share is anybody's until a node has it.
`look` compares what there is with what there should be:

    a node that is reclaimed, bad, silent, or never came up    is replaced, and its share is given out again
    a share that has failed or crashed                         is given out again, `launch.restarts` times
    the leading share has ended                                the run has

Without Prefect: `Work` stands for it.
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

_AGAIN_S = 60.0  # between two tries to replace nodes that can't be had
_VAIN = 10  # such tries, while nobody trains
_GAP_S = 15.0  # between two looks, above which Prefect's server was away: who was silent then was not heard


class Stage(Enum):
    """What has become of a share."""

    WAITS = "waits"  # for a node
    RUNS = "runs"
    DONE = "done"
    RECLAIMED = "reclaimed"  # with its node
    BAD_NODE = "bad node"
    REFUSED = "refused"  # the same again would end the same
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def over(self) -> bool:
        return self not in (Stage.WAITS, Stage.RUNS)


@dataclass(frozen=True, slots=True)
class Seen:
    """A share, as it was seen last."""

    stage: Stage
    node: str | None  # the cloud's id of the node that has it
    message: str


class Work(Protocol):
    """Where shares are given out: `flows.shares`."""

    def give(self, role: str, index: int) -> str:
        """Give a share out; its id."""
        ...

    def seen(self, ids: Iterable[str]) -> Mapping[str, Seen]: ...

    def lose(self, share: str, reason: str) -> None:
        """Nobody has this share any more."""
        ...

    def silent_s(self) -> Mapping[str, float]:
        """For how long workers have been silent, in seconds, by the ids of their nodes."""
        ...


@dataclass
class Share:
    """A share, and who has it."""

    role: str
    index: int
    id: str
    seen: Seen = field(default_factory=lambda: Seen(Stage.WAITS, None, ""))
    failures: int = 0
    given_up: bool = False
    seen_to: bool = True  # what was seen last has had its consequences

    @property
    def name(self) -> str:
        return f"{self.role}-{self.index}"


class Fleet:
    """A context. One thread looks; nodes are replaced in another one, while the run goes on."""

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
        """`supply` None: nodes are given, and none is replaced; `restarts` of a share that fails."""
        self.config, self._work, self._supply, self._restarts = config, work, supply, restarts
        self._log, self._clock = log, clock
        self._born: dict[str, float] = {}  # when nodes were first known, by their ids
        self._heard: set[str] = set()  # nodes whose workers have been there
        self._looked = self._heard_since = self._clock()
        self.hosts: list[Host] = []
        self._know(hosts)
        self._bad: dict[str, str] = {}  # nodes to replace, and why, by their names
        self._replacements = config.replacements
        self._replacing: concurrent.futures.Future[list[Host]] | None = None
        self._replaced: dict[str, str] = {}  # what is being replaced
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
        """Waits for what is being replaced, as nodes must not come after the end; but not where this process is asked
        to end: `supply` then has to see to it."""
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
        """Whether every share has."""
        return all(share.seen.stage.over for share in self.shares)

    def of(self, role: str) -> list[Share]:
        return [share for share in self.shares if share.role == role]

    def look(self) -> None:
        """See what has changed, and see to it; what an error of `work` has kept from being done is done by the next
        look. Raises ConfigError, ProcessError or ProvisionError when the run can't go on."""
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
            self._log(f"{share.name}: node {share.seen.node} has it")
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
            self._log(f"{share.name}: {why}; it is tried again")
        elif stage is Stage.CANCELLED and share is not self.leading:
            self._give_up(share, "it was cancelled")

    def _give(self, share: Share) -> None:
        share.id, share.seen = self._work.give(share.role, share.index), Seen(Stage.WAITS, None, "")

    def _give_up(self, share: Share, why: str) -> None:
        if share.role == "trainer":
            raise ProcessError(f"{share.name}: {why}")
        share.given_up = True
        if all(other.given_up for other in self.of(share.role)):
            raise ProcessError(f"no node is left that generates; {share.name} was the last: {why}")
        self._log(f"{share.name} is given up, the run goes on with fewer: {why}")

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
                    self._lost(host, f"has not come up in {age:.0f} s (provision.boot_s)")
            elif hears and silent.get(host.id, self.config.lost_s + 1) > self.config.lost_s:
                self._lost(host, f"has been silent for more than {self.config.lost_s:g} s (provision.lost_s)")

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
            self._give_up(share, why)  # nobody knows where it was: a host that was given
        else:
            self._give(share)  # its node is another one by now

    def _mark(self, host: Host, why: str) -> None:
        if self._supply is not None and self._replacements > 0:
            self._replacements -= 1
            self._bad[host.name] = why
            return
        budget = "" if self._supply is None else f"; provision.replacements ({self.config.replacements}) are spent"
        for share in self.shares:
            if share.seen.node == host.id:
                self._give_up(share, why + budget)

    def _replace(self) -> None:
        if self._replacing is not None and self._replacing.done():
            self._take_replaced(self._replacing)
            self._replacing = None
        if self._bad and self._replacing is None and self._clock() >= self._not_before:
            assert self._supply is not None
            self._replaced, self._bad = self._bad, {}
            self._log(f"replacing {', '.join(self._replaced)}")
            self._replacing = self._thread.submit(self._supply.replace, [*self._replaced])

    def _take_replaced(self, replacing: concurrent.futures.Future[list[Host]]) -> None:
        try:
            self._know(replacing.result())
        except ProvisionError as error:  # quota, capacity, the API: the run goes on without, meanwhile
            self._vain += 1
            if self._vain >= _VAIN and any(share.seen.stage is not Stage.RUNS for share in self.of("trainer")):
                raise
            self._log(f"no replacement yet, trying again in {_AGAIN_S:g} s: {error}")
            self._not_before = self._clock() + _AGAIN_S
            self._bad, self._replaced = self._replaced | self._bad, {}
            return
        self._replaced, self._vain = {}, 0
        known = {host.id for host in self.hosts}
        for share in self.shares:
            its = share.seen
            if its.node is None or its.node in known or share.given_up:
                continue
            if not its.stage.over:  # a node that was replaced had taken it meanwhile
                self._work.lose(share.id, f"node {its.node} was replaced")
            if its.stage in (Stage.RECLAIMED, Stage.BAD_NODE) or not its.stage.over:
                self._give(share)
