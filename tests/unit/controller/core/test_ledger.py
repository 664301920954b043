"""Transitions, selection policies, recovery and incarnations of the trajectory ledger, on a real SQLite file."""

import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from areal_core.controller.core.ledger import Selection, TrajectoryLedger, snapshot
from areal_core.controller.core.tables import Ending, Place
from areal_core.errors import LedgerError
from areal_core.types import FORMAT, GroupState, PolicyVersion, Tally
from tests.support.records import evaluation, summary

GROUP = 2
PLACE = Place(segment="000001-000001", start=3, bytes=7, crc32=5)


def selection(policy: str = "admit", groups: int = 2, max_staleness: int = 1, max_requeues: int = 1) -> Selection:
    return Selection(groups=groups, rule=policy, max_staleness=max_staleness, max_requeues=max_requeues)


def version(number: int, content: str = "a") -> PolicyVersion:
    return PolicyVersion(version=number, path=f"/weights/{number}", digest=f"{number}{content}")


@pytest.fixture
def ledger(tmp_path: Path):
    opened = TrajectoryLedger(tmp_path / "ledger.sqlite", group_size=GROUP)
    yield opened
    opened.close()


def admit_ready(ledger: TrajectoryLedger, *, tokens: int = 4, at: int = 0) -> int:
    group = ledger.admit(version=0)
    its = summary(tokens=tokens, min_version=at, max_version=at)
    ledger.ready(group.group_id, its, PLACE, version=at)
    return group.group_id


def test_transitions_that_do_not_exist_are_refused(ledger):
    group = ledger.admit(version=0).group_id
    ledger.ready(group, summary(), PLACE, version=0)
    with pytest.raises(LedgerError, match="is ready, not inflight"):
        ledger.ready(group, summary(), PLACE, version=0)
    with pytest.raises(LedgerError, match="group 99 does not exist"):
        ledger.drop(99, "why")
    ledger.drop(group, "why")
    with pytest.raises(LedgerError, match="is dropped"):
        ledger.drop(group, "why")
    assert ledger.counts()[GroupState.DROPPED] == 1


def test_steps_are_fixed_in_order(ledger):
    for following in (1, 2):
        admit_ready(ledger)
        with pytest.raises(LedgerError, match=f"step: must be {following}, the next batch, got 3"):
            ledger.fix_batch(3, selection(groups=1))
        ledger.fix_batch(following, selection(groups=1))


def test_admit_takes_the_ready_group_that_was_admitted_first(ledger):
    straggler = ledger.admit(version=0).group_id
    later = admit_ready(ledger)
    assert [g.group_id for g in ledger.fix_batch(1, selection("admit", groups=1)).groups] == [later]
    ledger.ready(straggler, summary(), PLACE, version=3)
    admit_ready(ledger)
    assert [g.group_id for g in ledger.fix_batch(2, selection("admit", groups=1)).groups] == [straggler]


def test_wait_takes_younger_groups_until_an_older_one_would_exceed_eta(ledger):
    straggler = ledger.admit(version=0).group_id
    for step in (1, 2):
        later = admit_ready(ledger, at=step - 1)
        assert [g.group_id for g in ledger.fix_batch(step, selection("wait", groups=1, max_staleness=2)).groups] == [
            later
        ]
    later = admit_ready(ledger, at=2)
    assert ledger.fix_batch(3, selection("wait", groups=1, max_staleness=2)) is None
    ledger.ready(straggler, summary(), PLACE, version=2)
    for step, group in ((3, straggler), (4, later)):
        assert [g.group_id for g in ledger.fix_batch(step, selection("wait", groups=1, max_staleness=2)).groups] == [
            group
        ]


@pytest.mark.parametrize(("policy", "raises"), [("wait", True), ("admit", False)])
def test_a_batch_that_would_break_the_bound_is_refused_where_it_is_promised(ledger, policy, raises):
    for step in (1, 2, 3):
        admit_ready(ledger, at=step - 1)
        ledger.fix_batch(step, selection("wait", groups=1))
    admit_ready(ledger, at=1)
    if raises:
        with pytest.raises(LedgerError, match="batch 4 would train on tokens 2 versions old"):
            ledger.fix_batch(4, selection(policy, groups=1))
    else:
        assert ledger.fix_batch(4, selection(policy, groups=1))


