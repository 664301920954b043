"""Verdicts in a process of their own."""

from __future__ import annotations

import asyncio
import ctypes
import time
from dataclasses import replace

import pytest

from areal_core.config.schema import EnvironmentConfig, RunConfig, load
from areal_core.environments.verdicts import Verdict
from areal_core.errors import ConfigError, RewardError, RewardTimeoutError, VerifierError
from areal_core.rewards.worker import judged_apart, outcome_apart
from areal_core.types import Outcome, Prompt

PROMPT = Prompt(index=0, prompt_id="0", text="1+1=", token_ids=(1,), answer="2")
CONFIG = load({"environment": {"verifier": f"{__name__}:verify"}, "rollout": {"reward_timeout_s": 1.0}})


def verify(task: Prompt, text: str) -> Verdict:
    if text == "hang":
        time.sleep(60)
    if text == "die":
        ctypes.string_at(0)
    if text == "again":
        raise RewardError("again")
    if text == "print":
        print("no outcome")
    if text == "loop":
        asyncio.run(asyncio.sleep(0))
    return Verdict.of(Outcome.CORRECT, text)


def outcome(text: str, config: RunConfig = CONFIG) -> Verdict:
    return outcome_apart(config, PROMPT, text)


def test_verdicts_are_those_of_the_verifier() -> None:
    assert outcome("print") == Verdict.of(Outcome.CORRECT, "print")
    with pytest.raises(RewardError, match="again"):
        outcome("again")
    assert "asyncio.run() cannot be called from a running event loop" in str(outcome("loop").failure)


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        ("hang", RewardTimeoutError, r"no verdict within 1 s .*test_apart.py:\d+\)\n[^\x00]*time.sleep\(60\)"),
        ("die", VerifierError, "it ended its process, with status -11"),
    ],
)
def test_answer_that_costs_its_process_is_incorrect(text: str, error: type[RewardError], said: str) -> None:
    with pytest.raises(error, match=f"^environment.verifier {CONFIG.environment.verifier}: {said}"):
        outcome(text)
    verdict = judged_apart(CONFIG, PROMPT, text)
    assert (verdict.outcome, verdict.score) == (Outcome.TIMED_OUT, 0.0)
    assert f"completion:\n        {text}" in str(verdict.failure)


def test_module_that_can_not_be_imported_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^environment\.verifier: nowhere:verify can't be imported"):
        outcome("1", replace(CONFIG, environment=EnvironmentConfig(verifier="nowhere:verify")))
