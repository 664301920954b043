import json
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from areal_core.environments.mathematics import balanced, compared, conclusion, gold_answer, normalised

CASES = Path(__file__).parents[3] / "benchmarks" / "math_cases.jsonl"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{1}, no: \boxed{\frac{1}{2}}. #### 3", r"\frac{1}{2}"),
        (r"\boxed 7 is it", "7"),
        (r"\boxed{\frac{1}{2}", ""),  # it was cut off
        ("16 - 3 = 13\n#### 1,300 \nthat is all", "1,300"),
        ("First I thought the answer is 3. Now the answer is: 4 apples, of 9.", "4 apples"),
        ("The final answer is $x = 3$ or $x = 5$, as $1 = 1$.", "x = 3, x = 5"),
        ("The answer is 50 percent", "50 percent"),
        ("The answer is $50$ percent", "50 percent"),
        ("**Answer:** east", "east"),
        (r"We get \(a+b\), then \[ \sqrt{2} \] which is right", r"\sqrt{2}"),
        ("with $x^2$ this makes 7 or so", "7"),
        ("She has $2.50 left", "$2.50"),
        ("(1, 2)", "(1, 2)"),
        ("1+1=2#3", "3"),
        (r"4.5\times 10^{33}", r"4.5\times 10^{33}"),
        ("The answer is 3 or 4", "3 or 4"),
        ("The answer is either 3 or 4.", "either 3 or 4"),
        ("so $3$ or $4$", "3, 4"),
        (r"\boxed{3} or \boxed{4}", "3, 4"),
        (r"\boxed3", "3"),
        ("The answer is (B) because 7 is prime.", "B"),
        ("\u7b54\u6848\uff1a12", "12"),
        ("<answer>x</answer>", "x"),
        (r"<think>\boxed{3}</think> It is 4.", "4."),
        ("I do not know", None),
        ("", None),
    ],
)
def test_conclusion(text, answer):
    assert conclusion(text) == answer


@pytest.mark.parametrize(
    ("field", "answer"),
    [
        ("she has 3\n#### 2,125", "2,125"),
        (r"thus $\boxed{\pi}$", r"\pi"),
        ("east", "east"),
        ("27.0", "27.0"),
        ("a long way\nto 5", "5"),
        ("a long way\nto nowhere", None),
        ("", None),
    ],
)
def test_gold_answer(field, answer):
    assert gold_answer(field) == answer


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("27", "27.0"),
        ("1500", "1,500"),
        ("1500", r"1{,}500"),
        ("3/4", r"\dfrac{3}{4}"),
        (r"\frac{3}{4}", ".75"),
        ("0.75", r"\frac34"),
        ("-3/2", "-1 1/2"),
        ("-7/3", r"-2\frac{1}{3}"),
        ("4.5e33", r"4.5 \times 10^{33}"),
        ("1e-5", "10^{-5}"),
        ("1/3", "0.333333"),
        ("5", "x = 5"),
        ("x = 5", "5"),
        ("42", "17 + 25 = 42"),
        ("18", "$18"),
        ("18", r"18\text{ cm}^2"),
        ("18", "18 km/h"),
        ("30", r"30^\circ"),
        ("50", "50%"),
        (r"50\%", "1/2"),
        ("(1,2)", r"\left( 1, 2 \right)"),
        ("1, 2", r"\{2, 1\}"),
        ("1 and 2", "2, 1"),
        ("[0, 1)", r"[0,\tfrac{2}{2})"),
        (r"(-\infty, 2) \cup (3, 4)", r"(3,4)\cup(-\infty,2)"),
        ("Evelyn", r"\text{evelyn}"),
        (r"2\pi r^{2}", r"2 \pi r^2"),
    ],
)
def test_equal(gold, answer):
    assert compared(gold, answer) is True


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        (r"\frac{3}{4}", "4"),
        (r"\frac{3}{4}", r"\frac{4}{3}"),
        ("(1,2)", "12"),
        ("(1,2)", "(2,1)"),
        ("(1,2)", "[1,2]"),
        ("(1,2)", "(1,2,3)"),
        (r"\{1,2\}", r"\{1,1\}"),
        ("4.5e33", "33"),
        ("1.6e-9", "0"),
        ("1/3", "0.33"),  # it is too short to stand for a third
        ("0.333333", "0.333334"),
        ("1234567", "1234568"),
        ("27", "-27"),
        ("7", "7, 8"),
        ("SRAC=LRAC", "LRAC"),
    ],
)
def test_different(gold, answer):
    assert compared(gold, answer) is False


