r"""Equality of formulas, told by a computer algebra system.

    Formulas().judge(r"2\sqrt{2}", r"\sqrt{8}") -> "right"

SymPy may simplify for ever, multiply until the memory is full, or run what its parser reads. So `Formulas` is a scorer
of `areal_core.environments.fork_server`: each answer is compared in a confined process of its own.
"""

from __future__ import annotations

import functools
import logging
import re
from typing import Any

from areal_core.types import Outcome

CPU_LIMIT_S = 1.0  # of one comparison
_APART = 1e-6  # more than numerical error

_WARM = (  # pairs that make SymPy and its parser import and build what they otherwise would in every fork
    (r"\frac{x}{2}", "x/2"),
    ("x", "y"),
    (r"\sqrt{2}+x^2", r"x^2+\sqrt{3}"),
    (r"(x+1)^2", r"x^2+2x+2"),
    (r"\sin(x)^2+e^{i\pi}", r"\log_2(x)-\cos(x)^2"),
    (r"\frac{\pi}{4}", r"0.78"),
    (r"-\frac{\sin(2x)}{3a}+\cos^{2}(t)\sqrt{y}-1.5e^{-kt}", r"C_{1}e^{2 i t}+2 \pi"),
    (r"x^2+3y=1", r"y^2-x=2"),
)


class Formulas:
    """The scorer."""

    def __init__(self) -> None:
        from math_verify import grader

        logging.disable(logging.CRITICAL)  # math-verify warns of every formula that it can't read
        grader.__dict__["simplify"] = _simplified
        for gold, answer in _WARM:
            compare(gold, answer)

    def prepare(self, task: str) -> Any:
        return _parsed(task)

    def judge(self, prepared: Any, answer: str) -> str:
        return _compared(prepared, answer)


def compare(gold: str, answer: str) -> Outcome:
    """RIGHT or WRONG; UNPARSABLE for an answer that is no formula; TIMED_OUT out of memory; FAILED where the gold
    answer is no formula, or the comparison breaks. In this process, without limits."""
    return _compared(_parsed(gold), answer)


def _compared(expected: Any, answer: str) -> Outcome:
    from math_verify import verify
    from sympy import Expr, Symbol

    if expected is None:
        return Outcome.FAILED
    try:
        found = _parsed(answer)
        if found is None:
            return Outcome.UNPARSABLE
        equal = verify(expected, found, timeout_seconds=None)
        symbol = isinstance(found, Symbol) or isinstance(expected, Symbol)  # which it compares by name alone
        if not equal and symbol and isinstance(found, Expr) and isinstance(expected, Expr):
            equal = _simplified(expected - found) == 0
        return Outcome.RIGHT if equal else Outcome.WRONG
    except MemoryError:
        return Outcome.TIMED_OUT
    except Exception:  # noqa: BLE001 - the boundary to SymPy, which raises whatever it meets
        return Outcome.FAILED


def _simplified(difference: Any) -> Any:
    """Simplified; but 1 where it is not zero at one point, which takes a tenth of the time to see."""
    from sympy import Float, Integer, simplify

    symbols = sorted(getattr(difference, "free_symbols", ()), key=str)
    point = {symbol: Float(0.41 + 0.37 * place) for place, symbol in enumerate(symbols)}
    try:
        apart = abs(complex(difference.evalf(15, subs=point))) > _APART
    except (AttributeError, TypeError, ValueError, ArithmeticError):  # a matrix, or a function without values
        apart = False
    return Integer(1) if apart else simplify(difference)


_DERIVATIVE = re.compile(
    r"\\frac\s*\{\s*d\s*(?:\^\s*\{?(?P<order>\d)\}?)?\s*(?P<of>\\?[a-zA-Z]+(?:_\{?\w\}?)?)\s*\}"
    r"\s*\{\s*d\s*(?P<by>\\?[a-zA-Z]+)\s*(?:\^\s*\{?\d\}?)?\s*\}"
)


@functools.lru_cache(maxsize=4096)
def _parsed(formula: str) -> Any:
    """A SymPy expression; None for what is no formula. A derivative is a symbol of its own: SymPy would take that of a
    symbol by another for zero, and so dx/dt for dt/dx."""
    from math_verify.grader import should_treat_as_complex
    from math_verify.parser import NormalizationConfig, latex2sympy, normalize_latex

    spelling = NormalizationConfig(
        basic_latex=True, units=True, malformed_operators=True, nits=True, boxed="none", equations=False
    )
    try:
        text = normalize_latex(_DERIVATIVE.sub(_derivative, formula), spelling)
        return latex2sympy(
            text, is_real=not should_treat_as_complex(text), convert_degrees=False, normalization_config=None
        )
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - the boundary to its parser, likewise
        return None


def _derivative(found: re.Match[str]) -> str:
    letters = "".join(character for character in found["of"] + "by" + found["by"] if character.isalnum())
    return rf"D_{{{letters}{found['order'] or ''}}}"
