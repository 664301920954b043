import pytest

from areal_core.environments.verifiers import exact_match, same_number
from areal_core.types import Prompt


def task(gold: str) -> Prompt:
    return Prompt(index=0, prompt_id="0", text="?", token_ids=(1,), answer=gold)


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("1-1=0;0-7=3#3", 1.0),
        ("#3", 1.0),
        ("#4#3", 1.0),
        ("#3#4", 0.0),
        ("#33", 0.0),
        ("#", 0.0),
        ("3", 0.0),
        ("", 0.0),
        ("#3#", 0.0),
    ],
)
def test_exact_match_looks_at_what_follows_the_last_mark(completion, score):
    assert exact_match(task("3"), completion) == score


@pytest.mark.parametrize(
    ("completion", "gold", "score"),
    [
        ("so there are 18 eggs.\n#### 18", "18", 1.0),
        ("\\boxed{1,500}", "1500", 1.0),
        ("27.0", "27", 1.0),
        ("it is 27", "27.5", 0.0),
        ("18 at first, then 19", "18", 0.0),
        ("-7", "7", 0.0),
        ("no idea", "18", 0.0),
    ],
)
def test_same_number(completion, gold, score):
    assert same_number(task(gold), completion) == score
