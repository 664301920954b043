"""The ledger under any order of events: nothing is lost, nothing is served twice, every token is accounted for. Folding
changes no total, whenever it comes, and a restored snapshot goes on from there."""

import itertools
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from areal_core.controller.core.ledger import Selection, TrajectoryLedger, snapshot
from areal_core.controller.core.tables import Place
from areal_core.errors import LedgerError
from areal_core.types import GroupState, Tally
from tests.support.records import summary
from tests.support.servers import version

GROUP = 2
GROUPS_PER_BATCH = 2


class LedgerMachine(RuleBasedStateMachine):
    """Drives a ledger and counts groups and tokens itself: the two must agree after every event."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(prefix="areal-ledger-")
        self.path = Path(self.folder.name) / "ledger-0.sqlite"
        self.ledger = TrajectoryLedger(self.path, group_size=GROUP)
        self.ledger.publish(version(0))
        self.restores = self.forgotten = 0
        self.admitted: set[int] = set()  # group ids, of all times
        self.unsettled: list[int] = []  # groups that were dropped while servers sampled for them
        self.dropped_groups = 0
        self.inflight: dict[int, int] = {}  # group -> prompt index
        self.ready: dict[int, int] = {}
        self.tokens: dict[int, int] = {}  # of ready and consumed groups
        self.batches: dict[int, tuple[int, ...]] = {}
        self.waiting: list[int] = []  # prompt indices queued again
        self.next_prompt = 0
        self.generated = self.consumed = self.dropped = 0

    def teardown(self) -> None:
        self.ledger.close()
        self.folder.cleanup()

    @rule()
    def admit(self) -> None:
        group = self.ledger.admit(version=len(self.batches))
        if self.waiting:
            assert group.prompt_index == self.waiting.pop(0)
        else:
            assert group.prompt_index == self.next_prompt
            self.next_prompt += 1
        assert group.group_id not in self.admitted, "a group id was given away again"
        assert all(group.admission > running.admission for running in self.ledger.inflight()[:-1])
        self.admitted.add(group.group_id)
        self.inflight[group.group_id] = group.prompt_index

    @precondition(lambda self: self.inflight)
    @rule(data=st.data(), tokens=st.integers(0, 50), age=st.integers(0, 3))
    def finish(self, data: st.DataObject, tokens: int, age: int) -> None:
        group_id = data.draw(st.sampled_from(sorted(self.inflight)))
        oldest = max(0, len(self.batches) - age)
        its = summary(tokens=tokens, min_version=oldest, max_version=oldest)
        place = Place(segment=f"s{group_id}", start=0, bytes=1, crc32=0)
        self.ledger.ready(group_id, its, place, version=len(self.batches))
        self.ready[group_id] = self.inflight.pop(group_id)
        self.tokens[group_id] = tokens
        self.generated += tokens

    @precondition(lambda self: self.inflight)
    @rule(data=st.data(), tokens=st.integers(0, 50))
    def fail(self, data: st.DataObject, tokens: int) -> None:
        self.ledger.count_failed_attempt(data.draw(st.sampled_from(sorted(self.inflight))), Tally(tokens=tokens))
        self.generated += tokens
        self.dropped += tokens

    @precondition(lambda self: self.inflight or self.ready)
    @rule(data=st.data(), requeue=st.booleans())
    def drop(self, data: st.DataObject, requeue: bool) -> None:
        group_id = data.draw(st.sampled_from(sorted(self.inflight | self.ready)))
        self.ledger.drop(group_id, "why", requeue=requeue)
        if group_id in self.inflight:
            self.unsettled.append(group_id)
        self._forget(group_id, requeue=requeue)

    @precondition(lambda self: self.unsettled)
    @rule(tokens=st.integers(0, 50))
    def settle(self, tokens: int) -> None:
        self.ledger.settle(self.unsettled.pop(), Tally(tokens=tokens))
        self.generated += tokens
        self.dropped += tokens

    @rule(policy=st.sampled_from(["admit", "wait", "drop"]))
    def fix(self, policy: str) -> None:
        step = len(self.batches) + 1
        selection = Selection(groups=GROUPS_PER_BATCH, rule=policy, max_staleness=1, max_requeues=0)
        before = self.ledger.dropped()
        try:
            manifest = self.ledger.fix_batch(step, selection)
        except LedgerError:
            assert policy == "wait"  # which comes too late for what other rules have left
            return
        if self.ledger.dropped() != before:
            self._forget_stale()
        if manifest is None:
            return
        members = tuple(group.group_id for group in manifest.groups)
        assert len(members) == GROUPS_PER_BATCH
        for group_id in members:
            assert group_id in self.ready, "a group was served that is not ready, or served twice"
            del self.ready[group_id]
            self.consumed += self.tokens[group_id]
        self.batches[step] = members
        self.ledger.publish(version(step))

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.forgotten = data.draw(st.integers(self.forgotten, len(self.batches)))
        while self.ledger.free(self.forgotten):
            pass

    @rule()
    def fold(self) -> None:
        while self.ledger.prune():
            pass
        rows = self.ledger._db.execute("SELECT COUNT(*) FROM groups").fetchone()[0]
        kept = len(self.batches) - max(0, self.forgotten - 1)
        alive = len(self.inflight) + len(self.ready) + len(self.waiting) + len(self.unsettled)
        assert rows <= alive + kept * GROUPS_PER_BATCH + 3  # those with the highest numbers stay

    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        """Go on with the copy that the checkpoint of a step holds."""
        self.forgotten = data.draw(st.integers(self.forgotten, len(self.batches)))
        self.restores += 1
        copy = Path(self.folder.name) / f"ledger-{self.restores}.sqlite"
        before = self.ledger.tokens(), self.ledger.counts(), self.ledger.dropped(), self.ledger.last_step()
        held = self.ledger.payloads.segments()
        segments = snapshot(self.path, copy, self.forgotten)
        assert self.ledger.payloads.segments() == held
        self.ledger.close()
        self.path, self.ledger = copy, TrajectoryLedger(copy, group_size=GROUP)
        assert (self.ledger.tokens(), self.ledger.counts(), self.ledger.dropped(), self.ledger.last_step()) == before
        assert segments == self.ledger.payloads.segments() == {f"s{group_id}" for group_id in self._needed()}

    @rule()
    def restart(self) -> None:
        """A restarted controller finds the running groups, all of them, in the order of their admission."""
        found = self.ledger.inflight()
        assert {group.group_id for group in found} == set(self.inflight)
        assert [group.admission for group in found] == sorted(group.admission for group in found)

    @invariant()
    def every_group_is_where_it_belongs(self) -> None:
        counts = self.ledger.counts()
        assert counts[GroupState.INFLIGHT] == len(self.inflight)
        assert counts[GroupState.READY] == len(self.ready)
        assert counts[GroupState.CONSUMED] == len(self.batches) * GROUPS_PER_BATCH
        assert counts[GroupState.WAITING] == len(self.waiting)
        assert counts[GroupState.DROPPED] == self.dropped_groups == sum(self.ledger.dropped().values())
        assert self.ledger.last_step() == len(self.batches)
        alive = len(self.inflight) + len(self.ready) + len(self.batches) * GROUPS_PER_BATCH
        assert self.ledger.admitted == GROUP * alive

    @invariant()
    def fixed_batches_stay(self) -> None:
        for step, members in self.batches.items():
            manifest = self.ledger.batch(step)
            if manifest is None:
                assert step < self.forgotten
                continue
            assert tuple(group.group_id for group in manifest.groups) == members

    @invariant()
    def every_token_is_accounted_for(self) -> None:
        tokens = self.ledger.tokens()
        assert tokens.accounted == self.generated
        assert tokens.consumed == self.consumed
        assert tokens.dropped == self.dropped
        assert tokens.buffered == sum(self.tokens[group_id] for group_id in self.ready)

    @invariant()
    def payloads_stay_until_they_are_forgotten(self) -> None:
        assert {group_id for group_id, _ in self.ledger.payloads.all()} == self._needed()

    def _needed(self) -> set[int]:
        later = {group_id for step, members in self.batches.items() if step > self.forgotten for group_id in members}
        return later | self.ready.keys()

    def _forget(self, group_id: int, *, requeue: bool) -> None:
        self.dropped_groups += 1
        if group_id in self.ready:
            self.dropped += self.tokens[group_id]
        prompt_index = self.ready.pop(group_id, None)
        if prompt_index is None:
            prompt_index = self.inflight.pop(group_id)
        if requeue:
            self.waiting.append(prompt_index)

    def _forget_stale(self) -> None:
        for group_id in list(self.ready):
            state = self.ledger._db.execute("SELECT state FROM groups WHERE group_id = ?", (group_id,)).fetchone()[0]
            if state == "dropped":
                self._forget(group_id, requeue=False)


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=25, stateful_step_count=40)


@settings(max_examples=300)
@given(
    step=st.integers(2, 4),
    eta=st.integers(0, 3),
    # How old each is, and whether it is ready: most are, so that there is a choice.
    groups=st.lists(st.tuples(st.integers(0, 3), st.sampled_from([True, True, True, False])), min_size=2, max_size=6),
)
def test_wait_waits_only_where_every_choice_would_break_the_bound(step: int, eta: int, groups: list[tuple[int, bool]]):
    ledger = TrajectoryLedger(":memory:", group_size=GROUP)
    place = Place(segment="s", start=0, bytes=1, crc32=0)

    def finish(group: int, oldest: int) -> None:
        ledger.ready(group, summary(min_version=oldest, max_version=oldest), place, version=oldest)

    for before in range(1, step):
        for _ in range(GROUPS_PER_BATCH):
            finish(ledger.admit(version=before - 1).group_id, before - 1)
        assert ledger.fix_batch(
            before, Selection(groups=GROUPS_PER_BATCH, rule="wait", max_staleness=eta, max_requeues=0)
        )
    due: dict[int, int] = {}
    ready: list[int] = []
    for lag, ended in groups:
        oldest = max(step - 1 - min(lag, eta), 0)
        group = ledger.admit(version=oldest).group_id
        due[group] = oldest + eta + 1
        if ended:
            finish(group, oldest)
            ready.append(group)

    def keeps(taken: tuple[int, ...]) -> bool:
        left = [due[group] for group in due.keys() - set(taken)]
        return all(sum(each <= last for each in left) <= (last - step) * GROUPS_PER_BATCH for last in {step, *left})

    choices = [choice for choice in itertools.combinations(ready, GROUPS_PER_BATCH) if keeps(choice)]
    rule = Selection(groups=GROUPS_PER_BATCH, rule="wait", max_staleness=eta, max_requeues=0)
    manifest = ledger.fix_batch(step, rule)
    if manifest is None:
        assert not choices
        assert len(ready) < GROUPS_PER_BATCH or len(ready) < len(due)
    else:
        taken = tuple(sorted(group.group_id for group in manifest.groups))
        assert taken in choices or (not choices and len(ready) == len(due))
