"""Verdicts of verifiers that return anything, raise, hang or end their process."""

import asyncio
import logging
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch

from areal_core.config.groups import EnvironmentConfig
from areal_core.environments import verdicts
from areal_core.environments.verdicts import Failures, IsolatedVerifier, Judge, Verdict
from areal_core.errors import ConfigError, RewardError, RewardTimeoutError, UserCodeError, VerifierError
from areal_core.types import Outcome, Prompt

TASK = Prompt(index=0, prompt_id="0", text="1+\x1b[2J1=", token_ids=(1,), answer="2")
RIGHT, WRONG, FAILED = Outcome.CORRECT, Outcome.INCORRECT, Outcome.FAILED


def judged(verify: Callable[[Prompt, str], Any], text: str = "#3\nareal: error: forged") -> Verdict:
    return asyncio.run(Judge(EnvironmentConfig(verifier="own:check"), verify)(TASK, text, truncated=False))


def raising(error: BaseException) -> Callable[[Prompt, str], Any]:
    def check(*_: object) -> float:
        raise error

    return check


@pytest.mark.parametrize(
    ("found", "outcome", "score"),
    [
        (1, RIGHT, 1.0), (True, RIGHT, 1.0), (0.5, WRONG, 0.5), (np.float32(0.25), WRONG, 0.25),
        (np.float64(1.0), RIGHT, 1.0), (Decimal("0.5"), WRONG, 0.5), (np.bool_(True), RIGHT, 1.0),
        (np.array(0.5), WRONG, 0.5), (torch.tensor(1.0), RIGHT, 1.0), (Verdict(WRONG, np.float32(0.5)), WRONG, 0.5),
        (Verdict("correct", 1), RIGHT, 1.0), (Verdict(FAILED, None), FAILED, None),
    ],
)  # fmt: skip
def test_scores_of_any_kind_become_numbers(found: Any, outcome: Outcome, score: float | None) -> None:
    verdict = judged(lambda *_: found)
    assert (verdict.outcome, verdict.score) == (outcome, score)
    assert verdict.score is None or type(verdict.score) is float


@pytest.mark.parametrize(
    "found",
    [
        2.0, -1, float("nan"), float("inf"), None, "1.0", [1.0], np.ones(2), torch.ones(2), 10**400, {},
        Verdict(RIGHT, 7.0), Verdict("great", 1.0), Verdict("correct", None), Verdict(FAILED, 0.0),
    ],
    ids=str,
)  # fmt: skip
def test_other_scores_are_failures_that_name_the_verifier(found: Any) -> None:
    verdict = judged(lambda *_: found)
    assert (verdict.outcome, verdict.score) == (FAILED, None)
    assert str(verdict.failure).startswith("environment.verifier own:check: ValueError: ")
    assert verdicts.__file__ not in str(verdict.failure)


def test_bug_is_shown_with_place_prompt_and_completion() -> None:
    calls = []

    def check(task: Prompt, text: str) -> float:
        calls.append(text)
        return float({}["anwser"])

    verdict = judged(check)
    assert verdict.outcome is FAILED
    assert len(calls) == 2  # it may have been a passing trouble
    first, *rest = str(verdict.failure).split("\n")
    line = check.__code__.co_firstlineno + 2
    assert first == f"environment.verifier own:check: KeyError: 'anwser' ({__file__}:{line})"
    assert f'      File "{__file__}", line {line}, in check' in rest
    assert rest[-2:] == ["        #3", "        areal: error: forged"]  # no line of its own
    assert all(each.startswith("    ") and each.isprintable() for each in rest)
    assert verdicts.__file__ not in str(verdict.failure)


def test_an_error_that_passes_costs_nothing() -> None:
    left = [OSError("once")]

    def check(*_: object) -> float:
        if left:
            raise left.pop()
        return 1.0

    assert judged(check) == Verdict(RIGHT, 1.0)


@pytest.mark.parametrize("verify_truncated", [True, False])
def test_truncated_completions_are_verified_on_request(verify_truncated: bool) -> None:
    judge = Judge(EnvironmentConfig(verify_truncated=verify_truncated), lambda *_: 1.0)
    assert asyncio.run(judge(TASK, "#2", truncated=True)).score == float(verify_truncated)


class PanicError(BaseException):
    """An error as other languages' extensions raise."""


