"""Judge samples of the base model before training: can a run learn from them?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, pstdev

from areal_core.config.schema import RunConfig
from areal_core.evaluation.scores import Record

_MOST = 0.95  # share of groups or completions above which learning is hopeless
_MANY = 0.5  # share above which it is slow


@dataclass(frozen=True, kw_only=True)
class Tryout:
    """Figures of P groups of G sampled rollouts."""

    groups: int  # P
    rollouts: int  # P G
    truncated: float  # share of rollouts that reached the length limit
    no_result: float  # share of rollouts that the verifier could not judge
    correct: float  # share of rollouts with outcome correct
    reward_mean: float  # over rollouts with a result; 0 without any
    reward_spread: float  # their standard deviation
    zero_variance: float  # share of groups whose rewards are all equal: they teach nothing
    tokens_mean: float  # sampled tokens of a rollout

    def rows(self) -> list[tuple[str, str]]:
        """Names and values as text."""
        return [
            ("sampled", f"{self.groups} prompts, {self.rollouts} rollouts of {self.tokens_mean:.0f} tokens on average"),
            ("truncated", f"{self.truncated:.0%}"),
            ("no result", f"{self.no_result:.0%}"),
            ("correct", f"{self.correct:.0%}"),
            ("reward", f"mean {self.reward_mean:.3f}, standard deviation {self.reward_spread:.3f}"),
            ("zero-variance groups", f"{self.zero_variance:.0%}"),
        ]

    def problems(self, config: RunConfig) -> list[tuple[bool, str]]:
        """Obstacles to learning, worst first. True: it is impossible. Each names the field to change."""
        its, found = config.task, list[tuple[bool, str]]()
        if self.no_result > config.environment.max_no_result:
            verifier = f"the verifier has no result for {self.no_result:.0%} of the rollouts"
            found.append((True, f"environment.verifier: {verifier}; fix it, or choose another"))
        if self.truncated > _MANY:
            limit = f"{self.truncated:.0%} of the rollouts are truncated at {its.max_new_tokens} tokens"
            found.append((self.truncated > _MOST, f"task.max_new_tokens: {limit}; raise it"))
        if self.zero_variance > _MANY:
            fatal, share = self.zero_variance > _MOST, f"all rewards are equal in {self.zero_variance:.0%} of groups"
            if self.correct > 1 - _MANY:
                said = f"{share}, and {self.correct:.0%} of the rollouts are correct"
                found.append((fatal, f"environment.verifier: {said}; check the verifier, or choose harder prompts"))
            elif not fatal or self.truncated <= _MOST:
                advice = (
                    "choose easier prompts (task), a larger algorithm.group_size, or a verifier with partial credit"
                )
                found.append((fatal, f"task: {share}, and {self.correct:.0%} of rollouts are correct; {advice}"))
        return sorted(found, key=lambda each: not each[0])


def judge(records: Sequence[Record]) -> Tryout:
    """Compute the figures of sampled rollouts; `records` has one group per prompt. Greedy rollouts do not count."""
    groups = [record.samples for record in records]
    samples = [sample for group in groups for sample in group]
    rewards = [sample.score for sample in samples if sample.score is not None]
    compared = [{sample.score for sample in group} - {None} for group in groups]
    return Tryout(
        groups=len(groups),
        rollouts=len(samples),
        truncated=mean(sample.truncated for sample in samples),
        no_result=1 - len(rewards) / len(samples),
        correct=mean(sample.correct for sample in samples),
        reward_mean=mean(rewards) if rewards else 0.0,
        reward_spread=pstdev(rewards) if rewards else 0.0,
        zero_variance=mean(len(scores) < 2 for scores in compared),
        tokens_mean=mean(sample.tokens for sample in samples),
    )
