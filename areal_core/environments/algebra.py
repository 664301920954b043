r"""Equality of formulas: a reader of LaTeX, and evaluation at random points.

    equal(r"2\sqrt{2}", r"\sqrt{8}") -> True

Rational numbers are evaluated exactly. All else is evaluated with 40 digits, and again with as many as the largest and
the smallest part need. Formulas that differ at one point differ; those that agree at all of them count as the same.
Nothing that is read is executed, and every step is bounded: the depth of a formula, the size of its numbers, and the
steps of an evaluation.
"""

from __future__ import annotations

import functools
import math
import random
import re
import threading
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from mpmath.ctx_mp import MPContext

_DEPTH = 90  # of brackets
_STEPS = 20_000  # of one evaluation; a fraction of n kilobits costs n * n
_BITS = 2**17  # of the numerator and the denominator of a fraction
_MAGNITUDE = 2**12  # of a number that is no fraction: its binary logarithm
_LARGEST = 5000  # number of which there is a factorial
_PRECISION, _GUARD = 128, 64  # bits

Node = tuple[Any, ...]  # an operation and its arguments; or "number" and a Fraction, "symbol" and a name
Point = dict[str, Fraction]

_GREEK = (
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma tau upsilon"
    " phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega"
)
_NAMED = "sin cos tan cot sec csc sinh cosh tanh coth ln log exp gcd max min arg Re:re Im:im lg:log10"
_NAMED += " arcsin:asin arccos:acos arctan:atan arccot:acot"
_DECORATED, _ACCENTED = "bar overline hat widehat tilde dot ddot", "vec overrightarrow boldsymbol bm mathcal"
GREEK = _GREEK.split()
_SYMBOLS = {f"\\{name}" for name in [*GREEK, "infty", "ell", "hbar", "nabla"]}
_DECORATIONS = {f"\\{name}" for name in _DECORATED.split()}
_ACCENTS = {f"\\{name}" for name in _ACCENTED.split()}
_INFINITY = ("symbol", r"\infty")  # nothing is computed with it
_CLOSING = {"(": ")", "[": "]", "{": "}", r"\lfloor": r"\rfloor", r"\lceil": r"\rceil"}
_FUNCTIONS = {f"\\{name.split(':')[0]}": name.split(":")[-1] for name in _NAMED.split()}
_INVERSE = {"sin": "asin", "cos": "acos", "tan": "atan", "cot": "acot", "sinh": "asinh", "cosh": "acosh"}
_WORDS = {name[1:]: name for name in [*_FUNCTIONS, r"\sqrt", r"\pi", *_SYMBOLS]}
_TOKEN = re.compile(r"\\[a-zA-Z]+|\\.|_\{[^{}]*\}|_\w|\d+(?:\.\d*)?|\.\d+|[a-zA-Z]+|'+|\S")
_DERIVATIVE = re.compile(
    r"\\frac\s*\{\s*(?:d|\\partial)\s*(?:\^\s*\{?(?P<order>\d)\}?)?\s*(?P<of>\\?[a-zA-Z]+(?:_\{?\w\}?)?)\s*\}"
    r"\s*\{\s*(?:d|\\partial)\s*(?P<by>\\?[a-zA-Z]+)\s*(?:\^\s*\{?\d\}?)?\s*\}"
)


class UnreadableError(ValueError):
    """A text that is no formula, or one whose value is undefined or beyond the limits."""


def equal(one: str, other: str) -> bool:
    r"""Whether two formulas are the same function of their symbols. False for what can't be read or evaluated. `\log`
    without a base is that of ten or the natural one, whichever makes them equal."""
    try:
        return _same(read(one), read(other))
    except UnreadableError:
        return False


def factor(one: tuple[str, str], other: tuple[str, str]) -> int:
    """The sign of the constant c in `a - b = c * (x - y)`, for two equations (a, b) and (x, y); 0 where there is none,
    or where it is complex."""
    try:
        first, second = (("+", read(left), ("-", read(right))) for left, right in (one, other))
        point = next(_points(first, second))
        ours, theirs = _put(first, point), _put(second, point)
        ratio = _Evaluation(_PRECISION, {}).number(("/", ours, theirs))
        if any(_same(side, ("number", Fraction(0))) for side in (ours, theirs)) or not _same(
            ("*", first, theirs), ("*", second, ours)
        ):
            return 0
        return 0 if ratio.imag else 1 if ratio.real > 0 else -1
    except UnreadableError:
        return 0


def value(text: str) -> float | None:
    """The value of a formula that has no symbols, if it is real."""
    try:
        found = _Evaluation(_PRECISION, {}).number(read(text))
        return float(found)
    except (UnreadableError, TypeError, OverflowError):
        return None


