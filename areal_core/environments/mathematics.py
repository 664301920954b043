r"""Mathematical answers: extract the conclusion of a completion, and compare it with the gold answer.

    conclusion(text) -> the final answer of a text, as written
    compared(gold, answer) -> whether they are equal

Lists, sets, tuples, intervals, matrices, equations and quantities with units are compared part by part. This module
compares plain numbers exactly; `areal_core.environments.algebra` compares formulas. A part that neither can parse
equals only its own text.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from areal_core.environments import algebra
from areal_core.environments.quantities import DIGITS, measured, number, rounds, same_number, times, unit_at_start
from areal_core.environments.spelling import normalised

_LAST = 4000  # characters at the end of a completion that are searched for its conclusion
_ALONE = 200  # most characters of a text that may be an answer by itself
_BOXES = 20  # most boxes that may form one answer

_COMMAND = re.compile(r"\\(?:text|mathrm|textrm|mbox)\s*\{[^{}]*\}|\\(?:begin|end)\{\w+\}|\\[a-zA-Z]+")
_WORD = re.compile(r"\b(?!and\b|sin\b|cos\b|tan\b|log\b|exp\b|sqrt\b)[a-zA-Z]{3,}|\b(?:it|is|so|we)\b", re.IGNORECASE)
_ANSWER = re.compile(
    r"\b(?:answers?|correct (?:option|choice))\b"
    r"\W{0,4}\s*(?:(?:is|are|equals)\b\s*:?|[:=\uff1a])\s*|\u7b54\u6848(?:[\u662f\u4e3a:\uff1a]|\s){1,9}",
    re.IGNORECASE,
)
_MATH = re.compile(r"\$\$(.+?)\$\$|\$([^$\n]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_BOXED_WORD = re.compile(r"\\boxed\s*+(?!\{)([^\s$]*)")
_BETWEEN = re.compile(  # text between boxes or formulas that form one answer
    r"(?:[\s$,;/]|\\\\|\\quad|\\text\s*\{\s*(?:and|or)\s*\}|(?:and|or|maybe|perhaps|possibly)(?![a-zA-Z]))*+"
)
_OR = re.compile(r"\s*,?\s*or\s+")
_HEDGE = re.compile(
    r"\b(?:or|not|but|maybe|perhaps|either|neither|both|between|if|else|unless|wrong|incorrect|false|probably|possibly"
    r"|and|more|less|than|factorial|squared|cubed|over|times|plus|minus|to|divided)\b",
    re.IGNORECASE,
)
_OPTION = re.compile(r"(?:option|choice)?\s*\(([A-J])\)(?!\s*(?:or|and|[,/(])|\w)", re.IGNORECASE)
_IN_WORDS = re.compile(rf"(?<![\w.])[-+\u2212]?(?:[$€£]\s?)?(?:{DIGITS})(?:[eE][-+]?\d+\b)?(?:\s?/\s?\d+)?(?:\s?%)?")

_VALUE = re.compile(rf"{_MATH.pattern}|({_IN_WORDS.pattern})", re.DOTALL)

Span = tuple[int, int, str]  # start and end in a text, and the content


def conclusion(text: str) -> str | None:
    r"""Extract the final answer of a text; None if it has none.

    The answer is the last `\boxed{...}`. Without one, it is the last <answer> or the text after the last `####`.
    Without these, it follows the last "answer is", or is the last formula or number. If the text has </think>, only the
    text after it counts. An unclosed box gives ""."""
    after = text.rpartition("</think>")[2]
    text = after if after.strip() else text
    if (marked := _marked(text)) is not None:
        return marked
    text = text[-_LAST:].strip()
    said = list(_ANSWER.finditer(text))
    if said and (found := _sentence(text[said[-1].end() :])):
        return found
    if 0 < len(text) <= _ALONE and not re.search(r"[\n#]", text) and not _WORD.search(_COMMAND.sub("", text)):
        return text
    return _last_value(text)


def gold_answer(field: str) -> str | None:
    """Extract the gold answer from a data field: the answer itself, or a solution that ends with it."""
    marked, field = _marked(field), field.strip()
    if marked is not None:
        return marked or None
    return field or None if len(field) <= _ALONE and "\n" not in field else conclusion(field)


def _marked(text: str) -> str | None:
    text = text.replace(r"\fbox", r"\boxed")
    if boxes := list(itertools.islice(_boxes(text), _BOXES)):  # "\boxed{3} or \boxed{4}" is one answer
        whole = list(itertools.takewhile(lambda box: box[2], boxes))
        return ", ".join(dict.fromkeys(_joined(text, whole, _BETWEEN)))
    for mark, end in ("<answer>", "</answer>"), ("####", "\n"):
        _, found, after = text.rpartition(mark)
        if found:
            return after.strip().partition(end)[0].strip() or None
    return None


def _boxes(text: str) -> Iterator[Span]:
    """The boxes of a text, the last one first. An unclosed box is empty."""
    at = len(text)
    while (at := text.rfind(r"\boxed", 0, at)) >= 0:
        word = _BOXED_WORD.match(text, at)
        if word is not None:
            yield at, word.end(), word[1].rstrip(".,")
            continue
        depth = 0
        for brace in re.compile("[{}]").finditer(text, at):
            depth += 1 if brace.group() == "{" else -1
            if depth == 0:
                yield at, brace.end(), text[at : brace.start()].partition("{")[2].strip()
                break
        else:
            yield at, len(text), ""


def _joined(text: str, spans: Sequence[Span], between: re.Pattern[str]) -> list[str]:
    """The content of the first span, and of later spans in a row that only a joint separates."""
    row = list(spans[:1])
    for pair in itertools.pairwise(spans):
        (_, end, _), (start, _, _) = sorted(pair)
        if end > start or not between.fullmatch(text, end, start):
            break
        row.append(pair[1])
    return [content for _, _, content in sorted(row)]


def _sentence(text: str) -> str | None:
    """Extract the answer after "the answer is": the sentence's first formulas, else its first value.
    If the sentence names several answers, return all of it."""
    line = re.split(r"\.(?:\s|$)|;\s|\n\s*\n|\u3002", text.strip(), maxsplit=1)[0].strip().strip("*").strip()
    line = re.split(r",\s+(?:I|as|since|because|which)\b", line, maxsplit=1)[0]
    if option := _OPTION.match(line):
        return option[1]
    if formulas := _spans(_MATH, line):
        shown = _joined(line, formulas, _BETWEEN)
        unit = unit_at_start(line[formulas[0][1] :].replace("\\%", "%")) if len(shown) == 1 else ""
        return ", ".join(shown) + unit
    counted = _IN_WORDS.match(line)
    if counted is not None and (word := re.match(r"\s+[a-zA-Z]{2,}", line[counted.end() :])):
        if unit := unit_at_start(line[counted.end() :]):
            return counted.group().strip() + unit
        is_whole = not _HEDGE.match(word.group().strip()) and not re.match(r"\s+\w+\s+\d", line[counted.end() :])
        return counted.group().strip() if is_whole else line
    is_prose = len(_WORD.findall(_COMMAND.sub("", line))) > 1
    return ((is_prose and not _HEDGE.search(line) and _last_value(line)) or line) or None


def _last_value(text: str) -> str | None:
    """The last formula or number, with earlier ones that "or" joins to it."""
    spans = _spans(_VALUE, text)[::-1]
    return ", ".join(_joined(text, spans, _OR)) + unit_at_start(text[spans[0][1] :]) if spans else None


def _spans(pattern: re.Pattern[str], text: str) -> list[Span]:
    found = pattern.finditer(text)
    return [(one.start(), one.end(), next(filter(None, one.groups())).strip()) for one in found]


# -- structure ---------------------------------------------------------------------------------------------------------

_MAX_DEPTH = 60
_SEPARATOR = re.compile(r"\s*(?:[,;\n]|(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z]))\s*(?:(?:and|or)(?![a-zA-Z])\s*)?")
_LISTED = re.compile(rf"(?!(?<=\d),\d{{3}}(?!\d)){_SEPARATOR.pattern}")  # not in 1,234
_RELATION = re.compile(r"\\leq|\\geq|\\neq|\\approx|[<>=]")
_CUP, _COLON, _CELL = (re.compile(pattern) for pattern in (r"\\cup(?![a-zA-Z])", ":", "&"))
_VARIABLE = re.compile(r"(?:[a-zA-Z]|\\(?!infty|pi)[a-z]+)(?:_\{[^{}]*\}|_\w)?")
_IN = re.compile(rf"({_VARIABLE.pattern})\s*\\in(?![a-zA-Z])\s*")
_BUILDER = re.compile(
    rf"\\\{{\s*{_VARIABLE.pattern}\s*(?:\\in\s*\\R)?\s*[|:]\s*(.+?)(?:\s*,\s*[a-z]\s*\\in\s*\\R)?\s*\\\}}", re.DOTALL
)
_WRAPPED = re.compile(r"(?P<opening>\\?\{|[(\[])(?P<inner>.*?)(?P<closing>\\?\}|[)\]])", re.DOTALL)
_MATRIX = re.compile(
    r"(?P<by>[^\n&=]*?)\\begin\s*\{(?:[pbB]?|small)(?:matrix|array)\}(?:\s*\{[lcr|]*\})?(?P<rows>.*)\\end\s*\{\w+\}"
    r"(?P<turned>\s*\^\s*\{?\s*(?:\\top|T)\s*\}?)?",
    re.DOTALL,
)
_CHOICE = re.compile(
    r"(?P<word>(?i:(?:the\s+)?(?:option|choice|answer)\s*:?\s*))?(?P<bracket>\()?(?P<letter>[A-J])"
    r"(?(bracket)\)|(?![a-zA-Z])(?P<mark>[.):])?)\s*(?P<rest>.*)",
    re.DOTALL,
)
_OTHER_CHOICE = re.compile(r"[-+*/^_=<>!,]|.*(?<![a-zA-Z\\])[A-J](?![a-zA-Z])", re.DOTALL)
_SHORT_WORDS = "no yes odd dne red one two six ten all day sat sun mon tue wed thu fri boy cat dog her him"

Parts = tuple[str, ...]


def balanced(text: str) -> bool:
    """Whether brackets pair up, are not nested too deeply, and may mix as in half-open intervals."""
    depth, braces = 0, 0
    for character in text:
        braces += (character == "{") - (character == "}")
        depth += (character in "([") - (character in ")]")
        if min(depth, braces) < 0 or max(depth, braces) > _MAX_DEPTH:
            return False
    return depth == 0 and braces == 0


def compared(gold: str, answer: str) -> bool:
    """Whether an answer equals the gold answer. Both must come from `conclusion`."""
    expected, found = number(gold), number(answer)
    if expected is not None and found is not None:
        return same_number(expected, found)
    gold, answer = normalised(gold), normalised(answer)
    return _same_choice(gold, answer) or _same(gold, answer)


def _same_choice(gold: str, answer: str) -> bool:
    """Whether both name the same option of a multiple choice, such as "(B) 7" and "B"."""
    ours, theirs = _CHOICE.fullmatch(gold), _CHOICE.fullmatch(answer)
    if not ours or not theirs or ours["letter"] != theirs["letter"] or (ours["rest"] and not ours["bracket"]):
        return False
    rest = theirs["rest"]
    if not rest or ours["rest"]:
        return not rest or _same(ours["rest"], rest)
    marked = theirs["bracket"] or theirs["mark"] or theirs["word"]
    return bool(marked) and not _OTHER_CHOICE.match(rest) and not _HEDGE.search(rest)


def _same(gold: str, answer: str) -> bool:
    gold, answer = _bare(gold), _bare(answer)
    if _tight(gold) == _tight(answer) or _same_words(gold, answer):
        return True
    ours, theirs = _ranges(gold), _ranges(answer)
    if ours is not None and theirs is not None:
        return _matched(ours, theirs, _same_range)
    mine, others = _sequence(gold), _sequence(answer)
    if mine is not None and others is not None:
        return _same_sequence(mine, others)
    if (mine is not None and mine[0] == "list") or (others is not None and others[0] == "list"):
        return False
    expected, found = _split(gold, _RELATION), _split(answer, _RELATION)
    if len(expected[0]) > 1 or len(found[0]) > 1:
        return _same_relation(expected, found)
    return mine is None and others is None and _same_value(gold, answer)


def _bare(text: str) -> str:
    """Remove brackets around the whole text, and the variable of "x in"."""
    text = text.strip()
    if found := _IN.match(text):
        text = text[found.end() :]
    if built := _BUILDER.fullmatch(text):
        text = built[1]
    while (wrapped := _WRAPPED.fullmatch(text)) and wrapped["opening"] != "[" and balanced(wrapped["inner"]):
        if wrapped["opening"] + wrapped["closing"] == "(]" or len(_split(wrapped["inner"], _SEPARATOR)[0]) > 1:
            break
        text = wrapped["inner"].strip()
    return text


def _tight(text: str) -> str:
    """Remove spaces, except between a command or number and a letter or digit; write x^{2} as x^2."""
    text = re.sub(r"(\\[a-zA-Z]+|\d)\s+(?=[a-zA-Z\d])", "\\1\0", text)
    return re.sub(r"([\^_])\{(\w)\}", r"\1\2", re.sub(r"\s+", "", text))


def _same_words(gold: str, answer: str) -> bool:
    """Whether two texts are the same words, ignoring case. Symbols keep their case."""
    one, other = (re.sub(r"^(?:the|an?) |[.'\"]", "", " ".join(text.lower().split())) for text in (gold, answer))
    if one != other or not re.fullmatch(r"[a-z][a-z -]*", one):
        return False
    return len(one) > 3 or one in _SHORT_WORDS.split() or (len(one) > 2 and gold.istitle() and answer.istitle())


def _split(text: str, pattern: re.Pattern[str]) -> tuple[Parts, Parts]:
    """Split a text at separators outside brackets. Returns the parts and the separators."""
    shape = text.replace(r"\begin", "(-----").replace(r"\end", ")---")
    depths = list(itertools.accumulate(((one in "([{") - (one in ")]}") for one in shape), initial=0))
    parts, separators, start = [], [], 0
    for found in pattern.finditer(text):
        if depths[found.start()] == 0:
            parts.append(text[start : found.start()].strip())
            separators.append(found.group().strip())
            start = found.end()
    return (*parts, text[start:].strip()), tuple(separators)


def _matched(ours: Sequence[Any], theirs: Sequence[Any], same: Callable[[Any, Any], bool]) -> bool:
    """Whether two collections are the same in any order."""
    left = list(theirs) if len(ours) == len(theirs) else []
    for one in ours:
        place = next((place for place, other in enumerate(left) if same(one, other)), None)
        if place is None:
            return False
        del left[place]
    return len(ours) == len(theirs)


# -- sets of real numbers ----------------------------------------------------------------------------------------------

_REALS = re.compile(r"\\R(?:\s*(?:\\setminus|\\backslash|-)\s*\\\{(.+)\\\})?|(?i:all real(?: number)?s?)")
_BRACKETS = {"<": "()", ">": "()", r"\leq": "[]", r"\geq": "[]"}


@dataclass(frozen=True, slots=True)
class _Range:
    brackets: str
    ends: Parts
    variable: str = ""


def _ranges(text: str) -> list[_Range] | None:
    """Parse intervals in any notation: brackets, inequalities, a set with a condition.
    None for other texts."""
    text = _bare(text)
    if removed := _REALS.fullmatch(text):
        return _without(_split(removed[1], _SEPARATOR)[0] if removed[1] else ())
    joined, joints = _split(text, _CUP)
    each: Callable[[str], list[_Range] | None] = _ranges
    wrapped = _WRAPPED.fullmatch(text)
    if len(joined) == 1 and wrapped and text[0] in "([" and balanced(wrapped["inner"]):
        ends, _ = _split(wrapped["inner"], _SEPARATOR)
        if len(ends) == 2:
            return [_range(text[0] + text[-1], *ends)]
    if len(joined) == 1:
        (joined, joints), each = _split(text, _SEPARATOR), _inequality
    found = [each(part) for part in joined]
    if None in found:
        return None
    listed = [one for part in found for one in part or ()]
    return listed if {r"\cup", "or"} & {*joints} else _both(listed)


def _range(brackets: str, low: str, high: str, variable: str = "") -> _Range:
    opening = "(" if r"\infty" in low else brackets[0]
    closing = ")" if r"\infty" in high else brackets[1]
    return _Range(opening + closing, (low, high), variable)


def _without(points: Parts, variable: str = "") -> list[_Range]:
    ends = [r"-\infty", *sorted(points, key=lambda point: algebra.value(point) or 0.0), r"\infty"]
    return [_range("()", low, high, variable) for low, high in itertools.pairwise(ends)]


def _inequality(text: str) -> list[_Range] | None:
    terms, signs = _split(text, _RELATION)
    if signs == (r"\neq",) and _VARIABLE.fullmatch(terms[0]):
        return _without(terms[1:], terms[0])
    if signs and set(signs) <= {">", r"\geq"}:
        terms, signs = terms[::-1], signs[::-1]
    elif not signs or not set(signs) <= {"<", r"\leq"}:
        return None
    if len(terms) == 2 and _VARIABLE.fullmatch(terms[0]):
        terms, signs = (r"-\infty", *terms), ("<", *signs)
    elif len(terms) == 2:
        terms, signs = (*terms, r"\infty"), (*signs, "<")
    if len(terms) != 3 or not _VARIABLE.fullmatch(terms[1]):
        return None
    return [_range(_BRACKETS[signs[0]][0] + _BRACKETS[signs[1]][1], terms[0], terms[2], terms[1])]


def _both(listed: list[_Range]) -> list[_Range]:
    """Merge two rays that overlap into one interval."""
    above, below = (
        [one for one in listed if one.ends[place] == end] for place, end in ((1, r"\infty"), (0, r"-\infty"))
    )
    if len(above) == len(below) == 1 and len(listed) == 2:
        ends = (above[0].ends[0], below[0].ends[1])
        low, high = map(algebra.value, ends)
        if low is not None and high is not None and low < high:
            return [_Range(above[0].brackets[0] + below[0].brackets[1], ends, above[0].variable)]
    return listed


def _same_range(one: _Range, other: _Range) -> bool:
    alike = one.brackets == other.brackets and len({one.variable, other.variable} - {""}) < 2
    return alike and all(map(_same, one.ends, other.ends))


# -- lists, sets, tuples, matrices -------------------------------------------------------------------------------------

_ALIKE = {"list": ("set", "()"), "()": ("column", "row", "matrix"), "[]": ("column", "row", "matrix")}


def _sequence(text: str) -> tuple[str, Parts] | None:
    """The kind and the elements of a list, a set, a tuple or a matrix; None for a single value."""
    if found := _MATRIX.fullmatch(text):
        return _matrix(found)
    listed = _expanded(_split(text, _LISTED)[0])
    if len(listed) > 1:
        return "list", listed
    ratio, _ = _split(text, _COLON)
    if len(ratio) > 2:
        return ":", tuple(f"({one})/({ratio[0]})" for one in ratio)
    wrapped = _WRAPPED.fullmatch(text)
    if wrapped is None or not wrapped["inner"] or not balanced(wrapped["inner"]):
        return None
    elements, _ = _split(wrapped["inner"], _SEPARATOR)
    if "{" in wrapped["opening"]:
        return "set", _expanded(elements)
    kind = wrapped["opening"] + wrapped["closing"]
    return (kind, elements) if len(elements) > 1 or _sequence(wrapped["inner"]) else None


def _matrix(found: re.Match[str]) -> tuple[str, Parts]:
    by = found["by"].strip()
    rows = [_split(row, _CELL)[0] for row in found["rows"].split("\n") if row.strip()]
    rows = [tuple(f"({by})({cell})" if by else cell for cell in row) for row in rows]
    rows = list(zip(*rows, strict=False)) if found["turned"] else rows
    if len(rows) == 1 or all(len(row) == 1 for row in rows):
        return "row" if len(rows) == 1 else "column", tuple(cell for row in rows for cell in row)
    return "matrix", tuple(f"[{', '.join(row)}]" for row in rows)


def _expanded(parts: Parts) -> Parts:
    r"""Expand values: two for each with one \pm, or with \mp."""
    return tuple(
        part.replace(r"\pm", one).replace(r"\mp", other)
        for part in parts
        for one, other in (("+-", "-+") if r"\mp" in part or part.count(r"\pm") == 1 else ((r"\pm", r"\mp"),))
    )


def _same_sequence(ours: tuple[str, Parts], theirs: tuple[str, Parts]) -> bool:
    (kind, mine), (other, others) = ours, theirs
    if len(mine) != len(others):
        return False
    names, other_names = ({_name(part) for part in parts} - {None} for parts in (mine, others))
    counts = (len(names), len(other_names))
    if kind == other == "list" and min(counts) > 1:
        return _matched(mine, others, _same)
    if counts == (1, 1) and names != other_names:
        return False
    if {kind, other} == {"list", "()"} and 1 in counts:
        return False  # the values of one symbol are not a point
    mine, others = (
        tuple(part.partition("=")[2] if _name(part) else part for part in parts) for parts in (mine, others)
    )
    if {kind, other} <= {"list", "set"} and max(counts) < 2:
        return _matched(mine, others, _same)
    alike = kind == other or other in _ALIKE.get(kind, ()) or kind in _ALIKE.get(other, ())
    return alike and all(map(_same, mine, others))


def _name(text: str) -> str | None:
    """The symbol to which an equation assigns a value; None for other texts."""
    terms, signs = _split(text, _RELATION)
    return terms[0] if signs == ("=",) and _VARIABLE.fullmatch(terms[0]) else None


# -- equations ---------------------------------------------------------------------------------------------------------


def _same_relation(gold: tuple[Parts, Parts], answer: tuple[Parts, Parts]) -> bool:
    (ours, signs), (theirs, others) = gold, answer
    if not {*signs, *others} <= {"=", r"\approx"}:
        kinds = {_BRACKETS.get(sign) for sign in (*signs, *others)}
        is_alike = len(kinds) == 1 and None not in kinds
        return is_alike and _factor(ours, theirs) == (1 if signs == others else -1)
    name, last = ours[0], ours[-1]
    if len(ours) > 1 and not _is_named(name, last):
        return _factor(ours, theirs) != 0
    if len(ours) > 1 and len(theirs) > 1 and _tight(theirs[0]) != _tight(name):
        if algebra.symbols(last):
            return _factor(ours, theirs) != 0
        if _VARIABLE.fullmatch(name) and _VARIABLE.fullmatch(theirs[0]):
            return False
    return _concludes(last, theirs, others)


def _factor(ours: Parts, theirs: Parts) -> int:
    """The sign of `algebra.factor` for two equations or inequalities of two sides; 0 for longer ones."""
    return algebra.factor((ours[0], ours[1]), (theirs[0], theirs[1])) if len(ours) == len(theirs) == 2 else 0


def _is_named(name: str, last: str) -> bool:
    """Whether an equation gives a value to a name, such as a symbol or f(x), or to a number."""
    is_product = re.search(r"[-+*/^]|\\sqrt|^[a-z]\s*[a-z]$", re.sub(r"_\{[^{}]*\}", "", name))
    is_word = last.isalpha() and len(last) > 2
    return not is_word and (algebra.value(name) is not None or (_is_name(name) and not is_product))


def _is_name(text: str) -> bool:
    """Whether a text may be a name before "=": letters, and digits only in indices or arguments."""
    if text in ("e", "i"):
        return True
    if not re.search(r"[a-zA-Z]", text) or algebra.value(text) is not None:
        return False
    return not _HEDGE.search(re.sub(r"\\[a-zA-Z]+", "", text)) and not re.search(r"\d", _stripped(text))


def _stripped(text: str) -> str:
    """Remove indices and the arguments of functions."""
    return re.sub(r"_\{[^{}]*\}|_\w|\([^()]*\)", "", text)


def _concludes(gold: str, terms: Parts, signs: Parts) -> bool:
    """Whether a chain of equations is true and includes the gold answer. It may begin or end with a name."""
    if terms[0] == "" or (_is_name(terms[0]) and not algebra.symbols(_stripped(terms[0])) & algebra.symbols(gold)):
        terms, signs = terms[1:], signs[1:]
    elif len(terms) == 2 and _VARIABLE.fullmatch(terms[1]) and not algebra.symbols(gold):
        terms, signs = terms[:1], ()
    links = zip(terms, signs, terms[1:], strict=False)
    holds = all(_same(one, other) if sign == "=" else _near(one, other) for one, sign, other in links)
    return holds and any(_same(gold, term) for term in terms)


def _near(precise: str, rounded: str) -> bool:
    exact, decimal = algebra.value(precise), number(rounded)
    return exact is not None and decimal is not None and rounds(Fraction(exact), decimal, digits=0)


# -- single values -----------------------------------------------------------------------------------------------------


def _same_value(gold: str, answer: str) -> bool:
    if based := re.fullmatch(r"(\d\w*)_\{\d+\}", gold):  # an answer may omit the base
        return answer.lstrip("0") == based[1]
    if gold in _SHORT_WORDS.split():  # a word, not a product of symbols
        return False
    value, unit = measured(gold)
    other, other_unit = measured(answer)
    if unit is not None and other_unit is not None:
        alike = unit.powers == other_unit.powers
        return alike and _equal(times(value, unit.size), times(other, other_unit.size))
    if _equal(gold, answer):
        return True
    if unit is None and other_unit is not None and other_unit.powers == (("%", 1),):
        return abs(algebra.value(gold) or 0) > 1 and _equal(gold, other)
    return _equal(value, other)


def _equal(one: str, other: str) -> bool:
    """Whether two formulas are equal, or one is a long decimal to which the other rounds."""
    first, second = number(one), number(other)
    if first is not None and second is not None:
        return same_number(first, second)
    for decimal, text in ((first, other), (second, one)):
        value = algebra.value(text) if decimal is not None else None
        if decimal is not None and value is not None and rounds(Fraction(value), decimal):
            return True
    return algebra.equal(one, other)