class MuteError(Exception):
    def __str__(self) -> str:
        raise MuteError


class OwnError(RewardError):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} {two}")


@pytest.mark.parametrize(
    "error", [PanicError("x"), MuteError(), SystemExit(0), KeyboardInterrupt(), ConfigError("x")], ids=repr
)
def test_nothing_that_a_verifier_raises_gets_out(error: BaseException) -> None:
    verdict = judged(raising(error))
    assert verdict.outcome is FAILED
    assert str(verdict.failure).startswith(f"environment.verifier own:check: {type(error).__name__}: ")


def test_what_a_verdict_apart_raises_gets_out() -> None:
    with pytest.raises(OSError, match="no memory"):
        judged(IsolatedVerifier(raising(OSError("no memory to fork"))))


@pytest.mark.parametrize("error", [RewardError("1 2"), OwnError(1, 2)])
def test_a_request_for_another_try_gets_out_as_a_class_of_this_package(error: RewardError) -> None:
    with pytest.raises(RewardError, match="1 2") as raised:
        judged(raising(error))
    assert type(raised.value) is RewardError


FAILURE = "environment.verifier own:check: KeyError: 'anwser' (own.py:4)\n    Traceback\n    completion:"


def outcomes(failed: int = 0, timed_out: int = 0, *, of: int = 8) -> dict[Outcome, int]:
    found = {Outcome.FAILED: failed, Outcome.TIMED_OUT: timed_out, Outcome.CORRECT: of - failed - timed_out}
    return {outcome: count for outcome, count in found.items() if count}


def test_first_failure_is_shown_whole_and_repeats_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    failures = Failures(1.0)
    for group in range(25):
        failures.count_group(outcomes(4), FAILURE.replace("completion:", f"completion {group}:"))
    first, *rest = FAILURE.replace("completion:", "completion 0:").split("\n")
    assert caplog.messages == [first, *rest, f"12 times so far: {first}", f"100 times so far: {first}"]
    assert [record.levelno for record in caplog.records] == [logging.ERROR, *[logging.WARNING] * 4]


@pytest.mark.parametrize("truncated", [0, 7])
def test_verifier_that_always_fails_ends_the_run_at_the_fourth_group(truncated: int) -> None:
    failures = Failures(0.2)
    for _ in range(3):
        failures.count_group({}, FAILURE)
    with pytest.raises(UserCodeError) as ended:
        failures.count_group(outcomes(8 - truncated), FAILURE, truncated=truncated)
    assert str(ended.value) == (
        "environment.verifier own:check: KeyError: 'anwser' (own.py:4): 100% of the rollouts of the last 4 groups have "
        "no result, more than 20%; fix the verifier, or raise environment.max_no_result"
    )


def test_share_of_the_last_32_groups_decides() -> None:
    failures = Failures(0.2)
    for _ in range(9):
        failures.count_failed_attempt(VerifierError(FAILURE))  # one bad prompt at the start
    for group in range(200):
        failures.count_group(outcomes(group % 3 == 0), FAILURE)  # one rollout of 24
    for _ in range(32):
        failures.count_group(outcomes(), None)
    for _ in range(6):
        failures.count_group(outcomes(8), FAILURE)
    with pytest.raises(UserCodeError, match="22% of the rollouts of the last 32 groups"):
        failures.count_group(outcomes(8), FAILURE)


LATE = RewardTimeoutError("own:check: no verdict within 20 s (rollout.reward_timeout_s) (own.py:9)\n    while True")


def test_three_timeouts_before_the_first_verdict_end_the_run() -> None:
    failures = Failures(0.2)
    for _ in range(2):
        failures.count_failed_attempt(LATE)
        failures.count_failed_attempt(RewardError("another"))
        failures.count_group(outcomes(timed_out=8), None)
        failures.count_group({Outcome.INCORRECT: 8}, None, truncated=8)  # which the verifier has not seen
    with pytest.raises(UserCodeError, match=r"own\.py:9\): 3 attempts in a row timed out or killed .*; fix this code"):
        failures.count_failed_attempt(LATE)
    later = Failures(0.2)
    for _ in range(50):
        later.count_group(outcomes(timed_out=1), None)  # answers that hang now and then end nothing
        for _ in range(11):
            later.count_failed_attempt(LATE)
    with pytest.raises(UserCodeError, match="12 attempts in a row"):
        later.count_failed_attempt(LATE)
