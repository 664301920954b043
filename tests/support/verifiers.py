"""Verifiers by import path."""

import time

from areal_core.environments.environment import Verdict
from areal_core.types import Outcome, Prompt


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
