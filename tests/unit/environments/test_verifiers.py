import pytest

from areal_core.config.schema import TaskConfig
from areal_core.environments.verifiers import exact_match, same_number, verifier


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("1-1=0;0-7=3#3", True),
        ("#3", True),
        ("#4#3", True),
        ("#3#4", False),
        ("#33", False),
        ("#", False),
        ("3", False),
        ("", False),
        ("#3#", False),
    ],
)
def test_exact_match_looks_at_what_follows_the_last_mark(answer, right):
    assert exact_match(answer, "3") is right


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        ("so there are 18 eggs.\n#### 18", "18", True),
        ("\\boxed{1,500}", "1500", True),
        ("27.0", "27", True),
        ("it is 27", "27.5", False),
        ("18 at first, then 19", "18", False),
        ("-7", "7", False),
        ("no idea", "18", False),
    ],
)
def test_same_number(answer, gold, right):
    assert same_number(answer, gold) is right


def test_each_task_has_its_verifier():
    assert verifier(TaskConfig(name="arithmetic")) is exact_match
    assert verifier(TaskConfig(name="jsonl")) is same_number
