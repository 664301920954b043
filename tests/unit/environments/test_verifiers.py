import pytest

from areal_core.environments.verifiers import exact_match, mathematics
from areal_core.types import Outcome, Prompt


def task(gold: str) -> Prompt:
    return Prompt(index=0, prompt_id="0", text="?", token_ids=(1,), answer=gold)


@pytest.mark.parametrize(
    ("completion", "score"),
    [("1-1=0;0-7=3#3", 1.0), ("#4#3", 1.0), ("#3#4", 0.0), ("3", 0.0), ("#3#", 0.0)],
)
def test_exact_match_looks_at_what_follows_the_last_mark(completion, score):
    assert exact_match(task("3"), completion) == score


@pytest.mark.parametrize(
    ("completion", "gold", "outcome"),
    [
        ("so there are 18 eggs.\n#### 18", "18", Outcome.CORRECT),
        ("no idea", "18", Outcome.NO_ANSWER),
        ("\\boxed{\\frac{1}{2}", "1/2", Outcome.UNPARSABLE),
        ("\\boxed{" + "x" * 601 + "}", "1", Outcome.UNPARSABLE),
        ("\\boxed{\\sqrt{8}}", "2\\sqrt{2}", Outcome.CORRECT),
        ("\\boxed{2}", "3\\sqrt{2}", Outcome.INCORRECT),
    ],
)
def test_mathematics(completion, gold, outcome):
    verdict = mathematics(task(gold), completion)
    assert verdict.outcome is outcome
    assert verdict.score == (1.0 if outcome is Outcome.CORRECT else 0.0)
