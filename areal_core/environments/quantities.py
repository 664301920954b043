"""Parse numbers as they are written, and the units beside them."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

_LONGEST = 300  # characters of a number
_MIN_DIGITS = 6  # significant digits of a decimal that may stand for a value that rounds to it

DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d*)?|\.\d+"
_NUMBER = re.compile(
    rf"(?P<sign>[-+]?)\s*(?P<digits>{DIGITS})"
    r"(?:(?:[eE]|\s*(?:\\times|\\cdot|\*|x)\s*10\s*\^\s*\{?\s*)(?P<exponent>[-+]?\d{1,3})\s*\}?)?"
)


def number(text: str) -> Decimal | None:
    """Parse a number, keeping its digits. None for other texts, and for exponents beyond 999."""
    found = _NUMBER.fullmatch(text.strip()) if len(text) <= _LONGEST else None
    if found is None:
        return None
    return Decimal(f"{found['sign']}{found['digits'].replace(',', '')}e{found['exponent'] or 0}")


def same_number(one: Decimal, other: Decimal) -> bool:
    """Whether two numbers are equal: exactly, or rounded to a decimal of at least six digits."""
    return one == other or rounds(Fraction(one), other) or rounds(Fraction(other), one)


def rounds(precise: Fraction, decimal: Decimal, digits: int = _MIN_DIGITS) -> bool:
    """Whether a value rounds to a decimal of at least `digits` digits. With 0 digits, integers count, too."""
    _, written, exponent = decimal.as_tuple()
    if len(written) < digits or (digits and exponent == 0):
        return False
    return abs(precise - Fraction(decimal)) * 2 <= Fraction(10) ** int(exponent)


# -- units -------------------------------------------------------------------------------------------------------------

_SCALED = """
m: 1 m meter metre 米, 1000 km kilometer kilometre 千米 公里, 0.01 cm centimeter centimetre 厘米, 0.001 mm millimeter
m: 0.0254 in inch inches, 0.3048 ft foot feet, 0.9144 yd yard, 1609.344 mi mile
m3: 0.001 L l liter litre 升, 0.000001 mL ml milliliter 毫升, 0.003785411784 gal gallon, 0.0002365882365 cup
s: 1 s sec second 秒, 60 min minute 分钟, 3600 h hr hour 小时, 86400 day 天, 604800 week, 0.001 ms millisecond
year: 1 year yr 年 岁, 1/12 month 月
g: 1 g gram 克, 1000 kg kilogram 千克 公斤, 0.001 mg milligram, 453.59237 lb pound, 28.349523125 oz ounce
USD: 1 USD dollar, 0.01 cent ¢
J: 1 J joule, 1000 kJ
W: 1 W watt, 1000 kW
: 12 dozen, 100 hundred, 1000 thousand, 1000000 million, 1000000000 billion, 1000000000000 trillion
"""
_OTHERS = r"""
N/newton V/volt A/amp/ampere Hz/hertz Pa/pascal K/kelvin mol/mole eV cal/calorie ton GBP/£ EUR/€/euro JPY/¥/yen
CNY/yuan/元 INR/₹/rupee ^\circ/degree/deg/度 ^\circC/celsius ^\circF/fahrenheit rad/radian %/percent unit/个
person/people/人 student child/children boy girl man/men woman/women friend apple orange egg book page ticket box ball
card coin game car tree way time step term solution point side
"""


@dataclass(frozen=True, slots=True)
class Unit:
    """A product of powers of basic units."""

    size: Fraction
    powers: tuple[tuple[str, int], ...]


# name -> its basic unit, the power of the basic unit, and its size
_UNITS = {name: (names.split("/")[0], 1, Fraction(1)) for names in _OTHERS.split() for name in names.split("/")}
for _basic, _, _entries in (line.partition(":") for line in _SCALED.strip().splitlines()):
    for _size, *_names in map(str.split, _entries.split(",")):
        _UNITS |= {_name: (_basic.rstrip("3"), 3 if _basic.endswith("3") else 1, Fraction(_size)) for _name in _names}
_LONGEST_FIRST = (re.escape(name).replace("circ", r"circ\s*+") for name in sorted(_UNITS, key=len, reverse=True))
_NAME = rf"(?>{'|'.join(_LONGEST_FIRST)})(?:e?s)?(?![a-zA-Z])"
_FACTOR = (  # possessive throughout, so that no text is matched in several ways
    r"(?:(?P<per>/|\bper\b)|\\cdot|\*)?+\s*+(?:(?P<raised>square|sq\.?|cubic|cu\.?)\s++)?+"
    rf"(?P<name>{_NAME})(?:\s*+\^\s*+\{{?\s*+(?P<power>-?\d)\s*+\}}?)?+\s*+"
)
# Python 3.11 loses groups captured in a possessive part. So one pattern captures none, and the other is not possessive.
_UNIT = rf"(?!/|\*|\\cdot|per\b)(?:{re.sub(r'[?]P<[a-z]+>', '?:', _FACTOR)})++"
_EACH = re.compile(_FACTOR.replace(")?+", ")?"))
_MEASURED = re.compile(rf"(?P<value>.*?)(?P<gap>\s*)(?<![a-zA-Z\\^_])(?P<unit>{_UNIT})", re.DOTALL)
_PRICE = re.compile(r"([-+]?)\s*(USD|[£€¥₹])\s*(.+)", re.DOTALL)
_START = re.compile(rf"\s*(?!in\s+[a-z])(?P<unit>{_UNIT})(?!\s*\d)")


def unit_at_start(text: str) -> str:
    """The unit at the beginning of a text; "" if there is none."""
    found = _START.match(text)
    return f" {found['unit'].strip()}" if found else ""


def measured(text: str) -> tuple[str, Unit | None]:
    """Split a quantity into value and unit.
    A unit in plain letters must follow a number, and is no product."""
    text = _PRICE.sub("\\1\\3 \x1f\\2", re.sub(r"\bmph\b", "mi/h", re.sub(r"\bkmph\b", "km/h", text)))
    found = _MEASURED.fullmatch(text)
    if found is None or not found["value"].strip():
        return text, None
    value, gap, unit = found["value"].strip(), found["gap"], found["unit"].strip()
    scale, product = _product(unit)
    if "a" <= unit[0].lower() <= "z" and "\x1f" not in gap:
        is_product = product is not None and len(product.powers) > 1 and not re.search(r"/|\bper\b", unit)
        if number(value) is None or is_product or (not gap and not unit[1:2].isalpha()):
            return text, None
    return times(value, scale), product


def times(text: str, factor: Fraction) -> str:
    """Multiply a formula by a number."""
    found = number(text)
    return text if factor == 1 else str(Fraction(found) * factor) if found is not None else f"({text})*({factor})"


def _product(text: str) -> tuple[Fraction, Unit | None]:
    """The scale (a thousand, a million) and the unit of names that are multiplied and divided."""
    scale, size, powers = Fraction(1), Fraction(1), Counter[str]()
    for found in _EACH.finditer(text):
        name = re.sub(r"\s", "", found["name"])
        basic, power, each = next(_UNITS[one] for one in (name, name[:-1], name[:-2]) if one in _UNITS)
        exponent = int(found["power"] or {"s": 2, "c": 3}.get((found["raised"] or " ")[0], 1)) * (
            -1 if found["per"] else 1
        )
        if not basic:
            scale *= each
            continue
        size *= each**exponent
        powers[basic] += power * exponent
    return scale, Unit(size, tuple(sorted(powers.items()))) if powers else None