def test_groups_that_a_restart_begins_again_are_as_old_as_what_samples_them(ledger):
    for number in (0, 1, 2):
        ledger.publish(version(number))
    ledger.admit(version=0)
    for step in (1, 2):
        admit_ready(ledger, at=step - 1)
        assert ledger.fix_batch(step, selection("wait", groups=1, max_staleness=2))
    admit_ready(ledger, at=2)
    assert ledger.fix_batch(3, selection("wait", groups=1, max_staleness=2)) is None
    ledger.resume(10)
    assert ledger.fix_batch(3, selection("wait", groups=1, max_staleness=2))


def test_drop_gives_up_what_would_exceed_eta_a_bounded_number_of_times(ledger):
    for step in (1, 2):
        admit_ready(ledger, at=step - 1)
        ledger.fix_batch(step, selection("drop", groups=1))
    stale = admit_ready(ledger, at=0)  # step 3 trains on version 2: staleness 2 > 1
    assert ledger.fix_batch(3, selection("drop", groups=1)) is None
    assert ledger.dropped() == {"stale": 1}
    ledger.count_cut("deadline", [0, 128, 129, 130])
    assert ledger.cut() == {"deadline/1": 1, "deadline/128": 1, "deadline/256": 2, "stale/1": 2}
    again = ledger.admit(version=0)
    assert (again.prompt_index, again.requeues) == (2, 1)
    assert again.group_id != stale
    ledger.ready(again.group_id, summary(), PLACE, version=0)
    assert ledger.fix_batch(3, selection("drop", groups=1)) is None
    assert ledger.admit(version=0).prompt_index == 3  # requeued once, not twice
    kept = admit_ready(ledger, at=1)  # as stale as eta allows
    assert [group.group_id for group in ledger.fix_batch(3, selection("drop", groups=1)).groups] == [kept]


def test_publishing_the_same_weights_again_changes_nothing(ledger):
    for number in (0, 1, 2):
        assert ledger.publish(version(number)) == "new"
    group = admit_ready(ledger, at=2)
    assert ledger.publish(version(1)) == "same"
    assert ledger.versions.newest() == version(2)
    assert ledger.payload(group) == PLACE
    assert ledger.notes.incarnation == 0
    with pytest.raises(LedgerError, match="version: must be at most 3, got "):
        ledger.publish(version(4))


def test_a_damaged_version_is_none_until_it_is_published_again(ledger):
    for number in (0, 1, 2):
        ledger.publish(version(number))
    ledger.versions.mark_damaged(2)
    assert (ledger.versions.newest(), ledger.versions.get(2), ledger.versions.last()) == (None, None, 2)
    assert [ledger.versions.digest(number) for number in (2, 3)] == [version(2).digest, None]
    assert ledger.publish(version(2)) == "same"
    assert (ledger.versions.newest(), ledger.notes.incarnation) == (version(2), 0)
    ledger.versions.mark_damaged(2)
    assert [ledger.publish(version(2, content)) for content in ("other", "a")] == ["replaced", "replaced"]


def stepped(ledger: TrajectoryLedger, *sampled_by: int) -> dict[int, int]:
    """Steps of one group each, which these versions have sampled, and the versions that they train, with notes; returns
    the group of each step."""
    groups = {}
    for step, sampler in enumerate(sampled_by, 1):
        ledger.publish(version(step - 1))
        groups[step] = admit_ready(ledger, tokens=step, at=sampler)
        ledger.fix_batch(step, selection(groups=1))
        ledger.notes.publish(step, float(step))
        ledger.notes.add_staleness(step, {"0": step, "1": 1})
    return groups


