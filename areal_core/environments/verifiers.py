"""Verifiers: the score of a completion, as pure functions of its text and of the prompt's gold answer."""

from __future__ import annotations

from areal_core.environments.environment import Verifier
from areal_core.environments.jsonl import final_number
from areal_core.types import Prompt


def exact_match(task: Prompt, completion: str) -> float:
    """1 if the text after the last `#` is the gold answer, character by character, else 0."""
    _, mark, conclusion = completion.rpartition("#")
    return float(bool(mark) and conclusion == task.answer)


def same_number(task: Prompt, completion: str) -> float:
    r"""1 if both texts end on the same number (see `final_number`), else 0; 27, 27.0 and \boxed{27} are the same."""
    found = final_number(completion)
    return float(found is not None and found == final_number(task.answer))


VERIFIERS: dict[str, Verifier] = {"exact_match": exact_match, "same_number": same_number}
