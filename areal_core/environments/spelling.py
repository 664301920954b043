# ruff: noqa: RUF001 - the characters that it replaces
r"""One spelling of a formula, whichever way it was typed.

normalised(r"$\left(\dfrac12,\ x ≤ ３\right)$.") -> r"(\frac12, x \leq 3)"
"""

from __future__ import annotations

import functools
import re
import unicodedata

from areal_core.environments.algebra import GREEK

_BLANK = " \n\x1f"
TEXT = "\x1f"  # stands around the content of \text{...}; white space to every pattern

_CHARACTERS = {
    "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ", "÷": r"\div ", "⁄": "/",
    "≤": r"\leq ", "⩽": r"\leq ", "≦": r"\leq ", "≥": r"\geq ", "⩾": r"\geq ", "≧": r"\geq ", "≠": r"\neq ",
    "≈": r"\approx ", "∪": r"\cup ", "∈": r"\in ", "∅": r"\emptyset ", "√": r"\sqrt ", "∛": r"\sqrt[3]", "′": "'",
    "°": r"^\circ ", "℃": r"^\circ C", "℉": r"^\circ F", "∠": r"\angle ", "∞": r"\infty ", "ℝ": r"\R ", "∣": "|",
    "⟨": "(", "⟩": ")", "〈": "(", "〉": ")", "∨": " or ", "∧": " and ", "或": " or ", "和": ",", "、": ",", "。": ".",
    "\u200b": "", "\ufeff": "", "\u0305": "",
}  # fmt: skip
_WORDS = "zero one two three four five six seven eight nine ten eleven twelve"
_NUMERALS: list[str] = list(_WORDS.split())
_RAISED, _LOWERED = re.compile("[⁰¹²³⁴-⁹⁺⁻ⁿ]+"), re.compile("[₀-₉ₙ]+")
_CHINESE = re.compile("[零〇一二两三四五六七八九十百千万亿]+")
_MATH = re.compile(r"\$\$(.+)\$\$|\$([^$]+)\$|\\\((.+)\\\)|\\\[(.+)\\\]", re.DOTALL)
_NESTED = r"\{((?:[^{}]|\{[^{}]*\})*)\}"
_WRITTEN = re.compile(rf"\\(?:text(?:bf|it|rm|sf|tt)?|mbox|hbox|operatorname\*?)\s*{_NESTED}")
_STYLED = re.compile(rf"\\(?:math(?:rm|bf|sf|it)|underline|boldsymbol|bm|boxed|emph)\s*{_NESTED}")
_REPEATING = re.compile(
    r"(\d*)\.(\d*)(?:\\(?:overline|bar)\s*\{(\d+)\}|\((\d+)\)|\\dot\s*\{?(\d)\}?(?:(\d*)\\dot\s*\{?(\d)\}?)?)"
)
_MARKS = {"\\lt": "<", "\\gt": ">", "\\lbrace": r"\{", "\\rbrace": r"\}", "\\langle": "(", "\\rangle": ")"}
_SPELLINGS = tuple(
    (re.compile(pattern), spelling)
    for pattern, spelling in (
        (r"^([A-J])\)", r"(\1)"),
        (r"^\s*\\(?:therefore|implies|Rightarrow)\b", ""),
        (r"\\\$", "USD "),
        (r"\$(?=\s*\d)", "USD "),
        (r"\$", ""),
        (r"\\\\(?:\s*\[[^\]]*\])?|\\(?:cr|newline)\b", "\n"),  # the end of a row
        (r"(?<=\d)(?:,\s*\\!|\{,\}|\\[,:; ]|~|')\s*(?=\d{3}(?!\d))", ""),
        (r"(?<![\d.,])\d{1,3}(?: \d{3})+(?! ?\d|,\d)|(?<![\d.,])\d{1,3}(?:\.\d{3}){2,}(?!\d)", None),
        (r"\\[,;:!> ]|\\q?quad\b|~|\\(?:display|text|script)style\b|\\(?:no)?limits\b|\\[hv]space\s*\{[^{}]*\}", " "),
        (
            r"\\(?:left|right|middle|[bB]igg?[lrm]?)(?![a-zA-Z])\.?|\\(?:tiny|small|normalsize|large|Large|LARGE|huge|Huge)\b",
            "",
        ),
        (r"\\(?:bf|rm|it|sf|hline)\b|\\(?:text)?color\s*\{[^{}]*\}|\\tag\*?\s*\{[^{}]*\}", ""),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\{([^{}]*)\\over(?![a-zA-Z])([^{}]*)\}", r"\\frac{\1}{\2}"),
        (r"(?<=\d)\s*\^\s*\{\s*(?:st|nd|rd|th)\s*\}|(?<=\d)\s*(?:st|nd|rd|th)\b", ""),
        (r"\\[dt]binom(?![a-zA-Z])", r"\\binom"),
        (r"\\le(?:q|qslant)?(?![a-zA-Z])|<=", r"\\leq "),
        (r"\\ge(?:q|qslant)?(?![a-zA-Z])|>=", r"\\geq "),
        (r"\\neq?(?![a-zA-Z])|\\not\s*=", r"\\neq "),
        (r"\\(?:approx|simeq|thickapprox)\b", r"\\approx "),
        (r"\\(?:lvert|rvert|vert|mid)\b", "|"),
        (r"\\(?:lor|vee)\b", " or "),
        (r"\\(?:land|wedge)\b", " and "),
        (r"\\varnothing\b|\\\{\s*\\\}", r"\\emptyset "),
        (r"\\infinity\b|(?<![a-zA-Z\\])(?:[iI]nfinity|infty|oo)\b", r"\\infty "),
        (r"\\(?:mathbb|mathbf)\s*\{?\s*R\s*\}?|\\(?:R|Reals|reals)\b", r"\\R "),
        (r"\\(?:lt|gt|lbrace|rbrace|langle|rangle)(?![a-zA-Z])", None),
        (r"\^\s*\{?\s*\\circ\s*\}?|\\degree\b", r"^\\circ "),
        (r"\^\s*\{?\s*\\prime\s*\}?", "'"),
        (r"\\%", "%"),
        (r"\*\*", "^"),
        (r"\\operatorname\b", ""),
        (r"\\begin\s*\{(?:cases|aligned|gathered|split)\}([^\x00]*)\\end\s*\{\w+\}", None),
        (r"([\[\]])([^][(),;]+[,;][^][(),;]+)([\[\]])", None),
    )
)


