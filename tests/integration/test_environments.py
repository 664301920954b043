"""Environments of several turns and sequences train for real, and held-out scores are theirs."""

from __future__ import annotations

import itertools
import re
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from areal_core.config.schema import RunConfig
from areal_core.controller.core.ledger import TrajectoryLedger
from areal_core.environments.environment import EnvContext, Environment, Policy
from areal_core.evaluation.scores import Record, read_records
from areal_core.models.tokenizer import Tokenizer
from areal_core.run.folders import base_model
from areal_core.run.launcher import execute, run_folder
from areal_core.storage.rundir import RunDir
from areal_core.types import GroupSummary, Prompt, Rollout, RunSummary
from tests.support.runs import learning, merged

pytestmark = pytest.mark.slow
NIGHTLY = [pytest.param(name, marks=pytest.mark.nightly) for name in ("two_turn", "calculator")]

STEPS = 3
_STEP = re.compile(r"\d[-+*]\d=(\d);$")


class Compacting(Environment):
    """After a step of working the context is what is left to compute: `1-1-7=` | `1-1=0;`, then `0-7=` | ..."""

    def __init__(self, context: EnvContext) -> None:
        super().__init__(context)
        self._end = context.tokenizer.encode(";")

    async def rollout(self, task: Prompt, policy: Policy) -> Rollout:
        prompt, contexts = task.text, 1
        while True:
            turn = await policy.sample(self.context.tokenizer.encode(prompt), stop=self._end)
            step = _STEP.search(self.context.tokenizer.decode(turn.token_ids.tolist()))
            if step is None or len(prompt) < 5:
                return self.context.scored(await self.context.judge(task, turn), contexts=contexts)
            prompt, contexts = step[1] + prompt[3:], contexts + 1


def trained(state: Path, name: str, **groups: dict[str, Any]) -> tuple[RunConfig, RunDir, RunSummary]:
    fields: dict[str, dict[str, Any]] = {
        "environment": {"name": name},
        "task": {"max_operations": 4, "held_out": 64},
        "rollout": {"retain": "all"},
        "training": {"steps": STEPS},
        "evaluation": {"enabled": True, "every": 1},
    }
    config = learning(state, **merged(fields, groups))
    summary = execute(config, run_id="e", log=lambda line: None)
    return config, run_folder(config, "e"), summary


def summaries(config: RunConfig, run: RunDir) -> list[GroupSummary]:
    ledger = TrajectoryLedger(run.ledger, group_size=config.algorithm.group_size)
    try:
        return [group for step in range(1, config.training.steps + 1) for group in ledger.summaries(step)]
    finally:
        ledger.close()


def held_out(run: RunDir, version: int) -> list[Record]:
    [file] = run.evaluations.glob(f"v{version:06d}-*[0-9a-f].jsonl")
    return read_records(file)


def curve(run: RunDir, key: str) -> dict[int, float]:
    """Its points by step."""
    with sqlite3.connect(run.outbox) as outbox:
        return dict(outbox.execute("SELECT step, value FROM metrics WHERE key = ?", [key]).fetchall())


@pytest.mark.parametrize("environment", [f"{__name__}:Compacting", *NIGHTLY])
def test_several_turns_and_sequences_are_trained_on_and_every_token_is_counted(
    tmp_path: Path, environment: str
) -> None:
    config, run, summary = trained(tmp_path, environment)
    assert summary.tokens.balanced
    assert summary.tokens.allowance == 0
    groups = summaries(config, run)
    turns = [count for group in groups for count in group.metrics["rollout/turns"]]
    assert max(turns) > 1
    means = {step + 1: sum(turns[16 * step : 16 * step + 16]) / 16 for step in range(STEPS)}
    assert curve(run, "rollout/turns") == pytest.approx(means)
    several = [len(group.lengths) > len(group.rewards) for group in groups]
    assert any(several) == environment.endswith("Compacting")
    # Every sampled token is trained on, in one sequence; the environments' own are not.
    assert sum(sum(group.loss_tokens) for group in groups) == summary.tokens.consumed
    assert any(value != 0 for value in curve(run, "loss/policy").values())


def test_held_out_scores_with_a_tool_are_a_direct_count(tmp_path: Path) -> None:
    """The text of each greedy rollout ends with its answer, whoever wrote the steps before it."""
    _, run, _ = trained(tmp_path, "calculator")
    scores = curve(run, "heldout/accuracy")
    assert len(scores) >= 2
    for version, accuracy in scores.items():
        records = held_out(run, version)
        right = [record.greedy.text.endswith(f"#{record.gold}") for record in records]
        assert accuracy == sum(right) / len(right)
        calls = [record.greedy.metrics["environment/calls"] for record in records]
        assert curve(run, "heldout/environment/calls")[version] == pytest.approx(sum(calls) / len(calls))


class Chains:
    """The same 64 prompts to train on and to be scored on."""

    def __init__(self, config: RunConfig, tokenizer: Tokenizer) -> None:
        chains = itertools.product(range(8), "+-", range(4))
        self._prompts = [
            Prompt(
                index=index,
                prompt_id=f"{index:x}",
                text=(text := f"{a}{sign}{b}="),
                token_ids=tokenizer.encode(text),
                answer=str((a + b if sign == "+" else a - b) % 10),
            )
            for index, (a, sign, b) in enumerate(chains)
        ]

    def prompt(self, index: int) -> Prompt:
        return self._prompts[index % len(self._prompts)]

    def held_out(self) -> list[Prompt]:
        return self._prompts


def test_training_reward_and_held_out_score_of_one_version_agree(tmp_path: Path) -> None:
    """The same prompts are trained on and held out, by two turns; the learning rate changes nothing. 1,024 rollouts of
    64 prompts on either side: the standard error of the difference is .02 at most."""
    folder = base_model(learning(tmp_path, task={"max_operations": 1}), lambda line: None)
    config, run, _ = trained(
        tmp_path,
        "two_turn",
        model={"path": str(folder)},
        task={"name": f"{__name__}:Chains", "max_new_tokens": 24},
        environment={"verifier": "exact_match", "retry_score": 1.0},
        algorithm={"group_size": 8},
        rollout={"batch_size": 512},
        training={"steps": 2, "learning_rate": 1e-12, "microbatch_tokens": 4096},
        evaluation={"enabled": True, "samples": 16, "every": 2},
    )
    rewards = [reward for group in summaries(config, run) for reward in group.rewards if reward is not None]
    assert len(rewards) == 1024
    samples = [sample for record in held_out(run, 0) for sample in record.samples]
    second_tries = sum("=" in sample.text for sample in samples) / len(samples)
    assert second_tries > 0.2
    trained_on = sum(rewards) / len(rewards)
    scored = sum(sample.correct for sample in samples) / len(samples)
    first = sum(sample.correct and "=" not in sample.text for sample in samples) / len(samples)
    assert trained_on == pytest.approx(scored, abs=0.03)
    assert scored - first > 0.03, "first tries alone would be another score"