@pytest.mark.parametrize(
    ("gold", "answers"),
    [
        (r"\frac{MV}{m}", ("VM/m",)),
        (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", (r"\begin{bmatrix}1&2\\3&4\end{bmatrix}", "[[1,2],[3,4]]")),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", ("(1,2)", r"A=\begin{pmatrix}1\\2\end{pmatrix}")),
        (r"7,\!415", ("7415", "7{,}415", "7 415", r"7\,415")),
        ("5 km", ("5000 m", "5", r"5000\text{ meters}")),
        (r"60\text{ km/h}", ("1 km/min", r"60\text{ kilometers per hour}")),
        (r"\$3.50", ("3.5", r"350\text{ cents}")),
        (r"3\text{ million}", ("3,000,000",)),
        (r"90^\circ", ("90", r"\frac{\pi}{2}", "90 degrees")),
        ("3", ("1+2=3", "n=3", "3=x", "AB=3", r"\lim_{n\to\infty}a_n=3", r"\text{Area}=3\text{ cm}^2")),
        (r"\sqrt{2}", (r"\sqrt{2}\approx 1.41", r"x=\frac{2}{\sqrt{2}}=\sqrt{2}")),
        ("2x+3y=6", ("4x+6y=12", "2x+3y-6=0")),
        ("y=2x+1", ("1+2x", "y-2x=1")),
        ("1011_2", (r"1011_{2}", "1011")),
        ("(2,5)", ("]2,5[", "2<x<5", "5>x>2", r"\{x \mid 2<x<5\}", "x>2, x<5")),
        (r"(-\infty,0)\cup(1,\infty)", ("x<0 or x>1",)),
        (r"\mathbb{R}", ("All real numbers", r"(-\infty,+\infty)")),
        (r"x\neq 3", (r"\mathbb{R}\setminus\{3\}",)),
        ("B", ("(B) 7", r"\text{Option B}", "B.")),
        (r"\frac{1}{6}", (r"0.1\overline{6}", "0.1(6)", r"0.1\dot{6}")),
        ("3,-3", (r"\pm 3", r"x=\pm 3")),
        (r"\emptyset", (r"\varnothing", r"\{\}")),
        ("2.5", (r"\approx 2.5", r"\color{blue}{2.5}", r"\underline{2.5}", r"\large 2.5", "\u00bd\u00d75", "2\u00bd")),
        ("23", ("\uff12\uff13",)),
        ("x^2", ("x\u00b2",)),
        ("1:2", ("2:4",)),
        ("10:30 am", ("10:30 a.m.",)),
    ],
)
def test_spellings_of_the_same(gold, answers):
    assert [answer for answer in answers if not compared(gold, answer)] == []


@pytest.mark.parametrize(
    ("gold", "answers"),
    [
        (r"\frac{MV}{m}", ("V", r"\frac{mv}{M}")),
        (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", (r"\begin{pmatrix} 1 & 3 \\ 2 & 4 \end{pmatrix}", "1,2,3,4")),
        (r"\begin{pmatrix} 1 \\ -2 \end{pmatrix}", (r"\begin{pmatrix} -1 \end{pmatrix}", "-1")),
        (r"7,\!415", ("415, 7", "(7,415)")),
        ("34", ("3 4", "3, 4")),
        (
            "3",
            ("3 million", "3 factorial", "3 (or 4)", "3, 4, 5", "3 x", "3 i", "3/4/5", "2=3", "x=4=3", "x-3=0", "3..."),
        ),
        (
            "3",
            (r"3\text{ is wrong}", r"\text{not }x=3", "x>3", r"4\to 3", r"4\approx 3", "x=3, x=4", r"\{3,4\}", "0:0"),
        ),
        ("5 hours", ("5 minutes", "300")),
        ("7.6 Z", ("7.6",)),
        ("0.5", (r"0.5\%",)),
        ("0", ("x-3=0", r"\text{no solution}")),
        ("x^2+y^2=4", ("4", "x^2+y^2=2")),
        ("4", ("x^2+y^2=4", "2x=4")),
        (r"\{1,2\}", ("x=2,y=1",)),
        ("1011_2", ("1011_3", "11")),
        ("x<3", ("3", r"x\leq 3", "x>3", "y<3")),
        ("10:30", ("10.5", "10:31", "20:60")),
        ("B", ("(B) or (C)", "A, B", "b", "not B")),
        (r"1\pm\sqrt{2}", (r"1+\sqrt{2}",)),
        ("HHT", ("HTH",)),
        ("We can not say.", ("3", "x")),
        ("1", ("1e999999999", "9" * 10_000, "1/0")),
    ],
)
def test_hedges_and_other_answers_are_wrong(gold, answers):
    assert [answer for answer in answers if compared(gold, answer)] == []


def test_the_benchmarks_cases_have_their_verdicts():
    wrong = [
        case
        for line in CASES.read_text(encoding="utf-8").splitlines()
        if (gold := gold_answer(str((case := json.loads(line))["gold"])))
        and compared(gold, conclusion(case["completion"]) or "?") != case["expected"]
    ]
    assert wrong == []


def test_balanced():
    assert all(balanced(text) for text in ("", "(a)", "[0, 1)", r"\frac{1}{(2)}"))
    assert not any(balanced(text) for text in ("(a", "a)", "}{", "{(}", "(" * 61 + ")" * 61))


def test_one_spelling():
    assert normalised(r"$\left(\dfrac12,\ x \le 3\right)$.") == r"(\frac12, x \leq 3)"


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