def test_a_ledger_that_knows_more_than_the_checkpoint_forgets_what_was_lost(ledger):
    batches = stepped(ledger, 0, 0, 1, 2)
    ledger.rewind(3)
    ledger.rewind(9)
    assert (ledger.notes.incarnation, ledger.versions.newest()) == (0, version(3))  # nothing is lost
    ledger.rewind(1)
    assert (ledger.notes.incarnation, ledger.versions.newest()) == (1, version(1))
    assert ledger.batch(2) is not None  # what version 1 is to be trained on
    assert (ledger.batch(3), ledger.batch(4)) == (None, None)
    assert ledger.payload(batches[3])  # version 1 sampled it: it is in the buffer again
    with pytest.raises(LedgerError):
        ledger.payload(batches[4])
    assert ledger.publish(version(2, "other")) == "new"


def test_other_weights_under_an_old_number_open_an_incarnation_and_no_label_lies(ledger):
    batches = stepped(ledger, 0, 0, 1, 2)
    ready_old, ready_new, flying = (
        admit_ready(ledger, at=1),
        admit_ready(ledger, at=3),
        ledger.admit(version=0).group_id,
    )
    assert ledger.publish(version(2, "other")) == "replaced"
    assert (ledger.notes.incarnation, ledger.versions.newest()) == (1, version(2, "other"))
    assert ledger.batch(2) is not None  # it made version 2, and its content is still valid
    assert (ledger.batch(3), ledger.batch(4)) == (None, None)
    with pytest.raises(LedgerError):
        ledger.drop(flying, "again")  # dropped already
    for group in (batches[4], ready_new):  # sampled by the version whose weights changed
        with pytest.raises(LedgerError):
            ledger.payload(group)
    for group in (batches[3], ready_old):  # sampled by version 1, which is still valid
        assert ledger.payload(group) == PLACE
    assert ledger.dropped() == {"replaced": 3}
    assert ledger.fix_batch(3, selection(groups=2)).groups[0].group_id == batches[3]


def folded(ledger: TrajectoryLedger, *kept: int) -> list[int]:
    """Fold all that can be; returns the groups that have rows still."""
    while ledger.prune(kept):
        pass
    return [row[0] for row in ledger._db.execute("SELECT group_id FROM groups ORDER BY group_id")]


def books(ledger: TrajectoryLedger) -> tuple[object, ...]:
    """All that is counted."""
    return ledger.tokens(), ledger.counts(), ledger.dropped(), ledger.admitted, ledger.last_step()


def test_versions_and_notes_are_folded_unless_somebody_needs_them(ledger):
    groups = stepped(ledger, 0, 1, 2, 0, 0, 0)
    ledger.publish(version(6))
    ledger.notes.add_evaluation(evaluation(1, 0.5))
    while ledger.free(6):
        pass
    folded(ledger, 2)  # which is to be scored
    assert [number for number in range(7) if ledger.versions.digest(number)] == [0, 2, 6]
    assert [step for step in range(7) if ledger.notes.published_s(step)] == [1, 2, 5, 6]
    assert [ledger.step_of(group) for group in (groups[1], groups[6])] == [None, 6]
    assert ledger.publish(version(3)) == "same"  # late
    assert ledger.versions.digest(3) is None
    assert ledger.notes.incarnation == 0
    with pytest.raises(LedgerError, match=f"group {groups[1]} does not exist"):
        ledger.drop_damaged(groups[1])


def test_other_staleness_of_a_step_replaces_what_it_had(ledger):
    stepped(ledger, 0, 1, 2)
    ledger.notes.add_staleness(2, {"1": 10})
    assert ledger.notes.staleness() == {"0": 1 + 3, "1": 1 + 10 + 1}
    ledger.notes.forget(2)
    assert ledger.notes.staleness() == {"0": 1, "1": 1}


def test_one_call_frees_or_folds_a_bounded_number_of_groups(ledger, monkeypatch):
    monkeypatch.setattr("areal_core.controller.core.ledger._AT_ONCE", 2)
    groups = stepped(ledger, 0, 1, 2, 0, 0)
    assert ledger.free(5)
    assert (ledger.payloads.forgotten, [group for group, _ in ledger.payloads.all()]) == (3, [groups[4], groups[5]])
    assert not ledger.free(5)
    assert (ledger.payloads.forgotten, list(ledger.payloads.all())) == (5, [])
    assert not ledger.free(2)
    assert ledger.payloads.forgotten == 5
    before = books(ledger)
    assert ledger.prune()
    assert books(ledger) == before
    assert ledger._db.execute("SELECT COUNT(*) FROM groups").fetchone()[0] == 5 - 2
    assert folded(ledger) == [groups[5]]


