"""The balance of work, at a size that takes a second."""

from __future__ import annotations

import pytest

from benchmarks import balance


def test_slots_stay_in_use_and_no_reward_waits_for_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(balance, "SERVERS", 2)
    monkeypatch.setattr(balance, "SLOTS", 24)
    found = balance.balance([1], 64)
    assert found["slot_use"] >= 0.95
    waits = found["reward_wait_tokens"]
    assert waits["first"] == waits["last"] == waits["worst"] < 100 < waits["by_groups"]


def test_a_rank_that_ends_late_is_what_the_share_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four groups a minibatch each: eight ranks have two completions each, a hundred have one or none."""
    monkeypatch.setattr(balance, "RANKS", (1, 8, 100))
    share = balance.rank_share(1, 4)
    assert share[1] == pytest.approx(1)
    assert 0.6 < share[8] < 1
    assert share[100] < 0.16
