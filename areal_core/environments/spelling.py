# ruff: noqa: RUF001 - the characters that it replaces
r"""Normalise the spelling of a formula, however it was typed.

normalised(r"$\left(\dfrac12,\ x ≤ ３\right)$.") -> r"(\frac12, x \leq 3)"
"""

from __future__ import annotations

import functools
import re
import unicodedata

from areal_core.environments.algebra import GREEK

_BLANK = " \n\x1f"
TEXT = "\x1f"  # surrounds the content of \text{...}; all patterns treat it as white space

_CHARACTERS = {
    "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ", "÷": r"\div ", "⁄": "/",
    "≤": r"\leq ", "⩽": r"\leq ", "≦": r"\leq ", "≥": r"\geq ", "⩾": r"\geq ", "≧": r"\geq ", "≠": r"\neq ",
    "≈": r"\approx ", "∪": r"\cup ", "∈": r"\in ", "∅": r"\emptyset ", "√": r"\sqrt ", "∛": r"\sqrt[3]", "′": "'",
    "°": r"^\circ ", "℃": r"^\circ C", "℉": r"^\circ F", "∠": r"\angle ", "∞": r"\infty ", "ℝ": r"\R ", "∣": "|",
    "⟨": "(", "⟩": ")", "〈": "(", "〉": ")", "∨": " or ", "∧": " and ", "或": " or ", "和": ",", "、": ",", "。": ".",
    "\u200b": "", "\ufeff": "",
}  # fmt: skip
_WORDS = "zero one two three four five six seven eight nine ten eleven twelve"
_NUMERALS = {
    word: str(place) for words in (_WORDS.split(), "零一二三四五六七八九十") for place, word in enumerate(words)
}
_RAISED, _LOWERED = re.compile("[⁰¹²³⁴-⁹⁺⁻ⁿ]+"), re.compile("[₀-₉ₙ]+")
_MATH = re.compile(r"\$\$(.+)\$\$|\$([^$]+)\$|\\\((.+)\\\)|\\\[(.+)\\\]", re.DOTALL)
_NESTED = r"\{((?:[^{}]|\{[^{}]*\})*)\}"
_WRITTEN = re.compile(rf"\\(?:text(?:bf|it|rm|sf|tt)?|mbox|hbox|operatorname\*?)\s*{_NESTED}")
_STYLED = re.compile(rf"\\(?:math(?:rm|bf|sf|it)|underline|boldsymbol|bm|boxed|emph)\s*{_NESTED}")
_REPEATING = re.compile(
    r"(\d*)\.(\d*)(?:\\(?:overline|bar)\s*\{(\d+)\}|\((\d+)\)|\\dot\s*\{?(\d)\}?(?:(\d*)\\dot\s*\{?(\d)\}?)?)"
)


def _without_gaps(found: re.Match[str]) -> str:
    return re.sub(r"[ .]", "", found.group())


def _in_a_line(found: re.Match[str]) -> str:
    return found[1].replace("&", " ").strip().replace("\n", ", ")


_NAMES = {
    r"\frac": "dfrac tfrac cfrac", r"\binom": "dbinom tbinom", r"\leq ": "le leqslant", r"\geq ": "ge geqslant",
    r"\neq ": "ne", r"\approx ": "simeq thickapprox", r"\emptyset ": "varnothing", r"\infty ": "infinity",
    r"\{": "lbrace", r"\}": "rbrace", r"\R ": "Reals reals", "<": "lt", ">": "gt", "(": "langle", ")": "rangle",
    "|": "lvert rvert vert mid", " or ": "lor vee", " and ": "land wedge", "\n": "cr newline",
    " ": "quad qquad displaystyle textstyle scriptstyle limits nolimits",
    "": "left right middle big Big bigg Bigg bigl bigr Bigl Bigr tiny small large Large huge bf rm it sf hline vec"
    " overrightarrow mathcal operatorname",
}  # fmt: skip
_COMMANDS = {name: spelling for spelling, names in _NAMES.items() for name in names.split()}


