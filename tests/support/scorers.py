"""Scorers for tests of the fork server, in processes of its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

GOLD = {"answer": "4"}


def stopped(act: Callable[[], Any]) -> list[str]:
    """Whether an act was stopped, and by which error."""
    try:
        return ["did", str(act())]
    except BaseException as error:  # noqa: BLE001 - whatever stops it
        return ["stopped", type(error).__name__]


class Evaluating:
    """Runs an answer as Python, with everything in reach: the worst scorer that there could be."""

    def prepare(self, task: Any) -> Any:
        if task == "broken":
            raise KeyError(task)
        return task

    def judge(self, prepared: Any, answer: str) -> Any:
        if answer == "gold":
            return GOLD["answer"]
        scope = {"__name__": __name__, "GOLD": GOLD, "Evaluating": Evaluating, "os": os, "stopped": stopped}
        return eval(answer, scope)
