"""Verifiers: the verdict on a completion, from its text and the prompt's gold answer."""

from __future__ import annotations

from areal_core.environments.environment import Verdict, Verifier
from areal_core.environments.mathematics import balanced, compared, conclusion, normalised
from areal_core.types import Outcome, Prompt

_LONGEST = 600  # characters of an answer; no gold answer of the benchmarks has half as many


def exact_match(task: Prompt, completion: str) -> float:
    """1 if the text after the last `#` is the gold answer, character by character, else 0."""
    _, mark, conclusion = completion.rpartition("#")
    return float(bool(mark) and conclusion == task.answer)


def mathematics(task: Prompt, completion: str) -> Verdict:
    """Whether the completion's conclusion equals the gold answer; see `areal_core.environments.mathematics`. An answer
    that can't be read is a wrong one. Every comparison ends: its steps and its numbers are bounded."""
    answer = conclusion(completion)
    if answer is None:
        return Verdict.of(Outcome.NO_ANSWER)
    if not answer or len(answer) > _LONGEST or not balanced(read := normalised(answer)):
        return Verdict.of(Outcome.UNPARSABLE)
    return Verdict.of(Outcome.CORRECT if compared(task.answer, answer) else Outcome.INCORRECT, " ".join(read.split()))


VERIFIERS: dict[str, Verifier] = {"exact_match": exact_match, "mathematics": mathematics}
