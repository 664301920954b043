"""Verdicts of verifiers that return anything, raise, hang or end their process."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
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
        (np.float64(1.0), Outcome.RIGHT, 1.0),
        (Decimal("0.5"), Outcome.WRONG, 0.5),
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
    [
        2.0, -1, float("nan"), float("inf"), None, "1.0", [1.0], np.ones(2), torch.ones(2), 10**400, {},
        Verdict(Outcome.RIGHT, 7.0), Verdict("great", 1.0), Verdict("right", None), Verdict(Outcome.FAILED, 0.0),
    ],
    ids=str,
)  # fmt: skip
def test_anything_else_is_a_failure_that_names_the_verifier(found: Any) -> None:
    verdict = judged(lambda *_: found)
    assert (verdict.outcome, verdict.score) == (Outcome.FAILED, None)
    assert verdict.failure is not None
    assert verdict.failure.startswith("environment.verifier own:check: ValueError: ")
    assert verdicts.__file__ not in verdict.failure


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


class PanicError(BaseException):
    """An error as other languages' extensions raise."""


class MuteError(Exception):
    def __str__(self) -> str:
        raise MuteError


class OwnError(RewardError):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} {two}")


@pytest.mark.parametrize("error", [PanicError("x"), MuteError(), SystemExit(0), KeyboardInterrupt()], ids=repr)
def test_nothing_that_a_verifier_raises_gets_out(error: BaseException) -> None:
    def check(*_: object) -> float:
        raise error

    verdict = judged(check)
    assert verdict.outcome is Outcome.FAILED
    assert verdict.failure is not None
    assert verdict.failure.startswith(f"environment.verifier own:check: {type(error).__name__}: ")


def test_own_class_of_a_request_for_another_try_stays_here() -> None:
    def check(*_: object) -> float:
        raise OwnError(1, 2)

    with pytest.raises(RewardError, match="1 2") as raised:
        judged(check)
    assert type(raised.value) is RewardError


def test_texts_of_a_verdict_are_texts() -> None:
    verdict = judged(lambda *_: Verdict(Outcome.RIGHT, 1.0, answer=Fraction(1, 2)))
    assert verdict == Verdict(Outcome.RIGHT, 1.0, answer="1/2")