def symbols(text: str) -> set[str]:
    """The symbols of a formula; none of what is no formula."""
    try:
        return {node[1] for node in _nodes(read(text)) if node[0] == "symbol"}
    except UnreadableError:
        return set()


def is_symbol(text: str) -> bool:
    """Whether a formula is a symbol and nothing else."""
    try:
        return read(text)[0] == "symbol"
    except UnreadableError:
        return False


@functools.lru_cache(maxsize=1024)
def read(text: str) -> Node:
    """The tree of a formula. Raises UnreadableError."""
    reader = _Reader(_DERIVATIVE.sub(lambda found: f"D_{{{found['of']}/{found['by']}{found['order'] or ''}}}", text))
    node = reader.sum()
    within = node[1] if node[0] == "-" else node
    if reader.token is not None or any(part == _INFINITY and part is not within for part in _nodes(node)):
        raise UnreadableError(text)
    return node


def _nodes(node: Node) -> Iterator[Node]:
    yield node
    for child in node[1:]:
        if isinstance(child, tuple):
            yield from _nodes(child)


class _Reader:
    """Recursive descent over the tokens of a formula."""

    def __init__(self, text: str) -> None:
        self._tokens = _tokens(text)
        self._at = self._depth = self._bars = 0

    @property
    def token(self) -> str | None:
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def _next(self) -> str:
        token = self.token
        if token is None:
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
            terms.append(("-", self._product()) if self._next() == "-" else self._product())
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
        """Whether a factor follows without a sign. A number does not: "3 4" is no product."""
        token = self.token
        if token is None or token[0] == "_":
            return False
        if token == "|":
            return not self._bars
        return token.isalpha() or token in _CLOSING or (token[0] == "\\" and token in _COMMANDS)

    def _signed(self) -> Node:
        if self._take("-"):
            return "-", self._signed()
        return self._signed() if self._take("+") else self._power()

    def _power(self) -> Node:
        base = self._atom()
        while True:
            if self._take("^"):
                base = self._raised(base)
            elif self._take("!") and self.token != "!":
                base = ("!", base)
            elif self._take("%"):
                base = ("/", base, ("number", Fraction(100)))
            else:
                return base

    def _raised(self, base: Node) -> Node:
        tokens = self._tokens[self._at : self._at + 3]
        if r"\circ" in (tokens[:1] or [""])[0] or tokens == ["{", r"\circ", "}"]:
            self._at += 3 if tokens[0] == "{" else 1
            return "*", base, ("/", ("pi",), ("number", Fraction(180)))
        return "^", base, self._exponent()

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
            return self._number(token)
        if token == "|":
            self._bars += 1
            inner = self.sum()
            self._bars -= 1
            return "abs", self._closed(inner, "|")
        if token in _CLOSING:
            bars, self._bars = self._bars, 0
            inner = self._closed(self.sum(), _CLOSING[token])
            self._bars = bars
            return (token[1:], inner) if token[0] == "\\" else inner
        if token == r"\frac":
            return "/", self._argument(), self._argument()
        if token == r"\binom":
            return "binom", self._argument(), self._argument()
        if token == r"\sqrt":
            degree = self._closed(self.sum(), "]") if self._take("[") else ("number", Fraction(2))
            return "root", self._argument(whole=True), degree
        if token in _FUNCTIONS:
            return self._function(_FUNCTIONS[token])
        if token in _ACCENTS:
            return self._argument()
        if token in _DECORATIONS:
            return self._symbol(f"{token}{self._argument()}")
        if token == r"\pi":
            return ("pi",)
        if (len(token) == 1 and token.isalpha()) or token in _SYMBOLS:
            return self._symbol(token)
        raise UnreadableError(token)

    def _closed(self, node: Node, closing: str) -> Node:
        if self._next() != closing:
            raise UnreadableError
        return node

    def _number(self, token: str) -> Node:
        if len(token) > 1000:
            raise UnreadableError
        node = ("number", Fraction(token))
        if token.isdigit() and self._take(r"\frac"):  # a mixed number, or a product
            fraction = ("/", self._argument(), self._argument())
            mixed = all(part[0] == "number" and part[1].denominator == 1 for part in fraction[1:])
            return "+" if mixed else "*", node, fraction
        return node

    def _symbol(self, name: str) -> Node:
        whole = name
        while self.token is not None and self.token[0] in "_'":
            whole += re.sub(r"[{}\s]", "", self._next())
        following = self._tokens[self._at : self._at + 3]
        if len(following) == 3 and following[0] + following[2] == "()" and following[1].isdigit():
            self._at += 3  # I(0) is no product
            whole += "".join(following)
        return (whole,) if whole in ("e", "i") else ("symbol", whole)

    def _argument(self, *, whole: bool = False) -> Node:
        r"""Of a command: braces, or one character: \frac12 is a half. With `whole`, a number of any length."""
        token = self.token or ""
        if token[:1].isdigit() and len(token) > 1 and not whole:
            self._tokens[self._at] = token[1:]
            return "number", Fraction(token[0])
        return self._atom()

    def _function(self, name: str) -> Node:
        base = exponent = None
        while self.token is not None and (self.token[0] == "_" or self.token == "^"):
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
        if len(arguments) > 1 and name not in ("gcd", "max", "min"):
            raise UnreadableError
        if exponent == ("-", ("number", 1)) and name in _INVERSE:
            return _INVERSE[name], *arguments
        node: Node = (name, *arguments)
        if base is not None:
            if name != "log":
                raise UnreadableError
            node = ("/", ("ln", *arguments), ("ln", base))
        return node if exponent is None else ("^", node, exponent)