@functools.lru_cache(maxsize=4096)
def normalised(text: str) -> str:
    """One spelling of a formula: fractions, brackets, spaces, signs and delimiters as they are written most often."""
    text = text.strip().strip("*").strip()
    if text.isdigit() and text.isascii():
        return text
    if formula := _MATH.fullmatch(text):
        text = next(group for group in formula.groups() if group is not None).strip()
    text = text if text.isascii() else _ascii(text)
    for _ in range(4):
        wrapped = text
        text = _WRITTEN.sub(rf"{TEXT}\1{TEXT}", text)
        text = _STYLED.sub(lambda found: found[1] if len(found[1]) == 1 else f"{TEXT}{found[1]}{TEXT}", text)
        if text == wrapped:
            break
    text = _REPEATING.sub(_fraction, text)
    for pattern, spelling in _SPELLINGS:
        text = pattern.sub(_respelled if spelling is None else spelling, text)
    text = re.sub(r"[ \t]+", " ", text).strip(_BLANK)
    text = text if text.endswith("..") else text.rstrip(".,;:" + _BLANK)
    return str(_NUMERALS.index(text.lower())) if text.lower() in _NUMERALS else text


def _respelled(found: re.Match[str]) -> str:
    whole = found.group()
    if whole in _MARKS:
        return _MARKS[whole]
    if whole[0].isdigit():  # 1 234 567
        return re.sub(r"[ .]", "", whole)
    if whole.startswith(r"\begin"):
        return re.sub(r"\n", ", ", found[1].replace("&", " ").strip())
    opening, inner, closing = found.groups()  # ]0, 1[ is (0, 1)
    return f"{'[' if opening == '[' else '('}{inner}{']' if closing == ']' else ')'}"


def _fraction(found: re.Match[str]) -> str:
    """A repeating decimal as a fraction."""
    whole, fixed, *repeated = found.groups()
    period = "".join(part or "" for part in repeated)
    if len(whole + fixed + period) > 60:
        return found.group()
    start = whole + fixed
    top = int(start + period) - int(start or 0)
    return rf"\frac{{{top}}}{{{'9' * len(period) + '0' * len(fixed)}}}"


def _ascii(text: str) -> str:
    text = re.sub("((?:\\d\u0305)+)", lambda found: rf"\overline{{{found[1]}}}", text)
    text = _RAISED.sub(lambda found: f"^{{{unicodedata.normalize('NFKC', found.group())}}}", text)
    text = _LOWERED.sub(lambda found: f"_{{{unicodedata.normalize('NFKC', found.group())}}}", text)
    if (numeral := _CHINESE.match(text)) and len(text) - numeral.end() <= 2:  # a unit may follow
        text = _from_chinese(numeral.group()) + text[numeral.end() :]
    return "".join(map(_character, text))


@functools.lru_cache(maxsize=4096)
def _character(character: str) -> str:
    if character.isascii() or character in _CHARACTERS:
        return _CHARACTERS.get(character, character)
    if character.isdecimal():
        return str(unicodedata.decimal(character))
    plain = unicodedata.normalize("NFKC", character)
    if "⁄" in plain:
        return r"\frac{{{}}}{{{}}}".format(*plain.split("⁄"))
    name = unicodedata.name(plain[0], "").replace("LAMDA", "LAMBDA").split() if plain else []
    if name[:1] == ["GREEK"] and (greek := name[-1].lower()) in [*GREEK, "pi"]:
        return f"\\{greek.capitalize() if 'CAPITAL' in name else greek} "
    return plain if plain == character else "".join(map(_character, plain))


def _from_chinese(numeral: str) -> str:
    """The digits of a numeral such as 二十三, or 一二三."""
    values = [2 if character == "两" else int(unicodedata.numeric(character)) for character in numeral]
    if max(values) < 10:
        return "".join(map(str, values))
    total = section = digit = 0
    for number in values:
        if number < 10:
            digit = number
        elif number < 10_000:
            section, digit = section + (digit or 1) * number, 0
        else:
            total, section, digit = (total + section + digit) * number, 0, 0
    return str(total + section + digit)
