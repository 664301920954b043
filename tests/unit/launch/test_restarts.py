"""Restart budgets, under a clock by hand."""

from __future__ import annotations

import math

from areal_core.launch.supervisor import RestartBudget


def test_restarts_come_back_one_by_one_and_no_more_than_there_were() -> None:
    now = [0.0]
    budget = RestartBudget(2, 8.0, lambda: now[0])
    assert [budget.take() for _ in range(3)] == [True, True, False]
    assert (budget.spent, budget.total, budget.next_s()) == (2, 2, 8.0)
    now[0] = 4.0
    assert not budget.take()
    assert budget.next_s() == 4.0
    now[0] = 8.0
    assert budget.next_s() == 0.0
    assert [budget.take() for _ in range(2)] == [True, False]
    now[0] = 1000.0
    assert [budget.take() for _ in range(3)] == [True, True, False]
    assert budget.total == 5
    none = RestartBudget(0, 10.0, lambda: now[0])
    assert (none.take(), none.next_s()) == (False, math.inf)
