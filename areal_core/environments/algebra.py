r"""Compare formulas: parse LaTeX, and evaluate at random points.

    equal(r"2\sqrt{2}", r"\sqrt{8}") -> True

Rational numbers are evaluated exactly. All other values are evaluated with 40 digits, and again with enough digits for
their largest and smallest parts. Formulas that differ at one point are different. Formulas that agree at all sampled
points count as equal. The module executes no input. Every step is bounded: the depth of a formula, the size of its
numbers, and the steps of an evaluation.
"""

from __future__ import annotations

import contextlib
import functools
import math
import random
import re
import threading
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from mpmath.ctx_mp import MPContext

_LONGEST = 2000  # characters of a formula
_DEPTH = 90  # of brackets
_STEPS = 20_000  # limit of one evaluation; a fraction of n kilobits costs n * n
_BITS = 2**17  # limit of the numerator and the denominator of a fraction
_MAGNITUDE = 2**12  # limit of other numbers' binary logarithm
_LARGEST = 5000  # largest number whose factorial is computed
_PRECISION, _GUARD = 128, 64  # bits
_SAMPLED = ((1, 4, 997), (1, 4, 997), (20, 90, 997), (-4, 4, 997), (-4, 0, 997), (1, 9, 99_991))

Node = tuple[Any, ...]  # an operation and its arguments; or "number" and a Fraction, "symbol" and a name
Point = dict[str, Fraction]

_GREEK = (
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma tau upsilon"
    " phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega"
)
_NAMED = "sin cos tan cot sec csc sinh cosh tanh coth ln log exp gcd max min arg Re:re Im:im lg:log10"
_NAMED += " arcsin:asin arccos:acos arctan:atan arccot:acot"
GREEK = _GREEK.split()
_SYMBOLS = {f"\\{name}" for name in [*GREEK, "pi", "infty", "ell", "hbar", "nabla"]}
_DECORATIONS = {f"\\{name}" for name in ("bar", "overline", "hat", "widehat", "tilde", "dot", "ddot")}
_ZERO, _DEGREE = ("number", Fraction(0)), ("/", ("pi",), ("number", Fraction(180)))
_INFINITY = ("symbol", r"\infty")  # never computed with
_OF_TWO = {r"\frac": "/", r"\binom": "binom"}
_ENCLOSED = {"|": "abs", r"\lfloor": "lfloor", r"\lceil": "lceil"}
_CLOSING = {"|": "|", "(": ")", "[": "]", "{": "}", r"\lfloor": r"\rfloor", r"\lceil": r"\rceil"}
_FUNCTIONS = {f"\\{name.split(':')[0]}": name.split(":")[-1] for name in _NAMED.split()}
_INVERSE = {"sin": "asin", "cos": "acos", "tan": "atan", "cot": "acot", "sinh": "asinh", "cosh": "acosh"}
_WORDS = {name[1:]: name for name in [*_FUNCTIONS, r"\sqrt", *_SYMBOLS]}
_TOKEN = re.compile(
    r"\\[a-zA-Z]+|\\.|_\{[^{}]*\}|_\w|(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d*)?(?:[eE][-+]?\d{1,3}(?!\d))?|\.\d+|[a-zA-Z]+|'+|\S"
)
_DERIVATIVE = re.compile(
    r"\\frac\s*\{\s*(?:d|\\partial)\s*(?:\^\s*\{?(?P<order>\d)\}?)?\s*(?P<of>\\?[a-zA-Z]+(?:_\{?\w\}?)?)\s*\}"
    r"\s*\{\s*(?:d|\\partial)\s*(?P<by>\\?[a-zA-Z]+)\s*(?:\^\s*\{?\d\}?)?\s*\}"
)


class UnreadableError(ValueError):
    """A text is not a formula, or its value is undefined or beyond the limits."""


def equal(one: str, other: str) -> bool:
    r"""Whether two formulas are the same function of their symbols; False if one is unreadable.
    `\log` without a base is the decimal or the natural one, whichever makes the formulas equal."""
    with contextlib.suppress(UnreadableError):
        return _same(read(one), read(other))
    return False