_COMMANDS = {*_SYMBOLS, *_DECORATIONS, *_ACCENTS, *_FUNCTIONS, r"\frac", r"\binom", r"\sqrt", r"\pi"}


def _tokens(text: str) -> list[str]:
    """Tokens; a run of up to three letters is a product of symbols; a longer one, or of capitals, is no formula."""
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
    bases = (10, 0) if "log" in nodes else (0,)
    return any(_agree(first, second, base, strict=bool(nodes & {"abs", "i"})) for base in bases)


def _agree(first: Node, second: Node, base: int, *, strict: bool) -> bool:
    """Whether two trees agree at random points. Not `strict`, those count alone at which all parts are real, if there
    is any: the root of a product is that of its factors where these are positive."""
    apart = real = False
    evaluated = 0
    for point in _points(first, second):
        try:
            _Evaluation(_PRECISION, point, base).number(first)
        except UnreadableError:
            continue  # it is undefined there, or too large
        evaluated += 1
        same, is_real = _agree_at(first, second, point, base)
        if not same and (is_real or strict):
            return False
        apart, real = apart or not same, real or is_real
    return evaluated > 0 and (real or not apart)


def _agree_at(first: Node, second: Node, point: Point, base: int) -> tuple[bool, bool]:
    """Whether two values agree, and whether all their parts are real."""
    rough = _Evaluation(_PRECISION, point, base)
    before = rough.difference(first, second)
    if isinstance(before, Fraction):
        return before == 0, rough.real
    if before and rough.ctx.mag(before) > rough.peak - _PRECISION // 3:
        return False, rough.real
    fine = _Evaluation(2 * _PRECISION + 4 * rough.bits, point, base)
    after = fine.difference(first, second)
    bound = rough.ctx.mag(before) if before else fine.peak - fine.ctx.prec + 2 * _GUARD
    return not after or fine.ctx.mag(after) <= bound - _GUARD, rough.real


def _points(first: Node, second: Node) -> Iterator[Point]:
    """Random points: small and large positive ones, those of both signs, and one near zero. Whole ones, where there is
    a factorial or a sign with an exponent."""
    nodes = [*_nodes(first), *_nodes(second)]
    names = sorted({node[1] for node in nodes if node[0] == "symbol"})
    if not names:
        yield {}
        return
    rng = random.Random(repr(first))
    if any(node[0] in ("!", "binom") or (node[0] == "^" and node[1][0] == "-") for node in nodes):
        for place in range(8):  # even and odd ones in all mixtures
            yield {name: Fraction(1 + 2 * rng.randrange(7) + (place >> at % 3 & 1)) for at, name in enumerate(names)}
        return
    for lowest, highest, unit in ((1, 4, 997), (1, 4, 997), (20, 90, 997), (-4, 4, 997), (-4, 0, 997), (1, 9, 99_991)):
        yield {name: Fraction(rng.randrange(997 * lowest, 997 * highest), unit) for name in names}


def _put(node: Node, point: Point) -> Node:
    if node[0] == "symbol":
        return "number", point[node[1]]
    return node[0], *(_put(child, point) if isinstance(child, tuple) else child for child in node[1:])


_contexts = threading.local()  # mpmath's own context would share its precision among threads


