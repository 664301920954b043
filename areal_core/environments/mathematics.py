"""Mathematical answers: what a completion concludes, and whether that equals the gold answer.

    conclusion(text) -> the answer that a text ends on, as it stands there
    compared(gold, answer) -> whether they are equal; None where only a computer algebra system can tell

Numbers are compared exactly, as fractions; tuples, intervals, sets and lists element by element. What holds symbols and
is not the same text is left to `areal_core.environments.algebra`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

_LAST = 4000  # characters of a completion that are searched for its conclusion
_LONGEST = 300  # characters of a number
_MAX_EXPONENT = 400  # of ten, in a number
_MIN_DIGITS = 6  # significant ones of a decimal that may stand for what rounds to it
_ALONE = 200  # characters of a text that may be an answer and nothing else

_COMMAND = re.compile(r"\\(?:text|mathrm|textrm|mbox)\s*\{[^{}]*\}|\\(?:begin|end)\{\w+\}|\\[a-zA-Z]+")
_WORD = re.compile(r"\b(?!and\b|sin\b|cos\b|tan\b|log\b|exp\b|sqrt\b)[a-zA-Z]{3,}")
_ANSWER = re.compile(r"\banswers?\b\W{0,4}\s*(?:(?:is|are|equals)\b\s*:?|[:=])\s*", re.IGNORECASE)
_MATH = re.compile(r"\$\$(.+?)\$\$|\$([^$\n]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_JOINED = re.compile(r"\s*(?:,|and|or|,\s*and|,\s*or)\s*")
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d*)?|\.\d+"
_IN_WORDS = re.compile(rf"(?<![\w.])[-+\u2212]?(?:[$€£]\s?)?(?:{_DIGITS})(?:[eE][-+]?\d+\b)?(?:\s?/\s?\d+)?(?:\s?%)?")


def conclusion(text: str) -> str | None:
    r"""The answer that a text ends on: its last `\boxed{...}`; else what follows its last `####`, or the last "answer
    is"; else its last formula or number. "" for a box that is not closed, None where there is nothing of these."""
    if (marked := _marked(text)) is not None:
        return marked
    text = text[-_LAST:].strip()
    if 0 < len(text) <= _ALONE and not re.search(r"[\n#]", text) and not _WORD.search(_COMMAND.sub("", text)):
        return text
    said = list(_ANSWER.finditer(text))
    if said and (found := _sentence(text[said[-1].end() :])):
        return found
    return _last_value(text)


def gold_answer(field: str) -> str | None:
    """The gold answer in a field of a data set, which holds it alone, or a solution that ends on it."""
    marked, field = _marked(field), field.strip()
    if marked is not None:
        return marked or None
    return field or None if len(field) <= _ALONE and "\n" not in field else conclusion(field)


def _marked(text: str) -> str | None:
    at = max(text.rfind(r"\boxed"), text.rfind(r"\fbox"))
    if at >= 0:
        return _braced(text[at:])
    _, mark, after = text.rpartition("####")
    return (_first_line(after) or None) if mark else None


def _braced(text: str) -> str:
    """The content of the first braces of a text, or the word after `boxed`."""
    command = re.match(r"\\\w+\s*", text)
    assert command is not None
    rest = text[command.end() :]
    if not rest.startswith("{"):
        return _first_line(rest).partition(" ")[0].rstrip("$.,")
    depth = 0
    for place, character in enumerate(rest):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return rest[1:place].strip()
    return ""


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0].strip()


def _sentence(text: str) -> str | None:
    """The answer in the rest of a sentence that says "the answer is": its first formulas, else its first value."""
    line = re.split(r"\.(?:\s|$)|;\s|\n\s*\n", text.strip(), maxsplit=1)[0].strip().strip("*").strip()
    formulas = list(_MATH.finditer(line))
    if formulas:
        shown, end = [_inner(formulas[0])], formulas[0].end()
        for formula in formulas[1:]:
            if not _JOINED.fullmatch(line[end : formula.start()]):
                break
            shown.append(_inner(formula))
            end = formula.end()
        percent = "%" if re.match(r"\s*(?:\\?%|percent)", line[end:]) else ""
        return ", ".join(shown) + percent
    counted = _IN_WORDS.match(line)
    if counted is not None and re.match(r"\s+(?!and\b|or\b|times\b|plus\b|minus\b)[a-zA-Z]{2,}", line[counted.end() :]):
        return counted.group().strip()
    is_prose = len(_WORD.findall(_COMMAND.sub("", line))) > 1
    return ((is_prose and _last_value(line)) or line) or None


