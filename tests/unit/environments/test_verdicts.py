"""Verdicts of verifiers that return anything, raise, hang or end their process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from areal_core.environments import verdicts
from areal_core.environments.verdicts import Judge, Verdict
from areal_core.errors import RewardError
from areal_core.types import Outcome, Prompt

TASK = Prompt(index=0, prompt_id="0", text="1+\x1b[2J1=", token_ids=(1,), answer="2")


def judged(verify: Callable[[Prompt, str], Any], text: str = "#3\nareal: error: forged", **how: bool) -> Verdict:
    return Judge("environment.verifier own:check", verify, **how)(TASK, text, truncated=False)


@pytest.mark.parametrize(
    ("found", "outcome", "score"),
    [
        (1, Outcome.RIGHT, 1.0),
        (True, Outcome.RIGHT, 1.0),
        (0.5, Outcome.WRONG, 0.5),
        (np.float32(0.25), Outcome.WRONG, 0.25),
        (np.bool_(True), Outcome.RIGHT, 1.0),
        (np.array(0.5), Outcome.WRONG, 0.5),
        (torch.tensor(1.0), Outcome.RIGHT, 1.0),
        (Verdict(Outcome.WRONG, np.float32(0.5)), Outcome.WRONG, 0.5),
        (Verdict("right", 1), Outcome.RIGHT, 1.0),
        (Verdict(Outcome.FAILED, None), Outcome.FAILED, None),
    ],
)
def test_scores_of_any_kind_become_numbers(found: Any, outcome: Outcome, score: float | None) -> None:
    verdict = judged(lambda *_: found)
    assert (verdict.outcome, verdict.score) == (outcome, score)
    assert verdict.score is None or type(verdict.score) is float


@pytest.mark.parametrize(
    "found",
    [2.0, -1, float("nan"), float("inf"), None, "1.0", [1.0], np.ones(2), Verdict(Outcome.RIGHT, 7.0), {}],
    ids=str,
)
def test_anything_else_is_a_failure_that_names_the_verifier(found: Any) -> None:
    verdict = judged(lambda *_: found)
    assert (verdict.outcome, verdict.score) == (Outcome.FAILED, None)
    assert verdict.failure is not None
    assert verdict.failure.startswith(
        "environment.verifier own:check: ValueError: a verifier returns a score from 0 to 1, or a Verdict; got "
    )


def test_bug_is_shown_with_place_prompt_and_completion() -> None:
    calls = []

    def check(task: Prompt, text: str) -> float:
        calls.append(text)
        return float({}["anwser"])

    verdict = judged(check)
    assert verdict.outcome is Outcome.FAILED
    assert len(calls) == 2  # it may have been a passing trouble
    assert verdict.failure is not None
    first, *rest = verdict.failure.split("\n")
    line = check.__code__.co_firstlineno + 2
    assert first == f"environment.verifier own:check: KeyError: 'anwser' ({__file__}:{line})"
    assert f'      File "{__file__}", line {line}, in check' in rest
    assert rest[-2:] == ["        #3", "        areal: error: forged"]  # no line of its own
    assert all(each.startswith("    ") and each.isprintable() for each in rest)
    assert verdicts.__file__ not in verdict.failure


def test_passing_trouble_and_requests_for_another_try() -> None:
    left = [OSError("once")]

    def check(*_: object) -> float:
        if left:
            raise left.pop()
        return 1.0

    assert judged(check) == Verdict(Outcome.RIGHT, 1.0)
    left.append(RewardError("the judge is down"))  # type: ignore[arg-type]
    with pytest.raises(RewardError, match="the judge is down"):
        judged(check)


@pytest.mark.parametrize("verify_truncated", [True, False])
def test_truncated_completions_are_verified_on_request(verify_truncated: bool) -> None:
    judge = Judge("own", lambda *_: 1.0, verify_truncated=verify_truncated)
    assert judge(TASK, "#2", truncated=True).score == float(verify_truncated)


def answered(task: Prompt, text: str) -> Verdict:
    if text == "hang":
        time.sleep(60)
    if text == "die":
        os.abort()
    if text == "again":
        raise RewardError("again")
    if text == "raise":
        raise KeyError(text)
    return Verdict.of(Outcome.RIGHT, text)


def test_answers_apart_that_hang_or_die_are_incorrect_and_cost_nobody_else() -> None:
    judge = Judge("own", answered)
    with verdicts.apart(0.5):
        found = [judge(TASK, text, truncated=False) for text in ("a", "hang", "die", "b")]
        assert "KeyError" in str(judge(TASK, "raise", truncated=False).failure)
        with pytest.raises(RewardError, match="again"):
            judge(TASK, "again", truncated=False)
    right = [Verdict.of(Outcome.RIGHT, text) for text in "ab"]
    assert found == [right[0], Verdict.of(Outcome.TIMED_OUT), Verdict.of(Outcome.UNPARSABLE), right[1]]
    assert [each.score for each in found] == [1.0, 0.0, 0.0, 1.0]