def factor(one: tuple[str, str], other: tuple[str, str]) -> int:
    """Compare two equations (a, b) and (x, y): the sign of the constant c in `a - b = c * (x - y)`.
    Returns 0 if there is no such constant, or if it is complex."""
    with contextlib.suppress(UnreadableError):
        first, second = (("+", read(left), ("-", read(right))) for left, right in (one, other))
        point = next(_points(first, second))
        ours, theirs = _put(first, point), _put(second, point)
        ratio = _Evaluation(_PRECISION).number(("/", ours, theirs))
        is_constant = _same(("*", first, theirs), ("*", second, ours))
        if is_constant and ratio.imag == 0 and not _same(ours, _ZERO) and not _same(theirs, _ZERO):
            return 1 if ratio.real > 0 else -1
    return 0


def value(text: str) -> float | None:
    """The value of a formula without symbols; None if it is not real or exceeds a float."""
    with contextlib.suppress(UnreadableError, TypeError, OverflowError):
        found = float(_Evaluation(_PRECISION).number(read(text)))
        return found if math.isfinite(found) else None
    return None


def symbols(text: str) -> set[str]:
    """The symbols of a formula; empty for a text that is not a formula."""
    with contextlib.suppress(UnreadableError):
        return {node[1] for node in _nodes(read(text)) if node[0] == "symbol"}
    return set()


@functools.lru_cache(maxsize=1024)
def read(text: str) -> Node:
    """Parse a formula into a tree. Raises UnreadableError."""
    if len(text) > _LONGEST:
        raise UnreadableError
    reader = _Reader(_DERIVATIVE.sub(lambda found: f"D_{{{found['of']}/{found['by']}{found['order'] or ''}}}", text))
    node = reader.sum()
    within = node[1] if node[0] == "-" else node
    if reader.token or any(part == _INFINITY and part is not within for part in _nodes(node)):
        raise UnreadableError(text)
    return node


def _nodes(node: Node) -> Iterator[Node]:
    yield node
    for child in node[1:]:
        if isinstance(child, tuple):
            yield from _nodes(child)