class _Evaluation:
    """Values of trees at one point, with one precision."""

    def __init__(self, precision: int, point: Point, base: int = 0) -> None:
        if not hasattr(_contexts, "one"):
            _contexts.one = MPContext()
        self.ctx = _contexts.one
        self.ctx.prec = precision
        self.real, self.peak, self.bits = True, 0, 0
        self._point, self._base, self._steps = point, base, _STEPS

    def difference(self, first: Node, second: Node) -> Any:
        """0 or the distance of two values: a Fraction, or with this precision."""
        one, other = self.number(first), self.number(second)
        if isinstance(one, Fraction) and isinstance(other, Fraction):
            return one - other
        return abs(self._mp(one) - self._mp(other))

    def number(self, node: Node) -> Any:
        """A Fraction, or a real or complex number of mpmath's."""
        operation = node[0]
        if operation == "number":
            return self._checked(node[1])
        if operation == "symbol":
            return self._point[node[1]] if node[1] in self._point else self._unknown()
        if operation in ("pi", "e"):
            return +getattr(self.ctx, operation)
        if operation == "i":
            return self.ctx.mpc(0, 1)
        arguments = [self.number(child) for child in node[1:]]
        try:
            found = self._checked(self._applied(operation, arguments))
        except (ArithmeticError, ValueError, TypeError, NotImplementedError) as error:
            raise UnreadableError(operation) from error
        if isinstance(found, self.ctx.mpc) and not any(isinstance(one, self.ctx.mpc) for one in arguments):
            self.real = False
        return found

    def _unknown(self) -> Any:
        raise UnreadableError

    def _checked(self, found: Any) -> Any:
        if isinstance(found, Fraction):
            size = max(found.numerator.bit_length(), found.denominator.bit_length())
            self._steps -= 1 + (size >> 10) ** 2
            if size > _BITS or self._steps < 0:
                raise UnreadableError
            return found
        self._steps -= 1
        if not self.ctx.isfinite(found) or self._steps < 0:
            raise UnreadableError
        if found:
            magnitude = self.ctx.mag(found)
            self.peak, self.bits = max(self.peak, magnitude), max(self.bits, abs(magnitude))
            if abs(magnitude) > _MAGNITUDE:
                raise UnreadableError
        return found

    def _mp(self, found: Any) -> Any:
        if not isinstance(found, Fraction):
            return found
        self.bits = max(self.bits, found.numerator.bit_length(), found.denominator.bit_length())
        if self.bits > 2 * _MAGNITUDE:
            raise UnreadableError
        return self._checked(self.ctx.mpf(found.numerator) / found.denominator)

    def _applied(self, operation: str, arguments: list[Any]) -> Any:
        exact = all(isinstance(one, Fraction) for one in arguments)
        first = arguments[0]
        if operation == "!":
            if not abs(first) <= _LARGEST:
                raise UnreadableError
            whole = exact and first.denominator == 1 and first >= 0
            return Fraction(math.factorial(int(first))) if whole else self.ctx.gamma(self._mp(first + 1))
        if operation == "binom":
            if not all(exact and one.denominator == 1 and 0 <= one <= _LARGEST for one in arguments):
                raise UnreadableError
            return Fraction(math.comb(*map(int, arguments)))
        if operation == "gcd":
            return Fraction(math.gcd(*(int(one) for one in arguments if one.denominator == 1 or self._unknown())))
        if operation in ("^", "root"):
            power = arguments[1] if operation == "^" else 1 / arguments[1]
            return self._raised(first, power)
        if not exact:
            arguments = [self._mp(one) for one in arguments]
        first = arguments[0]
        if operation in _ARITHMETIC:
            return _ARITHMETIC[operation](arguments)
        if operation in ("lfloor", "lceil"):
            rounded = math.floor if operation == "lfloor" else math.ceil
            return Fraction(rounded(first))
        first = self._mp(first)
        if operation == "log":
            return self.ctx.log(first, 10) if self._base else self.ctx.log(first)
        if operation == "exp":
            return self._raised(+self.ctx.e, first)
        if operation in ("sinh", "cosh", "tanh", "coth") and first and self.ctx.mag(first) > 12:
            raise UnreadableError
        return getattr(self.ctx, operation)(first)

    def _raised(self, base: Any, power: Any) -> Any:
        """A power. Of a negative number a root of odd degree is the real one."""
        if base == 0:
            return Fraction(0) if power > 0 else self._unknown()
        if isinstance(power, Fraction):
            if isinstance(base, Fraction) and power.denominator == 1:
                size = max(base.numerator.bit_length(), base.denominator.bit_length()) - (abs(base.numerator) == 1)
                if abs(power) * size > _BITS:
                    raise UnreadableError
                return base ** int(power)
            if power.denominator % 2 and power.denominator > 1 and not isinstance(base, self.ctx.mpc) and base < 0:
                sign = -1 if power.numerator % 2 else 1
                return sign * self._raised(-base, power)
        base = self._mp(base)
        if abs(self.ctx.mag(power)) + (abs(self.ctx.mag(base)) + 1).bit_length() > 2 * _MAGNITUDE.bit_length():
            raise UnreadableError
        return self.ctx.power(base, int(power) if power == int(power.real) else self._mp(power))


_ARITHMETIC = {
    "+": lambda of: functools.reduce(lambda one, other: one + other, of),
    "*": lambda of: functools.reduce(lambda one, other: one * other, of),
    "-": lambda of: -of[0],
    "/": lambda of: of[0] / of[1],
    "abs": lambda of: abs(of[0]),
    "max": max,
    "min": min,
}
