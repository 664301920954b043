"""What runs on completions outside of a sandbox takes time in proportion to their length, whatever they say."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from areal_core.environments.mathematics import compared, conclusion, normalised, number
from areal_core.environments.procedural import reading
from areal_core.environments.programs import last_block
from areal_core.environments.registry import exact_match
from areal_core.types import Prompt

LONGER = 8
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


def exact(text: str) -> float:
    return exact_match(Prompt(index=0, prompt_id="", text="", token_ids=(), answer="1"), text)


@pytest.mark.parametrize("act", [reading, last_block, conclusion, exact])
def test_completions_are_read_in_linear_time(act: Callable[[str], object]) -> None:
    for atom in ATOMS:
        for other in ("", "```", "a"):
            growth = longest(act, lambda n, atom=atom, other=other: other + atom * n + "!", 1000)
            assert growth < 3 * LONGER, (atom, other)  # 8 in proportion, 64 by the square


@pytest.mark.nightly
@pytest.mark.parametrize("gold", ["3", r"\frac{1}{2}", r"\{1,2\}", "(1,2]", "x+1"])
def test_answers_are_compared_in_polynomial_time(gold: str) -> None:
    for atom in UNITS:
        for start in ("3", "", "3 m", "x="):
            growth = longest(
                lambda text: compared(gold, text), lambda n, start=start, atom=atom: start + atom * n + "!", 2, 1
            )
            assert growth < LONGER**2, (atom, start)  # what backtracks without bound takes 2**14 times as long


@pytest.mark.parametrize(
    "text", ["1" * 10_000, "1e999999999", "1e-999999999", "1/" + "0" * 299, "9" * 300, "\u0663" * 300]
)
def test_huge_numbers_are_read_or_refused(text: str) -> None:
    assert compared("3", text) is False
    found = number(normalised(text))
    assert found is None or found.adjusted() < 300
