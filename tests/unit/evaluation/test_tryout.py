"""What samples of the base model tell about a run: obstacles to learning, with the field to change."""

from __future__ import annotations

import pytest

from areal_core.config.schema import load
from areal_core.evaluation.scores import Record
from areal_core.evaluation.tryout import judge
from areal_core.types import Outcome, Sample

CONFIG = load({"environment": {"max_no_result": 0.2}, "task": {"max_new_tokens": 40}})


def sample(score: float | None, *, truncated: bool = False) -> Sample:
    outcome = Outcome.FAILED if score is None else Outcome.CORRECT if score == 1 else Outcome.INCORRECT
    return Sample(text="", tokens=4, truncated=truncated, outcome=outcome, score=score, answer=None)


def records(*groups: list[Sample]) -> list[Record]:
    fields = {"prompt": "", "gold": "", "greedy": sample(0.0)}
    return [
        Record(problem=place, prompt_id=str(place), samples=tuple(group), **fields)  # type: ignore[arg-type]
        for place, group in enumerate(groups)
    ]


def test_figures_are_over_sampled_rollouts_and_groups() -> None:
    found = judge(records([sample(1.0), sample(0.0, truncated=True)], [sample(0.5), sample(None)]))
    assert (found.groups, found.rollouts, found.tokens_mean) == (2, 4, 4)
    assert (found.truncated, found.no_result, found.correct, found.zero_variance) == (0.25, 0.25, 0.25, 0.5)
    assert (found.reward_mean, found.reward_spread) == (0.5, pytest.approx(0.408, abs=1e-3))


MIXED, RIGHT, WRONG = [sample(1.0), sample(0.0)], [sample(1.0)] * 2, [sample(0.0)] * 2


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ([MIXED] * 4, []),
        ([RIGHT] * 4, [(True, "environment.verifier: all rewards are equal in 100% of groups, and 100% of the")]),
        ([RIGHT] * 3 + [MIXED], [(False, "environment.verifier: all rewards are equal in 75% of groups, and 88% of")]),
        ([WRONG] * 4, [(True, "task: all rewards are equal in 100% of groups, and 0% of rollouts are correct;")]),
        (
            [[sample(0.0, truncated=True)] * 2] * 4,
            [(True, "task.max_new_tokens: 100% of the rollouts are truncated at 40 tokens; raise it")],
        ),
        (
            [[sample(None), sample(1.0)], [sample(None), sample(0.0)]],
            [
                (True, "environment.verifier: the verifier has no result for 50% of the rollouts; fix it"),
                (True, "task: all rewards are equal in 100% of groups, and 25% of rollouts are correct"),
            ],
        ),
    ],
)
def test_obstacles_name_the_field_to_change(groups: list[list[Sample]], said: list[tuple[bool, str]]) -> None:
    found = judge(records(*groups)).problems(CONFIG)
    assert [fatal for fatal, _ in found] == [fatal for fatal, _ in said]
    assert all(text.startswith(start) for (_, text), (_, start) in zip(found, said, strict=True))
