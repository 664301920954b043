"""Verifiers: the verdict on a completion, from its text and the prompt's gold answer."""

from __future__ import annotations

import functools

from areal_core.environments import algebra
from areal_core.environments.environment import Verdict, Verifier
from areal_core.environments.fork_server import ForkServer
from areal_core.environments.mathematics import balanced, compared, conclusion, normalised
from areal_core.types import Outcome, Prompt

_LONGEST = 600  # characters of an answer; no gold answer of the benchmarks has half as many


def exact_match(task: Prompt, completion: str) -> float:
    """1 if the text after the last `#` is the gold answer, character by character, else 0."""
    _, mark, conclusion = completion.rpartition("#")
    return float(bool(mark) and conclusion == task.answer)


def mathematics(task: Prompt, completion: str, isolation: str = "confined") -> Verdict:
    """Whether the completion's conclusion is equal to the gold answer, as numbers, formulas, tuples, intervals or sets;
    see `areal_core.environments.mathematics`. An answer that can't be read is a wrong one; without result is one whose
    comparison takes too long, or breaks."""
    answer = conclusion(completion)
    if answer is None:
        return Verdict.of(Outcome.NO_ANSWER)
    if not answer or len(answer) > _LONGEST or not balanced(normalised(answer)):
        return Verdict.of(Outcome.UNPARSABLE)
    equal, read = compared(task.answer, answer), normalised(answer)
    if equal is None:
        return Verdict.of(_by_algebra(normalised(task.answer), read, isolation), read)
    return Verdict.of(Outcome.RIGHT if equal else Outcome.WRONG, read)


def _by_algebra(gold: str, answer: str, isolation: str) -> Outcome:
    reply = _formulas(isolation).ask(gold, answer)
    if reply.status == "done" and isinstance(reply.value, str) and reply.value in _COMPARED:
        return Outcome(reply.value)
    return Outcome.TIMED_OUT if reply.status == "timed_out" else Outcome.FAILED


_COMPARED = {Outcome.RIGHT, Outcome.WRONG, Outcome.UNPARSABLE, Outcome.TIMED_OUT, Outcome.FAILED}


@functools.cache
def _formulas(isolation: str) -> ForkServer:
    """One a process."""
    return ForkServer("areal_core.environments.algebra:Formulas", cpu_s=algebra.CPU_LIMIT_S, isolation=isolation)


VERIFIERS: dict[str, Verifier] = {"exact_match": exact_match}
