"""Verdicts on many problems at once."""

import asyncio
import ctypes
import time
from collections.abc import Sequence

import pytest

from areal_core.config.schema import load
from areal_core.environments.verdicts import Verdict
from areal_core.errors import UserCodeError
from areal_core.evaluation.judging import Judges
from areal_core.types import Outcome, Prompt


def verify(task: Prompt, text: str) -> Verdict:
    if text == "hang":
        time.sleep(60)
    if text == "die":
        ctypes.string_at(0)
    if text == "bug":
        raise KeyError(text)
    return Verdict.of(Outcome.CORRECT if text == task.answer else Outcome.INCORRECT, text)


CONFIG = load({"environment": {"verifier": f"{__name__}:verify"}, "rollout": {"reward_timeout_s": 1.0}})


def judged(texts: Sequence[Sequence[str]], *, workers: int = 2) -> list[Sequence[Verdict]]:
    """Of the completions of as many problems, whose answers are their numbers."""

    async def ask() -> list[Sequence[Verdict]]:
        judges = Judges(CONFIG, workers)
        problems = [
            Prompt(index=i, prompt_id=str(i), text="?", token_ids=(1,), answer=str(i)) for i in range(len(texts))
        ]
        try:
            asked = [
                judges(problem, [(text, False) for text in its]) for problem, its in zip(problems, texts, strict=True)
            ]
            return await asyncio.gather(*asked)
        finally:
            await judges.close()

    return asyncio.run(ask())


@pytest.mark.parametrize("workers", [1, 3])
def test_each_problem_has_its_own_verdicts(workers: int) -> None:
    texts = [[str(i + j) for j in range(1 + i % 4)] for i in range(200)]
    found = judged(texts, workers=workers)
    assert [[verdict.answer for verdict in its] for its in found] == texts
    assert all(its[0].outcome is Outcome.CORRECT for its in found)
    assert all(verdict.outcome is Outcome.INCORRECT for its in found for verdict in its[1:])


@pytest.mark.parametrize("text", ["hang", "die"])
def test_a_completion_that_costs_a_worker_its_process_costs_no_other_its_verdict(text: str) -> None:
    found = judged([*([str(i), "x"] for i in range(20)), ["20", text], *([str(i)] for i in range(21, 40))], workers=1)
    assert [verdict.outcome for verdict in found[20]] == [Outcome.CORRECT, Outcome.TIMED_OUT]
    assert all(its[0].outcome is Outcome.CORRECT for its in found)


def test_a_verifier_with_a_bug_ends_all_that_wait() -> None:
    with pytest.raises(UserCodeError, match="KeyError: 'bug'"):
        judged([["bug"]] * 40)
