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