def test_a_snapshot_is_small(ledger, tmp_path):
    stepped(ledger, 0, 1, 2)
    for _ in range(200):
        ledger.drop(admit_ready(ledger), "why")
    whole, small = tmp_path / "whole.sqlite", tmp_path / "small.sqlite"
    snapshot(tmp_path / "ledger.sqlite", whole)
    snapshot(tmp_path / "ledger.sqlite", small, 2)
    assert small.stat().st_size < whole.stat().st_size - 200 * 100  # bytes of a row, at least
    assert not list(tmp_path.glob("small.sqlite-*"))


def test_a_damaged_payload_of_a_buffered_group_costs_that_group(ledger):
    damaged, other = admit_ready(ledger), admit_ready(ledger)
    ledger.drop_damaged(damaged)
    assert ledger.dropped() == {"damaged": 1}
    assert ledger.admit(version=0).prompt_index == 0
    assert ledger.fix_batch(1, selection(groups=1)).groups[0].group_id == other
    assert ledger.notes.incarnation == 0


def test_a_damaged_payload_dissolves_the_batches_from_its_own_on(ledger):
    ledger.publish(version(0))
    groups = [admit_ready(ledger) for _ in range(3)]
    for step in (1, 2, 3):
        ledger.fix_batch(step, selection(groups=1))
    ledger.publish(version(1))
    ledger.drop_damaged(groups[1])  # of the batch whose version is not published yet
    assert ledger.notes.incarnation == 0
    assert ledger.last_step() == 1
    assert ledger.versions.last() == 1
    assert ledger.fix_batch(2, selection(groups=1)).groups[0].group_id == groups[2]
    assert ledger.admit(version=0).prompt_index == 1  # queued again


def test_a_damaged_payload_whose_version_is_published_begins_a_new_incarnation(ledger):
    ledger.publish(version(0))
    groups = [admit_ready(ledger), admit_ready(ledger)]
    ledger.fix_batch(1, selection(groups=1))
    ledger.publish(version(1))
    sampled_by_it = admit_ready(ledger, at=1)
    ledger.fix_batch(2, selection(groups=1))
    ledger.publish(version(2))
    ledger.drop_damaged(groups[0])
    assert ledger.notes.incarnation == 1
    assert (ledger.last_step(), ledger.versions.last()) == (0, 0)
    assert ledger.dropped() == {"damaged": 1, "replaced": 1}  # what the forgotten version 1 had sampled
    assert ledger.counts()[GroupState.READY] == 1
    assert ledger.fix_batch(1, selection(groups=1)).groups[0].group_id == groups[1]
    with pytest.raises(LedgerError, match="no longer stored"):
        ledger.payload(sampled_by_it)


def test_a_transition_that_fails_leaves_nothing_half_done(ledger):
    group = ledger.admit(version=0).group_id
    with pytest.raises(sqlite3.Error):
        ledger.ready(group, summary(), replace(PLACE, crc32=object()), version=0)  # type: ignore[arg-type]
    assert ledger.counts()[GroupState.INFLIGHT] == 1
    assert ledger.admitted == GROUP


def test_a_group_that_was_dropped_while_it_ran_is_settled_when_servers_have_returned_it(ledger):
    for number in (0, 1):
        ledger.publish(version(number))
    flying = ledger.admit(version=0).group_id
    assert ledger.publish(version(1, "other")) == "replaced"
    assert ledger.tokens().dropped == 0
    ledger.settle(flying, Tally(tokens=5, unread=3))
    assert (ledger.tokens().dropped, ledger.tokens().allowance) == (5, 3)


def test_what_was_not_read_and_what_a_lost_server_did_not_report_are_allowed_for_together(ledger):
    ledger.settle(ledger.admit(version=0).group_id, Tally(tokens=5, unread=3))
    ledger.counters.join("one", "http://one", 0)
    ledger.counters.end("one", uncounted=3)
    assert ledger.tokens().allowance == 3 + 3


