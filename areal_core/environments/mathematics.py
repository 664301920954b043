r"""Mathematical answers: what a completion concludes, and whether that equals the gold answer.

    conclusion(text) -> the answer that a text ends on, as it stands there
    compared(gold, answer) -> whether they are equal

Lists, sets, tuples, intervals, matrices, equations and quantities with units are compared part by part. Plain numbers
are compared here, exactly; formulas by `areal_core.environments.algebra`. What neither can read equals its own text
alone.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeVar

from areal_core.environments import algebra
from areal_core.environments.quantities import DIGITS, Unit, measured, number, rounds, same_number, unit_at_start
from areal_core.environments.spelling import normalised

_LAST = 4000  # characters of a completion that are searched for its conclusion
_ALONE = 200  # characters of a text that may be an answer and nothing else
_BOXES = 20  # boxes that may hold one answer together

_COMMAND = re.compile(r"\\(?:text|mathrm|textrm|mbox)\s*\{[^{}]*\}|\\(?:begin|end)\{\w+\}|\\[a-zA-Z]+")
_WORD = re.compile(r"\b(?!and\b|sin\b|cos\b|tan\b|log\b|exp\b|sqrt\b)[a-zA-Z]{3,}|\b(?:it|is|so|we)\b", re.IGNORECASE)
_ANSWER = re.compile(
    r"\b(?:answers?|correct (?:option|choice))\b"
    r"\W{0,4}\s*(?:(?:is|are|equals)\b\s*:?|[:=\uff1a])\s*|\u7b54\u6848(?:[\u662f\u4e3a:\uff1a]|\s){1,9}",
    re.IGNORECASE,
)
_MATH = re.compile(r"\$\$(.+?)\$\$|\$([^$\n]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_JOINED = re.compile(r"[\s$]*(?:,|and|or|,\s*and|,\s*or)[\s$]*")
_BETWEEN = re.compile(  # boxes that hold one answer together
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


def conclusion(text: str) -> str | None:
    r"""The answer that a text ends on: its last `\boxed{...}`; else its last <answer>, what follows its last `####`, or
    the last "answer is"; else its last formula or number. Of a text that ends its thoughts with </think>, the rest
    counts. "" for a box that is not closed, None where there is nothing of these."""
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
    """The gold answer in a field of a data set, which holds it alone, or a solution that ends on it."""
    marked, field = _marked(field), field.strip()
    if marked is not None:
        return marked or None
    return field or None if len(field) <= _ALONE and "\n" not in field else conclusion(field)


def _marked(text: str) -> str | None:
    at = _last_box(text, len(text))
    if at >= 0:
        content, _ = _braced(text, at)
        contents = [content]
        while content and len(contents) < _BOXES:  # "\boxed{3} or \boxed{4}" is one answer
            start = at
            at = _last_box(text, start)
            earlier, end = _braced(text, at) if at >= 0 else ("", 0)
            if not (earlier and end <= start and _BETWEEN.fullmatch(text, end, start)):
                break
            contents.insert(0, earlier)
        return ", ".join(dict.fromkeys(contents))
    for mark, end in ("<answer>", "</answer>"), ("####", "\n"):
        _, found, after = text.rpartition(mark)
        if found:
            return after.strip().partition(end)[0].strip() or None
    return None


def _last_box(text: str, end: int) -> int:
    return max(text.rfind(r"\boxed", 0, end), text.rfind(r"\fbox", 0, end))


def _braced(text: str, at: int) -> tuple[str, int]:
    """The content of the first braces of a text, or the word after `boxed`; and where that ends."""
    start = at + (6 if text.startswith(r"\boxed", at) else 5)
    start += len(text[start : start + _ALONE]) - len(text[start : start + _ALONE].lstrip())
    if not text.startswith("{", start):
        word = re.compile(r"[^\s$]*").match(text, start)
        assert word is not None
        return word.group().rstrip(".,"), word.end()
    depth = 0
    for brace in re.compile("[{}]").finditer(text, start):
        depth += 1 if brace.group() == "{" else -1
        if depth == 0:
            return text[start + 1 : brace.start()].strip(), brace.end()
    return "", len(text)


def _sentence(text: str) -> str | None:
    """The answer in the rest of a sentence that says "the answer is": its first formulas, else its first value. The
    whole of it, if it names several."""
    line = re.split(r"\.(?:\s|$)|;\s|\n\s*\n|\u3002", text.strip(), maxsplit=1)[0].strip().strip("*").strip()
    line = re.split(r",\s+(?:I|as|since|because|which)\b", line, maxsplit=1)[0]
    if option := _OPTION.match(line):
        return option[1]
    formulas = list(_MATH.finditer(line))
    if formulas:
        shown, end = [_inner(formulas[0])], formulas[0].end()
        for formula in formulas[1:]:
            if not _JOINED.fullmatch(line[end : formula.start()]):
                break
            shown.append(_inner(formula))
            end = formula.end()
        return ", ".join(shown) + (unit_at_start(line[end:].replace("\\%", "%")) if len(shown) == 1 else "")
    counted = _IN_WORDS.match(line)
    if counted is not None and (word := re.match(r"\s+[a-zA-Z]{2,}", line[counted.end() :])):
        if unit := unit_at_start(line[counted.end() :]):
            return counted.group().strip() + unit
        is_whole = not _HEDGE.match(word.group().strip()) and not re.match(r"\s+\w+\s+\d", line[counted.end() :])
        return counted.group().strip() if is_whole else line
    is_prose = len(_WORD.findall(_COMMAND.sub("", line))) > 1
    return ((is_prose and not _HEDGE.search(line) and _last_value(line)) or line) or None


def _last_value(text: str) -> str | None:
    """The last formula or number; with those before it that "or" joins to it."""
    spans = [(found.start(), found.end(), _inner(found)) for found in _MATH.finditer(text)]
    inside = {place for start, end, _ in spans[-_BOXES:] for place in range(start, end)}
    spans += [
        (found.start(), found.end(), found.group().strip())
        for found in _IN_WORDS.finditer(text)
        if found.start() not in inside
    ]
    spans.sort()
    if not spans:
        return None
    last = [spans[-1][2] + unit_at_start(text[spans[-1][1] :])]
    for one, other in itertools.pairwise(reversed(spans)):
        if not _OR.fullmatch(text[other[1] : one[0]]):
            break
        last.insert(0, other[2])
    return ", ".join(last)


def _inner(formula: re.Match[str]) -> str:
    return next(group for group in formula.groups() if group is not None).strip()


# -- structure ---------------------------------------------------------------------------------------------------------

_MAX_DEPTH = 60
_SEPARATOR = re.compile(r"\s*(?:[,;\n]|(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z]))\s*(?:(?:and|or)(?![a-zA-Z])\s*)?")
_LISTED = re.compile(rf"(?!(?<=\d),\d{{3}}(?!\d)){_SEPARATOR.pattern}")  # not in 1,234
_RELATION = re.compile(r"\\leq|\\geq|\\neq|\\approx|[<>=]")
_CUP, _COLON, _ROW, _CELL = (re.compile(pattern) for pattern in (r"\\cup(?![a-zA-Z])", ":", "\n", "&"))
_SYMBOL = r"\\?[a-zA-Z]+'*(?:_\{[^{}]*\}|_\w)?'*"
_VARIABLE = re.compile(r"(?:[a-zA-Z]|\\(?!infty|pi)[a-z]+)(?:_\{[^{}]*\}|_\w)?")
_IN = re.compile(rf"({_VARIABLE.pattern})\s*\\in(?![a-zA-Z])\s*")
_BUILDER = re.compile(
    rf"\\\{{\s*{_VARIABLE.pattern}\s*(?:\\in\s*\\R)?\s*[|:]\s*(.+?)(?:\s*,\s*[a-z]\s*\\in\s*\\R)?\s*\\\}}", re.DOTALL
)
_MATRIX = re.compile(
    r"(?P<by>[^\n&=]*?)\\begin\s*\{(?:[pbB]?|small)(?:matrix|array)\}(?:\s*\{[lcr|]*\})?(?P<rows>.*)\\end\s*\{\w+\}"
    r"(?P<turned>\s*\^\s*\{?\s*(?:\\top|T)\s*\}?)?",
    re.DOTALL,
)
_CLOCK = re.compile(r"(\d{1,2}):([0-5]\d)\s*(?:([ap])\.?\s*m\.?)?", re.IGNORECASE)
_BASED = re.compile(r"\(?(\d[\dA-F]*)\)?\s*_\s*\{?\s*(\d+)\s*\}?")
_CHOICE = re.compile(
    r"(?P<word>(?i:(?:the\s+)?(?:option|choice|answer)\s*:?\s*))?"
    r"(?:\((?P<marked>[A-J])\)|(?P<bare>[A-J])(?![a-zA-Z])(?P<mark>[.):])?)\s*(?P<rest>.*)",
    re.DOTALL,
)
_SHORT_WORDS = "no yes odd dne red one two six ten all day sat sun mon tue wed thu fri boy cat dog her him"

Parts = tuple[str, ...]
Item = TypeVar("Item")


def balanced(text: str) -> bool:
    """Whether brackets pair up, those of half-open intervals in any mixture, and are not nested too deeply."""
    depth, braces = 0, 0
    for character in text:
        braces += (character == "{") - (character == "}")
        depth += (character in "([") - (character in ")]")
        if min(depth, braces) < 0 or max(depth, braces) > _MAX_DEPTH:
            return False
    return depth == 0 and braces == 0


def compared(gold: str, answer: str) -> bool:
    """Whether an answer equals the gold one. Both as `conclusion` gives them."""
    expected, found = number(gold), number(answer)
    if expected is not None and found is not None:
        return same_number(expected, found)
    gold, answer = normalised(gold), normalised(answer)
    return _same_choice(gold, answer) or _same(gold, answer)


def _same_choice(gold: str, answer: str) -> bool:
    """Whether both name the same option of a multiple choice, such as "(B) 7" and "B"."""
    ours, theirs = _CHOICE.fullmatch(gold), _CHOICE.fullmatch(answer)
    if not ours or not theirs or (ours["rest"] and not ours["marked"]):
        return False
    if (ours["marked"] or ours["bare"]) != (theirs["marked"] or theirs["bare"]):
        return False
    rest = theirs["rest"]
    if not rest or ours["rest"]:
        return not rest or _same(ours["rest"], rest)
    marked = theirs["marked"] or theirs["mark"] or theirs["word"]
    return (
        bool(marked)
        and not re.match(r"[-+*/^_=<>!,]", rest)
        and not re.search(r"(?<![a-zA-Z\\])[A-J](?![a-zA-Z])", rest)
        and not _HEDGE.search(rest)
    )


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
    if mine is not None and mine[0] == "set" and len(mine[1]) == 1:
        return _same(mine[1][0], answer)
    if others is not None and others[0] == "set" and len(others[1]) == 1:
        return _same(gold, others[1][0])
    if (mine is not None and mine[0] == "list") or (others is not None and others[0] == "list"):
        return False
    expected, found = _split(gold, _RELATION), _split(answer, _RELATION)
    if len(expected[0]) > 1 or len(found[0]) > 1:
        return _same_relation(expected, found)
    return mine is None and others is None and _same_value(gold, answer)


def _bare(text: str) -> str:
    """Without brackets around all of it, and without the variable of "x in"."""
    text = text.strip()
    if found := _IN.match(text):
        text = text[found.end() :]
    while text[:1] + text[-1:] in ("()", "{}") and balanced(text[1:-1]) and len(_split(text[1:-1], _SEPARATOR)[0]) == 1:
        text = text[1:-1].strip()
    return text


def _tight(text: str) -> str:
    """Without spaces, but for those that end a command or a number; x^{2} as x^2."""
    text = re.sub(r"(\\[a-zA-Z]+|\d)\s+(?=[a-zA-Z\d])", "\\1\0", text)
    return re.sub(r"([\^_])\{(\w)\}", r"\1\2", re.sub(r"\s+", "", text))


def _same_words(gold: str, answer: str) -> bool:
    """Whether two texts are the same words, in upper or lower case. Symbols keep theirs."""
    one, other = (re.sub(r"^(?:the|an?) |[.'\"]", "", " ".join(text.lower().split())) for text in (gold, answer))
    if one != other or not re.fullmatch(r"[a-z][a-z -]*", one):
        return False
    return len(one) > 3 or one in _SHORT_WORDS.split() or (len(one) > 2 and gold.istitle() and answer.istitle())


def _split(text: str, pattern: re.Pattern[str]) -> tuple[Parts, Parts]:
    """The parts of a text at the separators that are in no brackets, and these."""
    shape = text.replace(r"\begin", "(-----").replace(r"\end", ")---")
    depths = list(itertools.accumulate(((one in "([{") - (one in ")]}") for one in shape), initial=0))
    parts, separators, start = [], [], 0
    for found in pattern.finditer(text):
        if depths[found.start()] == 0:
            parts.append(text[start : found.start()].strip())
            separators.append(found.group().strip())
            start = found.end()
    return (*parts, text[start:].strip()), tuple(separators)


def _matched(ours: Sequence[Item], theirs: Sequence[Item], same: Callable[[Item, Item], bool]) -> bool:
    """Whether two collections are the same in any order."""
    left = list(theirs) if len(ours) == len(theirs) else []
    for one in ours:
        place = next((place for place, other in enumerate(left) if same(one, other)), None)
        if place is None:
            return False
        del left[place]
    return len(ours) == len(theirs)


# -- sets of real numbers ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Range:
    low: str
    high: str
    closed: tuple[bool, bool]
    variable: str | None = None


def _ranges(text: str) -> list[_Range] | None:
    """Intervals, from any spelling of them: brackets, inequalities, a set with a condition."""
    text = _bare(text)
    if built := _BUILDER.fullmatch(text):
        return _ranges(built[1])
    if text == r"\R" or text.lower() in ("all real numbers", "all reals", "all real"):
        return _without(())
    if removed := re.fullmatch(r"\\R\s*(?:\\setminus|\\backslash|-)\s*\\\{(.+)\\\}", text):
        return _without(_split(removed[1], _SEPARATOR)[0])
    united, _ = _split(text, _CUP)
    if len(united) > 1:
        found = [_ranges(part) for part in united]
        return None if None in found else [one for part in found for one in part or ()]
    if text[:1] in ("(", "[") and text[-1:] in (")", "]") and balanced(text[1:-1]):
        ends, _ = _split(text[1:-1], _SEPARATOR)
        if len(ends) == 2:
            return [_range(*ends, (text[0] == "[", text[-1] == "]"))]
    joined, separators = _split(text, _SEPARATOR)
    if len(joined) > 1:
        found = [_inequality(part) for part in joined]
        if None in found:
            return None
        listed = [one for part in found for one in part or ()]
        return listed if "or" in " ".join(separators) else _both(listed)
    return _inequality(text)


def _range(low: str, high: str, closed: tuple[bool, bool], variable: str | None = None) -> _Range:
    low, high = low.removeprefix("+").strip(), high.removeprefix("+").strip()
    return _Range(low, high, (closed[0] and r"\infty" not in low, closed[1] and r"\infty" not in high), variable)


def _without(points: Parts, variable: str | None = None) -> list[_Range]:
    ends = [r"-\infty", *sorted(points, key=lambda point: algebra.value(point) or 0.0), r"\infty"]
    return [_range(low, high, (False, False), variable) for low, high in itertools.pairwise(ends)]


def _inequality(text: str) -> list[_Range] | None:
    terms, signs = _split(text, _RELATION)
    if signs == (r"\neq",) and _VARIABLE.fullmatch(terms[0]):
        return _without(terms[1:], terms[0])
    if signs and set(signs) <= {">", r"\geq"}:
        terms, signs = terms[::-1], tuple({">": "<", r"\geq": r"\leq"}[sign] for sign in signs[::-1])
    if not signs or not set(signs) <= {"<", r"\leq"}:
        return None
    closed = [sign == r"\leq" for sign in signs]
    if len(terms) == 3 and _VARIABLE.fullmatch(terms[1]):
        return [_range(terms[0], terms[2], (closed[0], closed[1]), terms[1])]
    if len(terms) == 2 and _VARIABLE.fullmatch(terms[0]):
        return [_range(r"-\infty", terms[1], (False, closed[0]), terms[0])]
    if len(terms) == 2 and _VARIABLE.fullmatch(terms[1]):
        return [_range(terms[0], r"\infty", (closed[0], False), terms[1])]
    return None


def _both(listed: list[_Range]) -> list[_Range]:
    """Two rays that meet are one interval."""
    one, other = sorted(listed[:2], key=lambda each: each.low == r"-\infty")
    low, high = algebra.value(one.low), algebra.value(other.high)
    if (
        len(listed) > 2
        or one.high != r"\infty"
        or other.low != r"-\infty"
        or low is None
        or high is None
        or low >= high
    ):
        return listed
    return [_Range(one.low, other.high, (one.closed[0], other.closed[1]), one.variable)]


def _same_range(one: _Range, other: _Range) -> bool:
    return (
        one.closed == other.closed
        and (one.variable is None or other.variable is None or one.variable == other.variable)
        and _same(one.low, other.low)
        and _same(one.high, other.high)
    )


# -- lists, sets, tuples, matrices -------------------------------------------------------------------------------------

_IN_ANY_ORDER = ({"list"}, {"set"}, {"list", "set"})
_ALIKE = ({"list", "()"}, *({one, other} for one in ("()", "[]") for other in ("column", "row", "matrix")))


def _sequence(text: str) -> tuple[str, Parts] | None:
    """The kind and the elements of a list, a set, a tuple or a matrix; None for a single value."""
    if number(text) is not None:
        return None
    if found := _MATRIX.fullmatch(text):
        return _matrix(found)
    listed, _ = _split(text, _LISTED)
    expanded = tuple(one for part in listed for one in _either(part))
    if len(expanded) > 1:
        return "list", expanded
    for opening, closing in ((r"\{", r"\}"), ("{", "}"), ("(", ")"), ("[", "]")):
        inner = text[len(opening) : -len(closing)]
        if text.startswith(opening) and text.endswith(closing) and inner and balanced(inner):
            elements, _ = _split(inner, _SEPARATOR)
            if opening in (r"\{", "{"):
                return "set", tuple(one for part in elements for one in _either(part))
            return (opening + closing, elements) if len(elements) > 1 or _sequence(inner) else None
    return None


def _matrix(found: re.Match[str]) -> tuple[str, Parts]:
    rows = [_split(row, _CELL)[0] for row in found["rows"].split("\n") if row.strip()]
    rows = list(zip(*rows, strict=False)) if found["turned"] else rows
    by = found["by"].strip()
    rows = [tuple(f"({by})({cell})" if by else cell for cell in row) for row in rows]
    if len(rows) == 1 or all(len(row) == 1 for row in rows):
        return "row" if len(rows) == 1 else "column", tuple(cell for row in rows for cell in row)
    return "matrix", tuple(f"[{', '.join(row)}]" for row in rows)


def _either(text: str) -> Parts:
    r"""The values of a formula with \pm: two, or four if there are two of these and no \mp."""
    if r"\mp" in text:
        return tuple(text.replace(r"\pm", one).replace(r"\mp", other) for one, other in ("+-", "-+"))
    before, sign, after = text.partition(r"\pm")
    if not sign or text.count(sign) > 3:
        return (text,)
    return tuple(value for chosen in "+-" for value in _either(before + chosen + after))


def _same_sequence(ours: tuple[str, Parts], theirs: tuple[str, Parts]) -> bool:
    kinds = {ours[0], theirs[0]}
    mine, others = ours[1], theirs[1]
    if len(mine) != len(others):
        return False
    names = [[_name(part) for part in parts] for parts in (mine, others)]
    if kinds == {"list"} and all(None not in each and len(set(each)) > 1 for each in names):
        return _matched(mine, others, _same)
    if all(len({*each} - {None}) == 1 for each in names) and {*names[0]} - {None} != {*names[1]} - {None}:
        return False
    if kinds == {"list", "()"} and any(len({*each} - {None}) == 1 for each in names):
        return False  # the values of one symbol are no point
    mine, others = (
        tuple(part.partition("=")[2] if _name(part) else part for part in parts) for parts in (mine, others)
    )
    if kinds in _IN_ANY_ORDER and all(len({*each} - {None}) < 2 for each in names):
        return _matched(mine, others, _same)
    return (len(kinds) == 1 or kinds in (*_IN_ANY_ORDER, *_ALIKE)) and all(map(_same, mine, others))


def _name(text: str) -> str | None:
    """The symbol that a text gives a value to."""
    terms, signs = _split(text, _RELATION)
    return terms[0] if signs == ("=",) and _VARIABLE.fullmatch(terms[0]) else None


# -- equations ---------------------------------------------------------------------------------------------------------


def _same_relation(gold: tuple[Parts, Parts], answer: tuple[Parts, Parts]) -> bool:
    (ours, signs), (theirs, others) = gold, answer
    if not {*signs, *others} <= {"=", r"\approx"}:
        return _same_inequality(gold, answer)
    if len(ours) == 1:
        return _concludes(ours[0], theirs, others)
    name, last = ours[0], ours[-1]
    of_symbols = bool(algebra.symbols(last))
    if of_symbols:
        named = _is_function(name)
    else:
        is_word = last.isalpha() and len(last) > 2
        named = not is_word and (algebra.value(name) is not None or _is_name(name, of_one=True))
    if not named:
        return len(ours) == len(theirs) == 2 and algebra.factor((ours[0], ours[1]), (theirs[0], theirs[1])) != 0
    if len(theirs) == 1:
        return _same(last, theirs[0])
    if _tight(theirs[0]) == _tight(name):
        return _concludes(last, theirs, others)
    if len(theirs) == 2 and _tight(theirs[1]) == _tight(name):
        return _same(last, theirs[0])
    if of_symbols and len(ours) == len(theirs) == 2:
        return algebra.factor((ours[0], ours[1]), (theirs[0], theirs[1])) != 0
    return not (_VARIABLE.fullmatch(name) and _VARIABLE.fullmatch(theirs[0])) and _concludes(last, theirs, others)


def _same_inequality(gold: tuple[Parts, Parts], answer: tuple[Parts, Parts]) -> bool:
    """Whether two inequalities of two sides are the same, up to a positive factor."""
    sides = []
    for terms, signs in (gold, answer):
        if len(terms) != 2 or signs[0] not in ("<", ">", r"\leq", r"\geq"):
            return False
        turned = signs[0] in (">", r"\geq")
        sides.append(((terms[1], terms[0]) if turned else (terms[0], terms[1]), signs[0] in ("<", ">")))
    return sides[0][1] == sides[1][1] and algebra.factor(sides[0][0], sides[1][0]) > 0


def _is_function(text: str) -> bool:
    """Whether a text is y, f(x), dx/dt or a few words."""
    bare = re.sub(r"\s*\([^()]*\)$", "", text)
    return algebra.is_symbol(bare) or bool(re.fullmatch(r"[a-zA-Z\s]{3,}", bare))


def _is_name(text: str, *, of_one: bool = False) -> bool:
    """Whether a text may be the name of what follows "=": it has letters, and no number but as an index or an argument.
    With `of_one` it is no sum, product or power."""
    bare = _stripped(text)
    if text in ("e", "i"):
        return True
    if not re.search(r"[a-zA-Z]", text) or algebra.value(text) is not None:
        return False
    if _HEDGE.search(re.sub(r"\\[a-zA-Z]+", "", text)):
        return False
    if of_one and re.search(r"[-+*/^]|^[a-z]\s*[a-z]$", re.sub(r"_\{[^{}]*\}", "", text)):
        return False
    return not re.search(r"\d", bare)


def _stripped(text: str) -> str:
    """Without indices and the arguments of functions."""
    return re.sub(r"_\{[^{}]*\}|_\w|\([^()]*\)", "", text)


def _concludes(gold: str, terms: Parts, signs: Parts) -> bool:
    """Whether a chain of equations is true, and the gold answer a part of it. It may begin, or end, with a name."""
    if terms[0] == "" or (_is_name(terms[0]) and not algebra.symbols(_stripped(terms[0])) & algebra.symbols(gold)):
        terms, signs = terms[1:], signs[1:]
    elif len(terms) == 2 and _VARIABLE.fullmatch(terms[1]) and not algebra.symbols(gold):
        return _same(gold, terms[0])
    links = zip(terms, signs, terms[1:], strict=False)
    if not all(_same(one, other) if sign == "=" else _near(one, other) for one, sign, other in links):
        return False
    return any(_same(gold, term) for term in terms)


def _near(precise: str, rounded: str) -> bool:
    exact, decimal = algebra.value(precise), number(rounded)
    return (
        exact is not None
        and decimal is not None
        and abs(Fraction(exact) - decimal.value) * 2 <= Fraction(10) ** -decimal.places
    )


# -- single values -----------------------------------------------------------------------------------------------------


_DEGREE = (("degree", 1),)
_ANGLES = {_DEGREE, (("radian", 1),)}


def _same_value(gold: str, answer: str) -> bool:
    ours, theirs = _CLOCK.fullmatch(gold), _CLOCK.fullmatch(answer)
    if ours and theirs:
        said = zip(ours.groups(""), theirs.groups(""), strict=True)
        return all(one.lower() == other.lower() for one, other in said if one and other)
    if ours or theirs:
        return False
    if ":" in gold or ":" in answer:
        return _same_ratio(_split(gold, _COLON)[0], _split(answer, _COLON)[0])
    if _BASED.fullmatch(gold) or _BASED.fullmatch(answer):
        return _same_digits(gold, answer)
    if gold in _SHORT_WORDS.split():  # no product of symbols
        return False
    value, scale, unit = measured(gold)
    other, factor, other_unit = measured(answer, tuple(name for name, _ in unit.powers) if unit else ())
    value, other = _times(value, scale), _times(other, factor)
    if unit is not None and other_unit is not None:
        if {unit.powers, other_unit.powers} == _ANGLES:
            value, other = (
                f"({v})*\\pi/180" if u.powers == _DEGREE else v for v, u in ((value, unit), (other, other_unit))
            )
        elif unit.powers != other_unit.powers:
            return False
        elif unit.size != other_unit.size:
            value, other = _times(value, unit.size), _times(other, other_unit.size)
        return _equal(value, other)
    if _equal(gold, answer):
        return True
    powers = (unit or other_unit or Unit(Fraction(1), ())).powers
    if powers == (("%", 1),):
        hundredth = Fraction(1, 100)
        if unit is not None:
            return _equal(value, other) or _equal(_times(value, hundredth), other)
        size = algebra.value(value)
        return _equal(value, _times(other, hundredth)) or (size is not None and abs(size) > 1 and _equal(value, other))
    return _equal(value, other)


def _times(text: str, factor: Fraction) -> str:
    found = number(text)
    return f"{found.value * factor}" if found and factor != 1 else text if factor == 1 else f"({text})*({factor})"


def _equal(one: str, other: str) -> bool:
    """Whether two formulas are equal, or one rounds to the other, which is a long decimal."""
    first, second = number(one), number(other)
    if first is not None and second is not None:
        return same_number(first, second)
    for decimal, text in ((first, other), (second, one)):
        if decimal is not None and decimal.digits is not None:
            value = algebra.value(text)
            if value is not None and rounds(Fraction(value), decimal):
                return True
    return algebra.equal(str(first.value) if first else one, str(second.value) if second else other)


def _same_ratio(ours: Parts, theirs: Parts) -> bool:
    """Whether 2:4 is 1:2, or the quotient of two numbers a ratio."""
    pairs = zip(*(parts if len(parts) > 1 else (*parts, "1") for parts in (ours, theirs)), strict=False)
    first, *others = (f"({one})/({other})" for one, other in pairs)
    return max(2, len(ours)) == max(2, len(theirs)) and all(algebra.equal(first, other) for other in others)


def _same_digits(gold: str, answer: str) -> bool:
    """Whether numbers with a base as index are the same. An answer may leave out the base, or the gold answer."""
    ours, theirs = _BASED.fullmatch(gold), _BASED.fullmatch(answer)
    if ours:
        base, digits = (theirs[2], theirs[1]) if theirs else (ours[2], answer)
        return base == ours[2] and digits.lstrip("0") == ours[1].lstrip("0")
    if not theirs or not 2 <= (base := int(theirs[2][:4])) <= 16 or any(int(digit, 16) >= base for digit in theirs[1]):
        return False
    return _equal(gold, str(int(theirs[1], base)))
