import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from areal_core.environments.mathematics import balanced, compared, conclusion, gold_answer, normalised


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{1}, no: \boxed{\frac{1}{2}}. #### 3", r"\frac{1}{2}"),
        (r"\boxed 7 is it", "7"),
        (r"\boxed{\frac{1}{2}", ""),  # it was cut off
        ("16 - 3 = 13\n#### 1,300 \nthat is all", "1,300"),
        ("First I thought the answer is 3. Now the answer is: 4 apples, of 9.", "4"),
        ("The final answer is $x = 3$ or $x = 5$, as $1 = 1$.", "x = 3, x = 5"),
        ("The answer is 50 percent", "50"),
        ("The answer is $50$ percent", "50%"),
        ("**Answer:** east", "east"),
        (r"We get \(a+b\), then \[ \sqrt{2} \] which is right", r"\sqrt{2}"),
        ("with $x^2$ this makes 7 or so", "7"),
        ("She has $2.50 left", "$2.50"),
        ("(1, 2)", "(1, 2)"),
        ("1+1=2#3", "3"),
        (r"4.5\times 10^{33}", r"4.5\times 10^{33}"),
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
    ("gold", "answer"),
    [
        (r"3\sqrt{2}", "2"),
        (r"\sqrt{8}", r"2\sqrt{2}"),
        ("7.6 Z", "7.6"),  # Z is a symbol
        ("5", "3x"),
        ("(1, x)", "(1, 2x/2)"),
        ("1", "1e999999999"),  # and is not computed
        ("1", "9" * 10_000),
        ("1", "1/0"),
    ],
)
def test_left_to_algebra(gold, answer):
    assert compared(gold, answer) is None


def test_a_part_that_differs_decides_whatever_algebra_says_of_the_others():
    assert compared("(1, x)", "(2, y)") is False


def test_balanced():
    assert all(balanced(text) for text in ("", "(a)", "[0, 1)", r"\frac{1}{(2)}"))
    assert not any(balanced(text) for text in ("(a", "a)", "}{", "{(}", "(" * 61 + ")" * 61))


def test_one_spelling():
    assert normalised(r"$\left(\dfrac12,\ x \le 3\right)$.") == r"(\frac{1}{2}, x \leq 3)"


TOKENS = r"$ \boxed{ } { ( ) [ ] , #### \frac 1 -2 .5 1e9 x % = \{ \} \cup \text{cm} ^ / and 10^ \left \pi € 0"
PIECES = [*TOKENS.split(), " ", "\n", "The answer is "]


@given(gold=st.lists(st.sampled_from(PIECES), max_size=12), text=st.lists(st.sampled_from(PIECES), max_size=12))
@example(gold=["1"], text=["$"])
def test_whatever_is_written_has_a_verdict(gold, text):
    """And what is equal to something is equal to itself."""
    expected, answer = "".join(gold), conclusion("".join(text))
    if answer is not None:
        assert compared(expected, answer) in (True, False, None)
        assert compared(answer, answer) is True
