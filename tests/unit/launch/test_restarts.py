"""Restart budgets, under a clock by hand."""

from __future__ import annotations

import math

from areal_core.launch.restarts import RestartBudget


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_restarts_come_back_one_by_one_and_no_more_than_there_were() -> None:
    clock = Clock()
    budget = RestartBudget(2, 8.0, clock)
    assert [budget.take() for _ in range(3)] == [True, True, False]
    assert (budget.spent, budget.total, budget.next_s()) == (2, 2, 8.0)
    clock.now = 4.0
    assert not budget.take()
    assert budget.next_s() == 4.0
    clock.now = 8.0
    assert budget.next_s() == 0.0
    assert [budget.take() for _ in range(2)] == [True, False]
    clock.now = 1000.0
    assert [budget.take() for _ in range(3)] == [True, True, False]
    assert budget.total == 5


def test_none_come_back_where_there_are_none() -> None:
    clock = Clock()
    budget = RestartBudget(0, 10.0, clock)
    clock.now = 1e6
    assert not budget.take()
    assert budget.next_s() == math.inf
