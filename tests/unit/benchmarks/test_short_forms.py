"""Benchmarks in virtual time, or at sizes that take a second: what they find, not how fast."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks import balance, controller, depth, publish

pytestmark = pytest.mark.slow


def test_slots_stay_in_use_and_no_reward_waits_for_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(balance, "SERVERS", 2)
    monkeypatch.setattr(balance, "SLOTS", 24)
    found = balance.balance([1], 64)
    assert found["slot_use"] >= 0.95
    waits = found["reward_wait_tokens"]
    assert waits["first"] == waits["last"] == waits["worst"] < 100 < waits["by_groups"]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller, "TOKENS", 64)
    monkeypatch.setattr(controller, "BATCH", 64)
    monkeypatch.setattr(controller, "SERVERS", 2)


def test_an_update_interrupts_all_that_run_and_they_run_again() -> None:
    found = asyncio.run(controller.update(64))
    assert 0 < found["worst_loop_stall_ms"] < 1000 * found["update_8192_s"]


def test_half_the_depth_is_half_the_staleness_at_the_same_speed() -> None:
    found = depth.in_virtual_time("7b", [1])
    assert found["4"]["over_4"] == 1
    assert found["2"]["over_4"] > 0.98
    assert found["0.5"]["over_4"] < 0.9
    for arm, of_depth in found.items():
        assert abs(of_depth["staleness_mean"] - float(arm)) < 0.1
        assert of_depth["staleness_max"] <= depth.BOUND + 2  # the batch takes what has ended: a straggler may exceed it


def test_every_figure_is_measured_and_every_damaged_version_refused() -> None:
    found = publish.measure(publish.SMALL, rounds=1, step_s=0.01, damaged=16)
    assert (found["one_fetch"], found["damaged_refused"]) == (1, 1.0)
    assert found["served_meanwhile"] > 0
    figures = (found["publish_over_cp"], found["blocked_over_copy"], found["http_gb_per_cpu_s"])
    assert min(*figures, found["swap_ms"]["median"]) > 0