class _Reader:
    """Recursive descent parser over the tokens of a formula."""

    def __init__(self, text: str) -> None:
        self._tokens = [*_tokens(text), ""]
        self._at = self._depth = 0
        self._in_bars = False

    @property
    def token(self) -> str:
        """The next token; "" at the end."""
        return self._tokens[self._at]

    def _next(self) -> str:
        token = self.token
        if not token:
            raise UnreadableError
        self._at += 1
        return token

    def _take(self, *tokens: str) -> bool:
        found = self.token in tokens
        self._at += found
        return found

    def sum(self) -> Node:
        terms = [self._product()]
        while self.token in ("+", "-"):
            terms.append(self._product())
        return terms[0] if len(terms) == 1 else ("+", *terms)

    def _product(self) -> Node:
        factors = [self._signed()]
        while True:
            if self._take("*", r"\cdot", r"\times", r"\ast"):
                factors.append(self._signed())
            elif self._take("/", r"\div", ":"):
                factors = [("/", _times(factors), self._signed())]
            elif self._goes_on():
                factors.append(self._power())
            else:
                return _times(factors)

    def _goes_on(self) -> bool:
        """Whether a factor follows without a sign. Numbers do not count: "3 4" is not a product."""
        token = self.token
        if token == "|":
            return not self._in_bars
        return token.isalpha() or token in _CLOSING or token in _COMMANDS

    def _signed(self) -> Node:
        signs = []
        while self.token in ("+", "-"):
            signs.append(self._next())
        power = self._power()
        return ("-", power) if signs.count("-") % 2 else power

    def _power(self) -> Node:
        base = self._atom()
        while True:
            if self._take("^"):
                base = ("*", base, _DEGREE) if self._take(r"\circ") else ("^", base, self._exponent())
            elif self._take("!") and self.token != "!":
                base = ("!", base)
            elif self._take("%"):
                base = ("/", base, ("number", Fraction(100)))
            else:
                return base

    def _exponent(self) -> Node:
        if self._take("-"):
            return "-", self._exponent()
        atom = self._atom()
        return ("^", atom, self._exponent()) if self._take("^") else atom

    def _atom(self) -> Node:
        self._depth += 1
        if self._depth > _DEPTH:
            raise UnreadableError
        node = self._one(self._next())
        self._depth -= 1
        return node

    def _one(self, token: str) -> Node:
        if token[0].isdecimal() or (token[0] == "." and len(token) > 1):
            return "number", Fraction(token.replace(",", ""))
        if token in _CLOSING:
            in_bars, self._in_bars = self._in_bars, token == "|"
            inner = self._closed(self.sum(), _CLOSING[token])
            self._in_bars = in_bars
            return (_ENCLOSED[token], inner) if token in _ENCLOSED else inner
        if token in _OF_TWO:
            return _OF_TWO[token], self._argument(), self._argument()
        if token == r"\sqrt":
            degree = self._closed(self.sum(), "]") if self._take("[") else ("number", Fraction(2))
            return "root", self._argument(whole=True), degree
        if token in _FUNCTIONS:
            return self._function(_FUNCTIONS[token])
        if token in _DECORATIONS:
            return self._symbol(f"{token}{self._argument()}")
        if (len(token) == 1 and token.isalpha()) or token in _SYMBOLS:
            return self._symbol(token)
        raise UnreadableError(token)

    def _closed(self, node: Node, closing: str) -> Node:
        if self._next() != closing:
            raise UnreadableError
        return node

    def _symbol(self, name: str) -> Node:
        whole = name
        while self.token[:1] in ("_", "'"):
            whole += re.sub(r"[{}\s]", "", self._next())
        following = self._tokens[self._at : self._at + 3]
        if "".join(following[::2]) == "()" and following[1].isdigit():
            self._at += 3  # I(0) is a name, not a product
            whole += "".join(following)
        return (whole.strip("\\"),) if whole in ("e", "i", r"\pi") else ("symbol", whole)

    def _argument(self, *, whole: bool = False) -> Node:
        r"""Parse a command's argument: braces, or one character (\frac12 is 1/2); `whole`: an entire number."""
        token = self.token
        if token[:1].isdigit() and len(token) > 1 and not whole:
            self._tokens[self._at : self._at + 1] = _tokens(token[1:])
            return "number", Fraction(token[0])
        return self._atom()

    def _function(self, name: str) -> Node:
        base = exponent = None
        while self.token[:1] in ("_", "^"):
            if self._take("^"):
                exponent = self._exponent()
            else:
                base = read(re.sub(r"^_\{?|\}$", "", self._next()))
        if self.token in ("(", "[", "{"):
            closing = _CLOSING[self._next()]
            arguments = [self.sum()]
            while self._take(","):
                arguments.append(self.sum())
            self._closed(arguments[0], closing)
        else:
            arguments = [self._signed()]
            while self._goes_on() and self.token not in _FUNCTIONS and self.token != "(":
                arguments.append(self._power())
            arguments = [_times(arguments)]
        if (len(arguments) > 1 and name not in ("gcd", "max", "min")) or (base is not None and name != "log"):
            raise UnreadableError
        if exponent == ("-", ("number", 1)) and name in _INVERSE:
            return _INVERSE[name], *arguments
        node: Node = (name, *arguments) if base is None else ("/", ("ln", *arguments), ("ln", base))
        return node if exponent is None else ("^", node, exponent)


_COMMANDS = {*_SYMBOLS, *_DECORATIONS, *_FUNCTIONS, *_OF_TWO, r"\sqrt"}


def _tokens(text: str) -> list[str]:
    """Split into tokens.
    A run of up to three letters is a product of symbols; other words raise UnreadableError."""
    found: list[str] = []
    for token in _TOKEN.findall(text):
        if not token.isalpha():
            found.append(token)
        elif token in _WORDS:
            found.append(_WORDS[token])
        elif len(token) <= 2 or (len(token) == 3 and not token.isupper()):
            found.extend(token)
        else:
            raise UnreadableError(token)
    return found


