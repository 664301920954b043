"""The rollout controller's core: admission by staleness, rollouts, version updates and batches.

    prompt source --admit--> engine --completions--> environment --scored group--> ledger --batch of a step--> trainer
         ^                    ^ ^                        |                                                     |
         |                    | +---- further turns -----+                                                     |
         |                    +---- load: newest published version <------- publish ---------------------------+
         +---- gate: admits while N_r <= (i + depth + 1) B

Four coroutines do the work:

- `_admit` starts groups while the gate and the servers have room.
- `_rollout` runs once for each running group. It generates the completions, scores each as it ends, and stores the
  payload. The group becomes READY, or DROPPED with a reason (a failure, or all rewards equal). Only this coroutine
  catches a rollout's failures.
- `_update` loads the newest published version into the servers. The gate opens once they have loaded it.
- `batch`, called by the trainer, fixes the batch of a step from READY groups.

Invariants: the ledger holds each group in exactly one state. Every admission asks the gate. A fixed batch never
changes. The core uses no threads, sockets or wall time, so that it also runs under a virtual clock.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from areal_core.api.pending_completions import PendingCompletions
from areal_core.api.rollouts import Rollouts, Session, trajectory_seed
from areal_core.api.scored_groups import ScoredGroup
from areal_core.api.wire import ROLLOUT
from areal_core.config.schema import RunConfig
from areal_core.controller.core.gate import StalenessGate
from areal_core.controller.core.ledger import AdmittedGroup, Selection, TrajectoryLedger
from areal_core.controller.core.tables import Place
from areal_core.environments.verdicts import Failures
from areal_core.errors import ConfigError, GenerationError, RewardError, RunFinished, SessionLostError
from areal_core.types import (
    BatchManifest,
    GenerationRequest,
    GroupSummary,
    Outcome,
    PolicyVersion,
    Prompt,
    Tally,
)

logger = logging.getLogger(__name__)
_LOST = 3  # from this many lost sessions in a row on, each costs the group an attempt
_ABORT_RETRY_S = 1.0


class Source(Protocol):
    """Training prompts by their index in a seeded order."""

    def prompt(self, index: int) -> Prompt: ...


class Engine(Protocol):
    """The generation servers, as one engine."""

    @property
    def version(self) -> int:
        """Lowest policy version loaded by any server that takes requests: i of Eq. 3."""
        ...

    @property
    def room(self) -> int:
        """How many more completions the servers can use now; 0 while no server takes requests."""
        ...

    async def generate(self, pending: PendingCompletions) -> None:
        """Generate the unfinished completions, recording each in `pending` as it finishes.

        Marks `pending` as sent once `room` counts its completions. Raises GenerationError; a second call continues the
        unfinished completions. If cancelled, it first ends its requests at the servers, so that `pending` is
        complete."""
        ...

    async def load_version(self, version: PolicyVersion) -> None:
        """Load a version into every server. Servers that fail are taken out, which raises no error here."""
        ...

    async def abort_all(self) -> None:
        """Abort all running requests. Their completions keep the tokens sampled so far."""
        ...


class Rewards(Protocol):
    """The reward workers, which run environments."""

    def begin(self, prompt: Prompt, n: int, *, apart: bool) -> Session:
        """Begin a session for a group of `n` rollouts.
        `apart` scores each completion in its own process, because scoring this group has killed a worker before."""
        ...


class Payloads(Protocol):
    """The packed trajectories of groups."""

    async def append(self, payload: bytes) -> Place:
        """Store a payload durably: it survives a power failure once this returns.
        The caller must record the returned place before its next await, or the payload may be deleted."""
        ...


class Signal(asyncio.Event):
    """Wake all current waiters, which then check their conditions again."""

    def notify(self) -> None:
        self.set()
        self.clear()


@dataclass(eq=False, kw_only=True)
class RolloutController:
    """Keep the servers busy within the staleness bound, and serve batches. Runs in one event loop."""

    config: RunConfig
    source: Source
    engine: Engine
    rewards: Rewards
    payloads: Payloads
    ledger: TrajectoryLedger
    stop_token_ids: Mapping[str, tuple[int, ...]]  # by task
    opens_with_prompt: Mapping[str, bool]  # by task: whether its environment opens with the prompt

    def __post_init__(self) -> None:
        config = self.config
        self._group_size = config.algorithm.group_size
        self._gate = StalenessGate(
            batch_size=config.rollout.batch_size, depth=config.pipeline_depth, steps=config.training.steps
        )
        self._selection = Selection(
            groups=config.groups_per_batch,
            rule=config.rollout.batch_selection,
            max_staleness=config.max_staleness,
            max_requeues=config.rollout.max_requeues,
        )
        self._changed = Signal()
        self.freed = Signal()  # servers may have more room than before, or the gate may be open
        self._running: dict[int, asyncio.Task[None]] = {}
        self._unsent: set[Rollouts] = set()  # of groups that were just admitted; no server counts their completions yet
        self._cancelled_groups: set[int] = set()  # running groups that a new incarnation has dropped
        self._by_task = config.by_task
        self._failures = {name: Failures(its.environment.max_no_result) for name, its in self._by_task.items()}
        self._failed_in_a_row = 0
        self._zero_variance_in_a_row = 0
        self._replaced = False  # servers may still hold model weights that a new incarnation has replaced
        self._finished: str | None = None

    # -- public methods ---------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Admit, generate and update until `finish`; returns when no group is in flight.
        A failure of the controller itself raises an exception group. A failed rollout does not."""
        async with asyncio.TaskGroup() as tasks:
            updating = tasks.create_task(self._update(), name="update")
            await self._admit(tasks)
            while self._running:  # repeat the abort, because a request may reach a server after it
                await self.engine.abort_all()
                if self._running:  # all groups may have ended during the abort
                    await asyncio.wait(self._running.values(), timeout=_ABORT_RETRY_S)
            updating.cancel()

    async def batch(self, step: int, *, timeout_s: float) -> BatchManifest | None:
        """Return the fixed batch of `step`, or None after waiting `timeout_s` seconds.
        Raises RunFinished once the run has ended, unless the batch was fixed before."""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    if manifest := self.ledger.batch(step):
                        return manifest
                    if self._finished is not None:
                        raise RunFinished(self._finished)
                    manifest = self.ledger.fix_batch(step, self._selection)
                    self.freed.notify()  # the ledger may have dropped stale groups, which makes room
                    if manifest:
                        return manifest
                    await self._changed.wait()
        except TimeoutError:
            return None

    def publish(self, version: PolicyVersion) -> str:
        """Record a version that the trainer has published.
        The servers load it as soon as they can. Returns "new", "same" or "replaced", as TrajectoryLedger.publish."""
        outcome = self.ledger.publish(version)
        if outcome == "replaced":
            incarnation = self.ledger.notes.incarnation
            logger.warning(
                "version %d was published again with different model weights: incarnation %d",
                version.version,
                incarnation,
            )
            self._cancel_running()
        self.notify()
        return outcome

    def drop_damaged(self, group_id: int) -> None:
        """Drop a group whose payload is damaged; see TrajectoryLedger.drop_damaged."""
        incarnation = self.ledger.notes.incarnation
        self.ledger.drop_damaged(group_id)
        if self.ledger.notes.incarnation != incarnation:
            self._cancel_running()
        self.notify()

    def _cancel_running(self) -> None:
        """Cancel the running groups of the old incarnation, and hold admission until its version is loaded."""
        self._replaced = True
        self._cancelled_groups |= self._running.keys()
        for task in self._running.values():
            task.cancel()

    def finish(self, reason: str) -> None:
        """End the run: stop admission, abort the running groups and record them as in flight."""
        if self._finished is None:
            self._finished = reason
            self.notify()

    def notify(self) -> None:
        """Wake the coroutines after a change of a server, a version or a group."""
        self._changed.notify()
        self.freed.notify()

    @property
    def finished(self) -> str | None:
        return self._finished

    @property
    def running_groups(self) -> int:
        return len(self._running)

    # -- the coroutines ----------------------------------------------------------------------------------------

    async def _admit(self, tasks: asyncio.TaskGroup) -> None:
        # The groups in flight were admitted for the newest version. Tokens of an older version would be too stale.
        while self._finished is None and self.engine.version < self.ledger.versions.last():
            await self.freed.wait()
        if self._finished is None:
            for group in self.ledger.inflight():
                self._start(tasks, group)
        while self._finished is None:
            if self._has_room():
                self._start(tasks, self.ledger.admit(version=self.engine.version))
                await asyncio.sleep(0)  # let requests go out between two admissions
            else:
                await self.freed.wait()

    def _has_room(self) -> bool:
        """Whether the gate is open and the servers can use more completions than the unsent groups request."""
        self._unsent = {rollouts for rollouts in self._unsent if not rollouts.sent}
        if self._replaced or self.engine.room <= len(self._unsent) * self._group_size:
            return False
        return self._gate.admits(self._group_size, admitted=self.ledger.admitted, version=self.engine.version)

    def _start(self, tasks: asyncio.TaskGroup, group: AdmittedGroup) -> None:
        prompt = self.source.prompt(group.prompt_index)
        rollouts = Rollouts(
            self._request(group, prompt),
            self.opens_with_prompt[prompt.task],
            self._generate,
            lambda apart: self.rewards.begin(prompt, self._group_size, apart=apart),
            self.config.rollout.deadline_s,
        )
        self._unsent.add(rollouts)
        task = tasks.create_task(self._rollout(group, prompt.task, rollouts), name=f"group-{group.group_id}")
        self._running[group.group_id] = task
        task.add_done_callback(lambda _: self._ended(group.group_id, rollouts))

    def _ended(self, group_id: int, rollouts: Rollouts) -> None:
        self._unsent.discard(rollouts)
        del self._running[group_id]
        self._cancelled_groups.discard(group_id)
        self.notify()

    async def _rollout(self, group: AdmittedGroup, task: str, rollouts: Rollouts) -> None:
        try:
            async with rollouts:
                outcome = await self._scored(group, task, rollouts)
            if outcome is None:  # the run is ending
                self.ledger.settle(group.group_id, rollouts.sampled())
                return
            place = await self.payloads.append(outcome.payload)  # no other await before the place is recorded
        except (GenerationError, RewardError) as error:
            self._give_up(group, task, error, rollouts)
            return
        except asyncio.CancelledError:
            if group.group_id in self._cancelled_groups:
                self.ledger.settle(group.group_id, rollouts.sampled())
            raise
        sampled, summary = rollouts.sampled(), outcome.summary
        missed = replace(sampled, tokens=sampled.tokens - summary.tokens - summary.unused_tokens)
        if missed != Tally():  # tokens that the environment never received
            self.ledger.add_lost_tokens(group.group_id, missed)
        if Outcome.CUT in summary.outcomes:
            self.ledger.count_cut("deadline", rollouts.lengths(cut=True))
        self._failed_in_a_row = 0
        summary = replace(summary, task=task)
        self._failures[task].count_group(summary.outcomes, outcome.failure, truncated=sum(summary.truncated))
        if self.config.rollout.dynamic_sampling and len(summary.compared) < 2:
            self._drop_zero_variance(group, summary)
        else:
            self.ledger.ready(group.group_id, summary, place, version=self.engine.version)
            self._zero_variance_in_a_row = 0

    def _request(self, group: AdmittedGroup, prompt: Prompt) -> GenerationRequest:
        return GenerationRequest(
            request_id=f"{ROLLOUT}{group.group_id}-{self.ledger.notes.incarnation}",
            token_ids=prompt.token_ids,
            n=self._group_size,
            max_tokens=self._by_task[prompt.task].task.max_new_tokens,
            seed=trajectory_seed(self.config.seed, group.prompt_index, group.requeues),
            stop_token_ids=self.stop_token_ids[prompt.task],
            temperature=self.config.generation.temperature,
        )

    async def _scored(self, group: AdmittedGroup, task: str, rollouts: Rollouts) -> ScoredGroup | None:
        """Score a group, with up to `max_tries` attempts; None if the run ends.
        Raises the error of the last attempt."""
        lost = 0  # sessions in a row
        while True:
            try:
                return await rollouts.scored()
            except (GenerationError, RewardError) as error:
                lost = lost + 1 if isinstance(error, SessionLostError) else 0
                if 0 < lost < _LOST:
                    self.ledger.add_lost_tokens(group.group_id, rollouts.take_discarded())
                    continue
                if self._finished is not None:
                    return None
                tries = self.ledger.count_failed_attempt(group.group_id, rollouts.take_discarded())
                if isinstance(error, RewardError):
                    self._failures[task].count_failed_attempt(error)
                else:
                    logger.warning("group %d, attempt %d failed: %s", group.group_id, tries, error)
                if tries >= self.config.rollout.max_tries:
                    raise

    async def _generate(self, pending: PendingCompletions) -> None:
        """Generate the unfinished completions of a request, within `rollout.request_timeout_s`."""
        timeout_s = self.config.rollout.request_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await self.engine.generate(pending)
        except TimeoutError:
            raise GenerationError(f"rollout.request_timeout_s: no completions within {timeout_s} s") from None

    def _give_up(
        self, group: AdmittedGroup, task: str, error: GenerationError | RewardError, rollouts: Rollouts
    ) -> None:
        """Drop a group whose attempts are spent.
        Raises `error` once as many groups as a batch holds have failed in a row, so that a hopeless run ends."""
        self.ledger.settle(group.group_id, rollouts.sampled())
        self.ledger.drop(group.group_id, error.drop_reason)
        self.ledger.count_cut(error.drop_reason, rollouts.lengths())
        if isinstance(error, RewardError):
            self._failures[task].count_group({}, str(error))
        self._failed_in_a_row += 1
        if self._failed_in_a_row >= self.config.groups_per_batch:
            raise error

    def _drop_zero_variance(self, group: AdmittedGroup, summary: GroupSummary) -> None:
        """Drop a group whose rewards are all equal; another prompt takes its place (DAPO's dynamic sampling).
        Raises ConfigError after `rollout.max_zero_variance_groups` such groups in a row."""
        self.ledger.settle(group.group_id, Tally(tokens=summary.tokens + summary.unused_tokens))
        self.ledger.drop(group.group_id, "zero_variance")
        self._zero_variance_in_a_row += 1
        most = self.config.rollout.max_zero_variance_groups
        if self._zero_variance_in_a_row >= most and self._finished is None:
            said = f"each of the last {most} groups had equal rewards; choose easier or harder prompts"
            raise ConfigError(f"rollout.dynamic_sampling: {said}, or raise rollout.max_zero_variance_groups ({most})")

    async def _update(self) -> None:
        loaded = self.ledger.versions.newest()  # servers that join load it before they take requests
        while True:
            newest = self.ledger.versions.newest()
            if newest is None or newest == loaded:
                await self._changed.wait()
                continue
            await self.engine.load_version(newest)
            loaded = newest
            if newest == self.ledger.versions.newest():
                self._replaced = False
            self.notify()
