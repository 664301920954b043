"""Verifiers by import path."""

import ctypes
import time

from areal_core.environments.environment import Verdict
from areal_core.types import Outcome, Prompt

HANGS, DIES, FAILS = "7", "8", "9"  # texts for `costly`


def slow(task: Prompt, completion: str) -> Verdict:
    """Right is what ends on the gold answer; a hundredth of a second each."""
    time.sleep(0.01)
    return Verdict.of(Outcome.CORRECT if completion.endswith(task.answer) else Outcome.INCORRECT, completion[-1:])


def ends(task: Prompt, completion: str) -> Verdict:
    """Right is whatever ends: what was cut off is never judged."""
    return Verdict.of(Outcome.CORRECT, completion)


def long(task: Prompt, completion: str) -> float:
    """The longer, the better: the policy keeps away from completions of a few tokens."""
    return min(1.0, len(completion) / 128)


def costly(task: Prompt, text: str) -> Verdict:
    """Right is the gold answer; three texts cost more than a verdict."""
    if text == HANGS:
        time.sleep(60)
    if text == DIES:
        ctypes.string_at(0)
    if text == FAILS:
        raise KeyError(text)
    return Verdict.of(Outcome.CORRECT if text == task.answer else Outcome.INCORRECT, text)
