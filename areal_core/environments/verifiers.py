"""Whether an answer is right, one verifier a task: pure functions of the answer's text and the gold answer."""

from __future__ import annotations

from collections.abc import Callable

from areal_core.config.schema import TaskConfig
from areal_core.environments.jsonl import final_number

Verifier = Callable[[str, str], bool]


def exact_match(answer: str, gold: str) -> bool:
    """Whether the text after the last `#` is the gold answer, character by character."""
    _, mark, conclusion = answer.rpartition("#")
    return bool(mark) and conclusion == gold


def same_number(answer: str, gold: str) -> bool:
    r"""Whether both texts end on the same number (see `final_number`); 27, 27.0 and \boxed{27} are the same."""
    found = final_number(answer)
    return found is not None and found == final_number(gold)


_VERIFIERS: dict[str, Verifier] = {"arithmetic": exact_match, "jsonl": same_number}


def verifier(task: TaskConfig) -> Verifier:
    """The verifier of a task: (answer text, gold answer) -> right or wrong."""
    return _VERIFIERS[task.name]