@pytest.mark.parametrize(("reopened", "dropped", "in_flight"), [(False, 0, 2), (True, 2, 0)])
def test_what_an_end_aborted_starts_again_only_where_the_run_goes_on(ledger, reopened, dropped, in_flight):
    ledger.settle(ledger.admit(version=0).group_id, Tally(tokens=2))
    ledger.notes.end(Ending(reason="steps", version=0, model_url=""))
    if reopened:
        ledger.notes.reopen()
    ledger.resume(10)
    assert (ledger.tokens().dropped, ledger.tokens().in_flight) == (dropped, in_flight)
    assert (ledger.notes.ending is None) == reopened


def test_what_a_killed_controller_had_not_stored_is_allowed_for(ledger):
    """Groups that ran, and those that a new incarnation dropped before their tokens were returned; not what was settled
    or stored."""
    for number in (0, 1):
        ledger.publish(version(number))
    ledger.admit(version=0)
    ledger.publish(version(1, "other"))
    ledger.settle(ledger.admit(version=0).group_id, Tally(tokens=2))
    admit_ready(ledger)
    ledger.admit(version=0)
    ledger.resume(10)
    assert ledger.tokens().allowance == 2 * 10
    ledger.resume(10)
    assert ledger.tokens().allowance == 4 * 10  # both run again; what was dropped does not


def test_what_servers_have_sampled_in_a_past_that_is_lost_counts_for_nothing(ledger):
    """They outlive the machine whose ledger is put back to a checkpoint's."""
    ledger.publish(version(0))
    ledger.counters.join("one", "http://one", 0)
    ledger.settle(ledger.admit(version=0).group_id, Tally(tokens=10))
    ledger.counters.report("one", 8, 6)
    ledger.rewind(0)
    ledger.resume(0)
    ledger.counters.join("one", "http://one", 500)
    ledger.counters.report("one", 505, 10)
    assert ledger.tokens().generated == 8 + 5
    assert ledger.tokens().allowance == 10 - 6  # what groups had gained since the last report


def test_a_ledger_of_another_format_is_refused_in_one_line(tmp_path):
    path = tmp_path / "old.sqlite"
    with sqlite3.connect(path) as old:
        old.execute("CREATE TABLE notes (key TEXT PRIMARY KEY, value TEXT NOT NULL)")
    with pytest.raises(LedgerError, match=rf"^.*old\.sqlite: the ledger has format 0, must be {FORMAT}; start"):
        TrajectoryLedger(path, group_size=GROUP)


def test_a_fixed_batch_is_one_object_until_it_changes(ledger):
    """Every rank asks for it; what is described once need not be described again."""
    first, _ = admit_ready(ledger), admit_ready(ledger)
    batch = ledger.fix_batch(1, selection())
    assert ledger.batch(1) is batch
    admit_ready(ledger), admit_ready(ledger)
    ledger.fix_batch(2, selection())
    assert ledger.batch(1) is batch
    admit_ready(ledger), admit_ready(ledger)
    ledger.fix_batch(3, selection())
    again = ledger.batch(1)
    assert again == batch, "a trainer that begins again asks for an earlier one"
    assert again is not batch, "two are kept"
    ledger.drop_damaged(first)
    assert ledger.batch(1) is None
    again = ledger.fix_batch(1, selection())
    assert first not in {group.group_id for group in again.groups}
    assert ledger.batch(1) is again
    ledger.free(1)
    assert {group.segment for group in ledger.batch(1).groups} == {""}


def test_the_versions_before_a_damaged_batch_stay(ledger):
    batches = stepped(ledger, 0, 0, 1, 2)
    ledger.drop_damaged(batches[2])
    assert (ledger.notes.incarnation, ledger.versions.newest()) == (1, version(1))


def test_failed_tries_of_a_group_are_counted(ledger):
    group = ledger.admit(version=0).group_id
    assert [ledger.count_failed_attempt(group, Tally(tokens=1)) for _ in range(3)] == [1, 2, 3]
    assert ledger.tokens().dropped == 3
