import json
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from areal_core.environments.mathematics import balanced, compared, conclusion, gold_answer, normalised
from tests.support.cases import equality_cases

CASES = Path(__file__).parents[3] / "benchmarks" / "math_cases.jsonl"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{1}, no: \boxed{\frac{1}{2}}. #### 3", r"\frac{1}{2}"),
        (r"\boxed{\frac{1}{2}", ""),
        ("16 - 3 = 13\n#### 1,300 \nthat is all", "1,300"),
        ("The final answer is $x = 3$ or $x = 5$, as $1 = 1$.", "x = 3, x = 5"),
        (r"We get \(a+b\), then \[ \sqrt{2} \] which is right", r"\sqrt{2}"),
        ("The answer is 3 or 4", "3 or 4"),
        ("so $3$ or $4$", "3, 4"),
        ("\u7b54\u6848\uff1a12", "12"),
        (r"<think>\boxed{3}</think> It is 4.", "4."),
        ("I do not know", None),
    ],
)
def test_conclusion(text, answer):
    assert conclusion(text) == answer


def test_answers_are_compared_by_value() -> None:
    cases = equality_cases("mathematics.txt")
    assert [case for case in cases if compared(*case[:2]) is not case[2]] == []


def test_the_benchmarks_cases_have_their_verdicts():
    wrong = [
        case
        for line in CASES.read_text(encoding="utf-8").splitlines()
        if (gold := gold_answer(str((case := json.loads(line))["gold"])))
        and compared(gold, conclusion(case["completion"]) or "?") != case["expected"]
    ]
    assert wrong == []


def test_answers_are_normalised():
    assert normalised(r"$\left(\dfrac12,\ x \le 3\right)$.") == r"(\frac12, x \leq 3)"
    assert all(balanced(text) for text in ("", "(a)", "[0, 1)", r"\frac{1}{(2)}"))
    assert not any(balanced(text) for text in ("(a", "a)", "}{", "{(}", "(" * 61 + ")" * 61))


TOKENS = r"$ \boxed{ } { ( ) [ ] , #### \frac 1 -2 .5 1e9 x % = \{ \} \cup \text{cm} ^ / and 10^ \left \pi € 0"
PIECES = [*TOKENS.split(), " ", "\n", "The answer is "]


@given(gold=st.lists(st.sampled_from(PIECES), max_size=12), text=st.lists(st.sampled_from(PIECES), max_size=12))
@example(gold=["1"], text=["$"])
def test_whatever_is_written_has_a_verdict(gold, text):
    """And what is equal to something is equal to itself."""
    expected, answer = "".join(gold), conclusion("".join(text))
    if answer is not None:
        assert compared(expected, answer) in (True, False)
        assert compared(answer, answer) is True
