"""Any completion is judged: an exception would be no result, by which a policy could escape."""

from __future__ import annotations

import random

import pytest

from areal_core.environments.mathematics import compared
from areal_core.environments.registry import mathematics
from areal_core.types import Outcome, Prompt

GOLDS = (
    "4", "-0.5", r"\frac{3}{7}", r"2\sqrt{3}", r"\pi", "50\\%", "12 cm", "(1,2]", r"\{1,2\}", "x+1", "x=3", "x>2",
    r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", "1011_2", r"\pm 3", "Tuesday", "B", r"3+4i", "n!", r"\R",
)  # fmt: skip
PARTS = (
    *"0123456789xyni+-*/^_!|=<>(){}[],.:;% ", "99", "999999", "1.5", "1e9", r"\pi", r"\infty", r"\frac", r"\sqrt",
    "{99}", r"\binom", r"\gcd", r"\max", r"\log_2", r"\ln", r"\sin", r"\arctan", r"\tanh", r"\lfloor ", r"\rfloor ",
    r"\pm ", r"\cup ", r"\in ", r"\leq ", r"\begin{pmatrix}", r"\end{pmatrix}", r"\\", "&", r"\text{", " cm", " km/h",
    r"^\circ", " or ", " and ", r"\overline{3}", "e", "\u00bd", "\u00b2", "\uff11", "\u4e00", "\\", "$",
)  # fmt: skip
MARKS = (
    r"\boxed", r"\boxed{", r"\fbox{", "####", "<answer>", "</answer>", "<think>", "</think>", "The answer is ",
    "Answer: ", "\u7b54\u6848\uff1a", "$$", r"\(", r"\)", r"\[", r"\]", "**", "\n", "\n\n", "so that ", " or ",
)  # fmt: skip


def judged(gold: str, completion: str) -> Outcome:
    return mathematics(Prompt(index=0, prompt_id="", text="", token_ids=(), answer=gold), completion).outcome


@pytest.mark.parametrize("boxed", [True, False])
def test_any_completion_has_a_verdict(boxed: bool) -> None:
    rng = random.Random(1)
    for _ in range(2000):
        gold = rng.choice(GOLDS)
        said = list(gold) if rng.random() < 0.5 else []
        for _ in range(rng.randrange(1, 9)):
            said.insert(rng.randrange(len(said) + 1), rng.choice(PARTS if boxed or rng.random() < 0.5 else MARKS))
        text = "".join(said)
        assert compared(text, text) is True
        assert judged(gold, rf"\boxed{{{text}}}" if boxed else text) is not Outcome.FAILED
