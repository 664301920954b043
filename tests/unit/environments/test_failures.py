"""Rollouts without a result: shown once, counted, and too many end the run."""

from __future__ import annotations

import logging

import pytest

from areal_core.environments.failures import Failures
from areal_core.errors import RewardError, RewardTimeoutError, UserCodeError, VerifierError
from areal_core.types import Outcome

FAILURE = "environment.verifier own:check: KeyError: 'anwser' (own.py:4)\n    Traceback\n    completion:"


def outcomes(failed: int = 0, timed_out: int = 0, *, of: int = 8) -> dict[Outcome, int]:
    found = {Outcome.FAILED: failed, Outcome.TIMED_OUT: timed_out, Outcome.CORRECT: of - failed - timed_out}
    return {outcome: count for outcome, count in found.items() if count}


def test_first_failure_is_shown_whole_and_repeats_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    failures = Failures(1.0)
    for group in range(25):
        failures.settled(outcomes(4), FAILURE.replace("completion:", f"completion {group}:"))
    first, *rest = FAILURE.replace("completion:", "completion 0:").split("\n")
    assert caplog.messages == [first, *rest, f"12 times so far: {first}", f"100 times so far: {first}"]
    assert [record.levelno for record in caplog.records] == [logging.ERROR, *[logging.WARNING] * 4]


def test_verifier_that_always_fails_ends_the_run_at_the_fourth_group() -> None:
    failures = Failures(0.2)
    for _ in range(3):
        failures.settled({}, FAILURE)
    with pytest.raises(UserCodeError) as ended:
        failures.settled(outcomes(8), FAILURE)
    assert str(ended.value) == (
        "environment.verifier own:check: KeyError: 'anwser' (own.py:4): 100% of the rollouts of the last 4 groups have "
        "no result, more than 20%; fix the verifier, or raise environment.max_no_result"
    )


def test_share_of_the_last_32_groups_decides() -> None:
    failures = Failures(0.2)
    for _ in range(9):
        failures.failed_try(VerifierError(FAILURE))  # one bad prompt at the start
    for group in range(200):
        failures.settled(outcomes(group % 3 == 0), FAILURE)  # one rollout of 24
    for _ in range(32):
        failures.settled(outcomes(), None)
    for _ in range(6):
        failures.settled(outcomes(8), FAILURE)
    with pytest.raises(UserCodeError, match="22% of the rollouts of the last 32 groups"):
        failures.settled(outcomes(8), FAILURE)


LATE = RewardTimeoutError("own:check: no verdict within 20 s (rollout.reward_timeout_s) (own.py:9)\n    while True")


def test_three_timeouts_before_the_first_verdict_end_the_run() -> None:
    failures = Failures(0.2)
    for _ in range(2):
        failures.failed_try(LATE)
        failures.failed_try(RewardError("another"))
        failures.settled(outcomes(timed_out=8), None)
        failures.settled({Outcome.INCORRECT: 8}, None, truncated=8)  # which the verifier has not seen
    with pytest.raises(UserCodeError, match=r"own\.py:9\): 3 tries in a row failed this way; the run ends$"):
        failures.failed_try(LATE)
    later = Failures(0.2)
    for _ in range(50):
        later.settled(outcomes(timed_out=1), None)  # answers that hang now and then end nothing
        for _ in range(11):
            later.failed_try(LATE)
    with pytest.raises(UserCodeError, match="12 tries in a row"):
        later.failed_try(LATE)


def test_truncated_completions_do_not_hide_a_bug() -> None:
    failures = Failures(0.2)
    mixed = {Outcome.FAILED: 1, Outcome.INCORRECT: 7}
    for _ in range(3):
        failures.settled(mixed, FAILURE, truncated=7)
    with pytest.raises(UserCodeError, match="100% of the rollouts of the last 4 groups"):
        failures.settled(mixed, FAILURE, truncated=7)