def _times(factors: list[Node]) -> Node:
    return factors[0] if len(factors) == 1 else ("*", *factors)


# -- equality ----------------------------------------------------------------------------------------------------------


def _same(first: Node, second: Node) -> bool:
    nodes = {node[0] for tree in (first, second) for node in _nodes(tree)}
    is_strict = bool(nodes & {"abs", "i"})
    return _agree(first, second, "ln", is_strict) or ("log" in nodes and _agree(first, second, "log10", is_strict))


def _agree(first: Node, second: Node, log: str, is_strict: bool) -> bool:
    """Whether two trees agree at random points.
    Unless `is_strict`, only points with real parts count, if there are any. For instance, the root of a product equals
    the product of the factors' roots only where the factors are positive."""
    verdicts: dict[bool, bool] = {}  # whether all parts are real -> whether the trees agree wherever that is so
    for point in _points(first, second):
        ours, theirs = _put(first, point, log), _put(second, point, log)
        try:
            _Evaluation(_PRECISION).number(ours)
        except UnreadableError:
            continue  # the formula is undefined at this point, or too large
        agrees, is_real = _agree_at(ours, theirs)
        if not agrees and (is_real or is_strict):
            return False
        verdicts[is_real] = agrees and verdicts.get(is_real, True)
    return verdicts.get(True, verdicts.get(False, False))


def _agree_at(first: Node, second: Node) -> tuple[bool, bool]:
    """Return whether two values agree, and whether all their parts are real."""
    rough = _Evaluation(_PRECISION)
    before = rough.difference(first, second)
    if isinstance(before, Fraction):
        return before == 0, rough.real
    if before and rough.ctx.mag(before) > rough.peak - _PRECISION // 3:
        return False, rough.real
    fine = _Evaluation(2 * _PRECISION + 4 * rough.bits)
    after = fine.difference(first, second)
    noise = rough.ctx.mag(before) if before else rough.peak - _PRECISION  # rounding noise shrinks with the precision
    return not after or fine.ctx.mag(after) <= noise - (fine.ctx.prec - _PRECISION) + _GUARD, rough.real


def _points(first: Node, second: Node) -> Iterator[Point]:
    """Random points: small and large positive ones, points of both signs, and one near zero.
    They are integers if a formula has a factorial or a power of a negated base."""
    nodes = [*_nodes(first), *_nodes(second)]
    names = sorted({node[1] for node in nodes if node[0] == "symbol"})
    rng = random.Random(repr(first))
    if not names:
        yield {}
    elif any(node[0] in ("!", "binom") or (node[0] == "^" and node[1][0] == "-") for node in nodes):
        for place in range(8):  # even and odd numbers in all combinations
            yield {name: Fraction(1 + 2 * rng.randrange(7) + (place >> at % 3 & 1)) for at, name in enumerate(names)}
    else:
        for lowest, highest, unit in _SAMPLED:
            yield {name: Fraction(rng.randrange(997 * lowest, 997 * highest), unit) for name in names}


def _put(node: Node, point: Point, log: str = "ln") -> Node:
    """Insert numbers for a tree's symbols, and choose the base of its logarithms."""
    if node[0] == "symbol":
        return "number", point[node[1]]
    children = (_put(child, point, log) if isinstance(child, tuple) else child for child in node[1:])
    return log if node[0] == "log" else node[0], *children


_contexts = threading.local()  # mpmath's global context would share its precision among threads