_SPELLINGS = tuple(
    (re.compile(pattern), spelling)
    for pattern, spelling in (
        (r"^([A-J])\)", r"(\1)"),
        (r"^\s*\\(?:therefore|implies|Rightarrow)\b", ""),
        (r"\\\$|\$(?=\s*\d)", "USD "),
        (r"\$", ""),
        (r"\\(?:left|right)\s*\.", ""),
        (r"(?<=\d)(?:,\s*\\!|\{,\}|\\[,:; ]|~|')\s*(?=\d{3}(?!\d))", ""),  # thousands
        (r"(?<![\d.,])\d{1,3}(?: \d{3})+(?! ?\d|,\d)|(?<![\d.,])\d{1,3}(?:\.\d{3}){2,}(?!\d)", _without_gaps),
        (r"^\(?0*(\d[\dA-F]*)\)?\s*_\s*\{?\s*(\d+)\s*\}?$", r"\1_{\2}"),
        (r"\b(\d{1,2}):([0-5]\d)\b", r"\1_{:\2}"),  # a time of day, not a quotient
        (r"\b([ap])\.\s?m\b\.?", r"\1m"),
        (r"(?<![\d.])(\d+) (\d+/\d+)$", r"(\1+\2)"),
        (r"\\(?:mathbb|mathbf)\s*\{?\s*R\s*\}?", r"\\R "),
        (r"\^\s*\{?\s*\\circ\s*\}?|\\degree(?![a-zA-Z])", r"^\\circ "),
        (r"(?<!\\)\\([a-zA-Z]+)", lambda found: _COMMANDS[found[1]] if found[1] in _COMMANDS else found[0]),
        (r"\\\\(?:\s*\[[^\]]*\])?", "\n"),  # the end of a row
        (r"\\[,;:!> ]|~|\\[hv]space\s*\{[^{}]*\}", " "),
        (r"\\(?:(?:text)?color|tag)\*?\s*\{[^{}]*\}", ""),
        (r"(?<![\d.,^_])(\d+)\s*(\\frac\s*(?:\d\d(?!\d)|\{\s*\d+\s*\}\s*\{\s*\d+\s*\}))", r"(\1+\2)"),
        (r"\{([^{}]*)\\over(?![a-zA-Z])([^{}]*)\}", r"\\frac{\1}{\2}"),
        (r"(?<=\d)\s*(?:\^\s*\{\s*(?:st|nd|rd|th)\s*\}|(?:st|nd|rd|th)\b)", ""),
        (r"<=", r"\\leq "),
        (r">=", r"\\geq "),
        (r"\\not\s*=", r"\\neq "),
        (r"\\\{\s*\\\}", r"\\emptyset "),
        (r"(?<![a-zA-Z\\])(?:[iI]nfinity|infty|oo)\b", r"\\infty "),
        (r"\^\s*\{?\s*\\prime\s*\}?", "'"),
        (r"\\%", "%"),
        (r"\*\*", "^"),
        (r"\\begin\s*\{(?:cases|aligned|gathered|split)\}([^\x00]*)\\end\s*\{\w+\}", _in_a_line),
        (r"\](?=[^][(),;]+[,;][^][(),;]+[\[\]])", "("),  # ]0, 1[
        (r"(?<=[,;])([^][(),;]+)\[", r"\1)"),
    )
)


@functools.lru_cache(maxsize=4096)
def normalised(text: str) -> str:
    """Return the usual spelling of a formula: fractions, brackets, spaces, signs and delimiters."""
    text = text.strip().strip("*").strip()
    if text.isdigit() and text.isascii():
        return text
    if formula := _MATH.fullmatch(text):
        text = next(group for group in formula.groups() if group is not None).strip()
    text = text if text.isascii() else _ascii(text)
    for _ in range(4):
        text = _WRITTEN.sub(rf"{TEXT}\1{TEXT}", text)
        text = _STYLED.sub(lambda found: found[1] if len(found[1]) == 1 else f"{TEXT}{found[1]}{TEXT}", text)
    text = _REPEATING.sub(_fraction, text)
    for pattern, spelling in _SPELLINGS:
        text = pattern.sub(spelling, text)
    text = re.sub(r"[ \t]+", " ", text).strip(_BLANK)
    text = text if text.endswith("..") else text.rstrip(".,;:" + _BLANK)
    return _NUMERALS.get(text.lower().removesuffix("个"), text)


def _fraction(found: re.Match[str]) -> str:
    """Convert a repeating decimal to a fraction."""
    whole, fixed, *repeated = found.groups()
    period = "".join(part or "" for part in repeated)
    if len(whole + fixed + period) > 60:
        return found.group()
    start = whole + fixed
    top = int(start + period) - int(start or 0)
    return rf"\frac{{{top}}}{{{'9' * len(period) + '0' * len(fixed)}}}"


def _ascii(text: str) -> str:
    text = _RAISED.sub(lambda found: f"^{{{unicodedata.normalize('NFKC', found.group())}}}", text)
    text = _LOWERED.sub(lambda found: f"_{{{unicodedata.normalize('NFKC', found.group())}}}", text)
    return "".join(map(_character, text))


@functools.lru_cache(maxsize=4096)
def _character(character: str) -> str:
    if character.isascii() or character in _CHARACTERS:
        return _CHARACTERS.get(character, character)
    plain = unicodedata.normalize("NFKC", character)
    if "⁄" in plain:
        return r"\frac{{{}}}{{{}}}".format(*plain.split("⁄"))
    name = unicodedata.name(plain[0], "").replace("LAMDA", "LAMBDA").split() if plain else []
    if name[:1] == ["GREEK"] and (greek := name[-1].lower()) in [*GREEK, "pi"]:
        return f"\\{greek.capitalize() if 'CAPITAL' in name else greek} "
    return plain if plain == character else "".join(map(_character, plain))