def _last_value(text: str) -> str | None:
    formulas = [(found.end(), _inner(found)) for found in _MATH.finditer(text)]
    numbers = [(found.end(), found.group().strip()) for found in _IN_WORDS.finditer(text)]
    last = max([*formulas[-1:], *numbers[-1:]], default=None)
    return None if last is None else last[1]


def _inner(formula: re.Match[str]) -> str:
    return next(group for group in formula.groups() if group is not None).strip()


# -- one spelling ----------------------------------------------------------------------------------------------

_TEXT = re.compile(r"\\(?:text|mathrm|textrm|mbox|operatorname|mathbf|textbf|rm|bf|textit|mathit)\s*\{([^{}]*)\}")
_SPACES = re.compile(r"\\[,;:!> ]|\\q?quad\b|~|\\displaystyle\b|\\textstyle\b|\\limits\b|\\nolimits\b")
_SPELLINGS = (
    (re.compile(r"\\[dtc]frac(?![a-zA-Z])"), r"\\frac"),
    (re.compile(r"\\frac\s*(\d)\s*(\d)"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\(?:left|right|bigl?|bigr|Bigl?|Bigr|biggl?|biggr)(?![a-zA-Z])\.?"), ""),
    (re.compile(r"\\le(?:q|qslant)?(?![a-zA-Z])|\u2264"), r"\\leq "),
    (re.compile(r"\\ge(?:q|qslant)?(?![a-zA-Z])|\u2265"), r"\\geq "),
    (re.compile(r"\\neq?(?![a-zA-Z])|\u2260"), r"\\neq "),
    (re.compile("\u2212"), "-"),
    (re.compile("\u00d7"), r"\\times "),
    (re.compile("\u00b7"), r"\\cdot "),
    (re.compile("\u03c0"), r"\\pi "),
    (re.compile("\u221e|\\binfinity\\b"), r"\\infty "),
    (re.compile("\u00b0"), r"^\\circ "),
    (re.compile("\u222a"), r"\\cup "),
    (re.compile(r"\u221a\s*(\d+|[a-zA-Z])"), r"\\sqrt{\1}"),
    (re.compile(r"\\lbrace\b"), r"\\{"),
    (re.compile(r"\\rbrace\b"), r"\\}"),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\*\*"), "^"),
)
_NAMED = re.compile(r"\\?[a-zA-Z](?:_\{?\w+\}?)?(?:\([a-z]\))?\s*(?:=|\\in(?![a-zA-Z]))\s*")


def normalised(text: str) -> str:
    """One spelling of a formula: fractions, brackets, spaces, signs and delimiters as they are written most often."""
    text = text.strip().strip("*").strip()
    formula = _MATH.fullmatch(text)
    text = _inner(formula) if formula else text
    text = _SPACES.sub(" ", text)
    for pattern, spelling in _SPELLINGS:
        text = pattern.sub(spelling, text)
    text = " ".join(text.replace(r"\$", "").replace("$", "").replace(r"\%", "%").split())
    return text.rstrip(".,;: ").strip()


def _tight(text: str) -> str:
    r"""Without spaces, but for those that end a command; x^{2} as x^2."""
    text = _TEXT.sub(r"\1", text)
    text = re.sub(r"(\\[a-zA-Z]+) +(?=[a-zA-Z])| +", lambda found: f"{found[1]} " if found[1] else "", text)
    return re.sub(r"([\^_])\{(\w)\}", r"\1\2", text)


# -- numbers ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Number:
    """A number as it is written."""

    value: Fraction
    digits: int | None = None  # significant ones of a decimal; None: it is exact
    places: int = 0  # of a decimal, after the point
    percent: bool = False


_PLAIN = re.compile(rf"(?P<digits>{_DIGITS})(?:[eE](?P<exponent>[-+]?\d+))?")
_POWER = re.compile(
    rf"(?:(?P<digits>{_DIGITS})\s*(?:\\times|\\cdot|\*|x)\s*)?10\s*\^\s*\{{?\s*(?P<exponent>[-+]?\s*\d+)\s*\}}?"
)
_SLASH = re.compile(rf"(?P<whole>\d+\s+)?(?P<top>{_DIGITS})\s*/\s*(?P<bottom>{_DIGITS})")
_FRACTION = re.compile(
    rf"(?P<whole>\d+\s*)?\\frac\s*\{{\s*(?P<sign>[-+]?)\s*(?P<top>{_DIGITS})\s*\}}\s*\{{\s*(?P<bottom>{_DIGITS})\s*\}}"
)
_LETTER = re.compile(r"(?<![a-zA-Z\\{])[a-zA-Z](?![a-zA-Z])")
_UNIT = re.compile(
    r"(?:\s*(?:\\(?:text|mathrm|textrm|mbox|operatorname|rm)\s*\{[^{}]*\}|\\circ|\^\s*\\circ|\^\s*\{\s*\\circ\s*\})"
    r"|\s+(?!and\b|or\b|to\b|times\b|plus\b|minus\b|of\b)[a-zA-Z][a-zA-Z'-]*\.?|(?<=\w)\s*/\s*[a-zA-Z]+"
    r"|(?<=[a-zA-Z}])\s*\^\s*\{?\s*-?\d(?:\s*\})?)++"
)


def number(text: str, *, letters: bool = True) -> Number | None:
    """The number that a normalised text is, a sign, a currency, a unit or a percent sign beside it. None for anything
    else, and for exponents of ten beyond 400. With `letters` a unit may be a single letter, as a symbol is; without,
    "7.6 Z" is no number."""
    text = text.strip()
    if len(text) > _LONGEST:
        return None
    sign = 1
    if text.startswith(("+", "-")):
        sign, text = (-1 if text[0] == "-" else 1), text[1:].strip()
    text = text.lstrip("€£").strip()
    for pattern in (_FRACTION, _SLASH, _POWER, _PLAIN):
        found = pattern.match(text)
        if found is None:
            continue
        rest = text[found.end() :]
        percent = re.match(r"\s*(?:%|percent\b|per cent\b)", rest)
        rest = rest[percent.end() :] if percent else rest
        if rest.strip() and not (_UNIT.fullmatch(rest.rstrip()) and (letters or not _LETTER.search(rest))):
            continue
        return _read(found.groupdict(), sign, percent is not None)
    return None


def _read(parts: dict[str, str | None], sign: int, percent: bool) -> Number | None:
    if parts.get("top") is not None:
        top, bottom = _decimal(parts["top"] or ""), _decimal(parts["bottom"] or "")
        if bottom == 0:
            return None
        value = Fraction(top) / Fraction(bottom) * (-1 if parts.get("sign") == "-" else 1)
        return Number(value=sign * (int(parts["whole"] or 0) + value), percent=percent)
    exponent = int((parts.get("exponent") or "0").replace(" ", ""))
    if abs(exponent) > _MAX_EXPONENT:
        return None
    written = (parts.get("digits") or "1").replace(",", "")
    value = sign * Fraction(Decimal(written)) * Fraction(10) ** exponent
    if "." not in written.rstrip(".") and parts.get("exponent") is None:
        return Number(value=value, percent=percent)
    point = written.partition(".")[2]
    return Number(
        value=value, digits=len(written.replace(".", "").lstrip("0")), places=len(point) - exponent, percent=percent
    )


def _decimal(written: str) -> Decimal:
    return Decimal(written.replace(",", ""))


def same_number(gold: Number, found: Number) -> bool:
    """Whether two numbers are equal: exactly, or rounded to the digits of the one that is a decimal of at least six.
    A percent sign is a unit to one that has none: 50% is 50, and it is 1/2."""
    if gold.percent == found.percent:
        return _equal(gold, found)
    scaled, other = (gold, found) if gold.percent else (found, gold)
    hundredth = Number(value=scaled.value / 100, digits=scaled.digits, places=scaled.places + 2, percent=scaled.percent)
    return _equal(scaled, other) or _equal(hundredth, other)


def _equal(one: Number, other: Number) -> bool:
    if one.value == other.value:
        return True
    return any(
        a.digits is not None and a.digits >= _MIN_DIGITS and (b.digits is None or b.places > a.places) and _rounds(b, a)
        for a, b in ((one, other), (other, one))
    )


def _rounds(precise: Number, decimal: Number) -> bool:
    unit = Fraction(10) ** -decimal.places
    return abs(precise.value - decimal.value) * 2 <= unit


# -- structure -------------------------------------------------------------------------------------------------

_BRACKETS = ((r"\{", r"\}"), ("(", ")"), ("[", "]"), ("(", "]"), ("[", ")"))
_LIST, _SET, _UNION = "", "{}", "union"
_MAX_DEPTH = 60


@dataclass(frozen=True, slots=True)
class _Parts:
    kind: str  # the brackets around it, _LIST where there are none, or _UNION
    elements: tuple[str, ...]


def balanced(text: str) -> bool:
    """Whether brackets pair up, those of half-open intervals in any mixture, and are not nested too deeply."""
    depth, braces = 0, 0
    for character in text:
        braces += (character == "{") - (character == "}")
        depth += (character in "([") - (character in ")]")
        if min(depth, braces) < 0 or max(depth, braces) > _MAX_DEPTH:
            return False
    return depth == 0 and braces == 0


def _parts(text: str) -> _Parts | None:
    """A tuple, an interval, a set, a list or a union; None for a single value."""
    if len(united := _split(text, r"\cup")) > 1:
        return _Parts(_UNION, united)
    if len(listed := _split(text, ",")) > 1 and number(text) is None:
        return _Parts(_LIST, listed)
    for opening, closing in _BRACKETS:
        if text.startswith(opening) and text.endswith(closing) and len(text) > len(opening) + len(closing):
            inner = text[len(opening) : -len(closing)].strip()
            if balanced(inner) and (len(split := _split(inner, ",")) > 1 or opening == r"\{"):
                return _Parts(_SET if opening == r"\{" else opening + closing, split)
    return None


def _split(text: str, separator: str) -> tuple[str, ...]:
    """The parts of a text at the separators that are in no brackets; "and" and "or" are commas."""
    if separator == ",":
        text = re.sub(r"\s*,?\s*(?:\\text\{\s*)?\b(?:and|or)\b(?:\s*\})?\s*", ", ", text)
    parts, depth, start, place = [], 0, 0, 0
    while place < len(text):
        character = text[place]
        depth += (character in "([{") - (character in ")]}")
        if depth == 0 and text.startswith(separator, place):
            parts.append(text[start:place].strip())
            place += len(separator)
            start = place
            continue
        place += 1
    parts.append(text[start:].strip())
    return tuple(parts)


def compared(gold: str, answer: str) -> bool | None:
    """Whether an answer equals the gold one; None where that takes algebra. Both as `conclusion` gives them."""
    return _compared(normalised(gold), normalised(answer))


def _compared(gold: str, answer: str) -> bool | None:
    one, other = _tight(gold), _tight(answer)
    if one == other or (one.isalpha() and len(one) > 2 and one.lower() == other.lower()):
        return True
    if _NAMED.match(gold) or "=" not in gold:
        gold, answer = _unnamed(gold), _unnamed(answer)
    elif "=" not in answer:
        return False
    ours, theirs = _parts(gold), _parts(answer)
    if ours is not None and theirs is not None:
        return _same_parts(ours, theirs)
    if ours is not None or theirs is not None:
        return _across(gold, answer, ours, theirs)
    expected, found = number(gold, letters=False), number(answer)
    if expected is not None and found is not None:
        return same_number(expected, found)
    return None


def _unnamed(text: str) -> str:
    """Without "x =" before a value, or the sum that it is the result of."""
    if "=" in text and not re.search(r"[a-zA-Z<>]", text):
        return text.rpartition("=")[2].strip()
    name = _NAMED.match(text)
    return text[name.end() :] if name and "=" not in text[name.end() :] else text


def _across(gold: str, answer: str, ours: _Parts | None, theirs: _Parts | None) -> bool | None:
    """One side alone has parts: the set of one value is that value, anything else is wrong, or takes algebra."""
    parts, other = (ours, answer) if ours is not None else (theirs, gold)
    assert parts is not None
    if parts.kind == _SET and len(parts.elements) == 1:
        return _compared(*((parts.elements[0], other) if ours is not None else (other, parts.elements[0])))
    if number(other) is not None:
        return False
    return None if ours is None or re.search(r"[<>=]|\\[lg]eq", answer) else False


def _same_parts(ours: _Parts, theirs: _Parts) -> bool | None:
    kinds = {ours.kind, theirs.kind}
    if len(ours.elements) != len(theirs.elements) or (len(kinds) > 1 and kinds not in ({_LIST, _SET}, {_LIST, "()"})):
        return False
    if kinds <= {_LIST, _SET, _UNION}:
        return _same_in_any_order(ours.elements, theirs.elements)
    return _all(_compared(a, b) for a, b in zip(ours.elements, theirs.elements, strict=True))


def _same_in_any_order(ours: tuple[str, ...], theirs: tuple[str, ...]) -> bool | None:
    left, unknown = list(theirs), False
    for element in ours:
        verdicts = [_compared(element, other) for other in left]
        if True in verdicts:
            del left[verdicts.index(True)]
        elif None in verdicts:
            unknown = True
        else:
            return False
    return None if unknown else True


def _all(verdicts: Iterable[bool | None]) -> bool | None:
    seen = list(verdicts)
    if False in seen:
        return False
    return None if None in seen else True