class _Evaluation:
    """Evaluates trees without symbols at one precision, to fractions or to mpmath's numbers."""

    def __init__(self, precision: int) -> None:
        if not hasattr(_contexts, "one"):
            _contexts.one = MPContext()
        self.ctx = _contexts.one
        self.ctx.prec = precision
        self.real, self.peak, self.bits, self._steps = True, 0, 0, _STEPS

    def difference(self, first: Node, second: Node) -> Any:
        one, other = self.number(first), self.number(second)
        if not isinstance(one, Fraction) or not isinstance(other, Fraction):
            one, other = self._rounded(one, other)
        return one - other

    def number(self, node: Node) -> Any:
        operation, *children = node
        if operation == "number":
            return self._checked(children[0])
        if operation == "symbol":
            raise UnreadableError(f"{children[0]} has no value")
        arguments = [self.number(child) for child in children]
        try:
            found = self._checked(self._applied(operation, arguments))
        except (ArithmeticError, ValueError, TypeError, NotImplementedError) as error:
            raise UnreadableError(operation) from error
        if (
            arguments
            and isinstance(found, self.ctx.mpc)
            and not any(isinstance(one, self.ctx.mpc) for one in arguments)
        ):
            self.real = False
        return found

    def _checked(self, found: Any) -> Any:
        if isinstance(found, Fraction):
            self._steps -= 1 + (_size(found) >> 10) ** 2
            fits = _size(found) <= _BITS
        else:
            self._steps -= 1
            magnitude = self.ctx.mag(found) if found else 0
            fits = abs(magnitude) <= _MAGNITUDE
            self.peak, self.bits = max(self.peak, magnitude), max(self.bits, abs(magnitude))
        if not fits or self._steps < 0:
            raise UnreadableError
        return found

    def _rounded(self, *numbers: Any) -> list[Any]:
        """Convert numbers to mpmath's, recording the size of fractions."""
        self.bits = max(self.bits, *(_size(one) for one in numbers if isinstance(one, Fraction)), 0)
        if self.bits > 2 * _MAGNITUDE:
            raise UnreadableError
        return [self.ctx.convert(one) for one in numbers]

    def _applied(self, operation: str, arguments: list[Any]) -> Any:
        if operation in _WHOLE:
            whole = all(isinstance(one, Fraction) and one.denominator == 1 for one in arguments)
            if not whole or (operation != "gcd" and max(arguments) > _LARGEST):
                raise UnreadableError
            return Fraction(_WHOLE[operation](*map(int, arguments)))
        if operation in ("^", "root"):
            return self._raised(arguments[0], arguments[1] if operation == "^" else 1 / arguments[1])
        if operation not in _ARITHMETIC or not all(isinstance(one, Fraction) for one in arguments):
            arguments = self._rounded(*arguments)
        if operation in _ARITHMETIC:
            return _ARITHMETIC[operation](arguments)
        if not arguments:
            return self.ctx.mpc(0, 1) if operation == "i" else +getattr(self.ctx, operation)
        return getattr(self.ctx, operation)(*arguments)

    def _raised(self, base: Any, power: Any) -> Any:
        """Compute a power. An odd root of a negative number is the real one."""
        if base == 0:
            return Fraction(0) if power > 0 else 1 / Fraction(0)
        if isinstance(power, Fraction) and power.denominator == 1 and isinstance(base, Fraction):
            if abs(power) * _size(base) > _BITS and abs(base) != 1:
                raise UnreadableError
            return base ** int(power)
        if isinstance(power, Fraction) and power.denominator % 2 and not isinstance(base, self.ctx.mpc) and base < 0:
            return (-1) ** (power.numerator % 2) * self._raised(-base, power)
        base, power = self._rounded(base, power)
        if self.ctx.mag(power) > _MAGNITUDE.bit_length():
            raise UnreadableError
        return self.ctx.power(base, power)


def _size(fraction: Fraction) -> int:
    return max(fraction.numerator.bit_length(), fraction.denominator.bit_length())


_WHOLE = {"!": math.factorial, "binom": math.comb, "gcd": math.gcd}
_ARITHMETIC = {
    "+": sum,
    "*": math.prod,
    "-": lambda of: -of[0],
    "/": lambda of: of[0] / of[1],
    "abs": lambda of: abs(of[0]),
    "lfloor": lambda of: Fraction(math.floor(of[0])),
    "lceil": lambda of: Fraction(math.ceil(of[0])),
    "max": max,
    "min": min,
}
