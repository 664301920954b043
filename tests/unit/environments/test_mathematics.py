import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from areal_core.environments.algebra import equal
from areal_core.environments.mathematics import compared, conclusion, gold_answer, normalised, number
from areal_core.environments.procedural import reading
from areal_core.environments.programs import last_block
from areal_core.environments.registry import exact_match, mathematics
from areal_core.types import Outcome, Prompt
from tests.support.cases import equality_cases


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


def test_formulas_are_compared_by_value() -> None:
    cases = equality_cases("formulas.txt")
    assert [case for case in cases if {equal(*case[:2]), equal(*case[1::-1])} != {case[2]}] == []


@pytest.mark.parametrize(
    "hostile",
    [
        "9^{9^{9^{9}}}", "1000000!", "3000000!!", "(((99^{99})^{99})^{99})^{99}", r"\binom{100000000}{50000000}",
        "e^{e^{e^{9}}}", r"\sinh(10^{9})", "(" * 200 + "x" + ")" * 200, "x^{" * 99 + "x" + "}" * 99,
        r"\sum_{n=1}^{10000000} \frac{1}{n}", "(99^{9999}/7)^{x}+" * 40 + "1", "9" * 5000, "-" * 599 + "x",
    ],
)  # fmt: skip
def test_hostile_formulas_are_refused(hostile):
    assert not equal(r"x+\sqrt{2}", hostile)
    assert not equal(hostile, hostile + "+1")


def test_threads_do_not_share_a_precision():
    pairs = [(r"\sqrt{2}", rf"\sqrt{{2}}+10^{{-{digits}}}") for digits in (3, 600)] * 40
    found = []
    threads = [threading.Thread(target=lambda pair=pair: found.append(equal(*pair))) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [False] * len(pairs)


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


LONGER = 8
TRIALS = 3  # of microseconds: the machine may disturb one of them, and what is not linear shows in all
ATOMS = (
    "<answer>", "</answer>", "```", "``` ", "```\n", " ", "\n", "\n ", "\t", "#", "####", r"\boxed", r"\boxed{", "{",
    "}", "$", "$$", r"\(", r"\[", r"\)", r"\text{", "answer is ", "answer ", "1,111", "1,", "-", "1/", ". ", "a",
    "\u0663",
)  # fmt: skip
UNITS = (
    "a ", "a", "/a", " / a", "^2 ", "^{2 ", "m^2 ", "m^{ 2 }", r"\circ ", r"\circ^2 ", r"^\circ ", r"^{ \circ } ",
    r"\text{a}", r"\text ", "1,", "1,111", "1.", "e9", "9", "10^", r"\times ", r"\frac{1}", "x=", "and ", ", ", "(",
    "{", r"\{", r"\cup ",
)  # fmt: skip


def cpu_s(act: Callable[[str], object], text: str, times: int) -> float:
    """The least of some trials."""
    taken = []
    for _ in range(3):
        start = time.process_time()
        for _ in range(times):
            act(text)
        taken.append(time.process_time() - start)
    return min(taken) / times


def longest(act: Callable[[str], object], make: Callable[[int], str], size: int, times: int = 1) -> float:
    """How many times as long a text takes that is eight times as long."""
    act(make(size))
    short = cpu_s(act, make(size), LONGER * times)
    return cpu_s(act, make(LONGER * size), times) / max(short, 1e-5)  # less is the clock's own


@pytest.mark.slow
@pytest.mark.parametrize("act", [reading, last_block, conclusion, lambda text: exact_match(task("1"), text)])
def test_completions_are_read_in_linear_time(act: Callable[[str], object]) -> None:
    for atom in ATOMS:
        for other in ("", "```", "a"):
            grown = (
                longest(act, lambda n, atom=atom, other=other: other + atom * n + "!", 1000) for _ in range(TRIALS)
            )
            assert any(growth < 3 * LONGER for growth in grown), (atom, other)  # 8 in proportion, 64 by the square


@pytest.mark.nightly
@pytest.mark.parametrize("gold", ["3", r"\frac{1}{2}", r"\{1,2\}", "(1,2]", "x+1"])
def test_answers_are_compared_in_polynomial_time(gold: str) -> None:
    for atom in UNITS:
        for start in ("3", "", "3 m", "x="):
            grown = (
                longest(lambda text: compared(gold, text), lambda n, start=start, atom=atom: start + atom * n + "!", 2)
                for _ in range(TRIALS)
            )
            # What backtracks without bound takes 2**14 times as long.
            assert any(growth < LONGER**2 for growth in grown), (atom, start)


@pytest.mark.parametrize(
    "text", ["1" * 10_000, "1e999999999", "1e-999999999", "1/" + "0" * 299, "9" * 300, "\u0663" * 300]
)
def test_huge_numbers_are_read_or_refused(text: str) -> None:
    assert compared("3", text) is False
    found = number(normalised(text))
    assert found is None or found.adjusted() < 300
