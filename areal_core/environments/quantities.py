"""Numbers as they are written, and the units beside them."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

_LONGEST = 300  # characters of a number
_MAX_EXPONENT = 400  # of ten, in a number
_MIN_DIGITS = 6  # significant ones of a decimal that may stand for what rounds to it

DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d*)?|\.\d+"
_FORMS = tuple(
    re.compile(pattern)
    for pattern in (
        rf"(?P<digits>{DIGITS})(?:[eE](?P<exponent>[-+]?\d+))?",
        rf"(?P<whole>\d+\s*)?\\frac\s*\{{\s*(?P<sign>[-+]?)\s*(?P<top>{DIGITS})\s*\}}\s*\{{\s*(?P<bottom>{DIGITS})\s*\}}",
        rf"(?P<whole>\d+\s+)?(?P<top>{DIGITS})\s*/\s*(?P<bottom>{DIGITS})",
        rf"(?:(?P<digits>{DIGITS})\s*(?:\\times|\\cdot|\*|x)\s*)?10\s*\^\s*\{{?\s*(?P<exponent>[-+]?\s*\d+)\s*\}}?",
    )
)


@dataclass(frozen=True, slots=True)
class Number:
    """A number as it is written."""

    value: Fraction
    digits: int | None = None  # significant ones of a decimal; None: it is exact
    places: int = 0  # of a decimal, after the point


def number(text: str) -> Number | None:
    """The number that a text is. None for anything else, and for exponents of ten beyond 400."""
    text = text.strip()
    if len(text) > _LONGEST:
        return None
    sign = 1
    if text.startswith(("+", "-")):
        sign, text = (-1 if text[0] == "-" else 1), text[1:].strip()
    for form in _FORMS:
        if found := form.fullmatch(text):
            return _read(found.groupdict(), sign)
    return None


def _read(parts: dict[str, str | None], sign: int) -> Number | None:
    if parts.get("top") is not None:
        top, bottom = _decimal(parts["top"] or ""), _decimal(parts["bottom"] or "")
        if bottom == 0:
            return None
        value = Fraction(top) / Fraction(bottom) * (-1 if parts.get("sign") == "-" else 1)
        return Number(value=sign * (int(parts["whole"] or 0) + value))
    exponent = int((parts.get("exponent") or "0").replace(" ", ""))
    if abs(exponent) > _MAX_EXPONENT:
        return None
    written = (parts.get("digits") or "1").replace(",", "")
    if "." not in written.rstrip(".") and parts.get("exponent") is None:
        return Number(value=Fraction(sign * int(written.rstrip("."))))
    value = sign * Fraction(Decimal(written)) * Fraction(10) ** exponent
    point = written.partition(".")[2]
    return Number(value=value, digits=len(written.replace(".", "").lstrip("0")), places=len(point) - exponent)


def _decimal(written: str) -> Decimal:
    return Decimal(written.replace(",", ""))


def same_number(one: Number, other: Number) -> bool:
    """Whether two numbers are equal: exactly, or rounded to the digits of the one that is a decimal of at least six."""
    if one.value == other.value:
        return True
    return any(
        (b.digits is None or b.places > a.places) and rounds(b.value, a) for a, b in ((one, other), (other, one))
    )


def rounds(precise: Fraction, decimal: Number) -> bool:
    """Whether a value rounds to a decimal that has at least six significant digits."""
    if decimal.digits is None or decimal.digits < _MIN_DIGITS:
        return False
    return abs(precise - decimal.value) * 2 <= Fraction(10) ** -decimal.places


# -- units -------------------------------------------------------------------------------------------------------------

_TABLE = """
m: 1 m meter metre 米, 1000 km kilometer kilometre 千米 公里, 0.1 dm decimeter, 0.01 cm centimeter centimetre 厘米
m: 0.001 mm millimeter millimetre 毫米, 0.000001 micrometer micron, 0.000000001 nm nanometer
m: 0.0254 in inch inches, 0.3048 ft foot feet, 0.9144 yd yard, 1609.344 mi mile
m3: 0.001 L l liter litre 升, 0.000001 mL ml milliliter millilitre cc 毫升, 0.003785411784 gal gallon
m3: 0.000946352946 qt quart, 0.000473176473 pt pint, 0.0002365882365 cup
s: 1 s sec second 秒, 0.001 ms millisecond, 60 min minute 分钟, 3600 h hr hour 小时, 86400 day 天, 604800 week wk
year: 1 year yr 年 岁, 1/12 month 月
g: 1 g gram 克, 1000 kg kilogram 千克 公斤, 0.001 mg milligram, 1000000 tonne, 453.59237 lb pound, 28.349523125 oz ounce
USD: 1 USD dollar, 0.01 cent ¢
GBP: 1 GBP £
EUR: 1 EUR € euro
JPY: 1 JPY ¥ yen
CNY: 1 CNY yuan 元
INR: 1 INR ₹ rupee
J: 1 J joule, 1000 kJ
cal: 1 cal calorie, 1000 kcal
N: 1 N newton
W: 1 W watt, 1000 kW
V: 1 V volt
A: 1 A amp ampere
Hz: 1 Hz hertz
Pa: 1 Pa pascal
K: 1 K kelvin
mol: 1 mol mole
eV: 1 eV
ton: 1 ton
degree: 1 ^\\circ degree deg 度
celsius: 1 ^\\circC celsius
fahrenheit: 1 ^\\circF fahrenheit
radian: 1 rad radian
%: 1 % percent
unit: 1 unit 个
person: 1 person people 人
: 12 dozen, 100 hundred, 1000 thousand, 1000000 million, 1000000000 billion, 1000000000000 trillion
"""
_NOUNS = """
student child children kid boy girl man men woman women friend customer employee apple orange banana egg fish book page
pen pencil marble cookie slice piece point box bottle can bag card sticker pack fruit animal flower stamp bird chair
ticket pair balloon tree candy candies coin game wheel car block toy cat dog cow crayon time way rose shirt cake
cupcake pizza question leg bead song item chicken ball seat plant photo shoe sheet step trip cube triangle side vertex
vertices edge face diagonal solution root digit term integer number set outcome move
"""


@dataclass(frozen=True, slots=True)
class Unit:
    """A product of powers of basic units."""

    size: Fraction
    powers: tuple[tuple[str, int], ...]


_UNITS = {noun: (noun, 1, Fraction(1)) for noun in _NOUNS.split()}  # name -> basic unit, its power, size
for _basic, _, _entries in (line.partition(":") for line in _TABLE.strip().splitlines()):
    for _size, *_names in map(str.split, _entries.split(",")):
        _UNITS |= {_name: (_basic.rstrip("3"), 3 if _basic.endswith("3") else 1, Fraction(_size)) for _name in _names}
_LONGEST_FIRST = (re.escape(name).replace("circ", r"circ\s*+") for name in sorted(_UNITS, key=len, reverse=True))
_NAME = rf"(?>{'|'.join(_LONGEST_FIRST)})(?:e?s)?(?![a-zA-Z])"
_POWER = r"\^\s*+\{?\s*+-?\d\s*+\}?"
_FACTOR = re.compile(rf"(?P<per>/|\bper\b)?+[\s*]*+(?:\\cdot\s*+)?+(?P<name>{_NAME})(?:\s*+(?P<power>{_POWER}))?+")
_UNIT = (  # possessive throughout: it must not be tried in several ways
    rf"(?:(?P<raised>square|sq\.?|cubic|cu\.?)\s++)?(?P<unit>{_NAME}(?>\s*+(?:/|\bper\b|\\cdot|\*|{_POWER}|{_NAME}))*+)"
)
_MEASURED = re.compile(rf"(?P<value>.*?)(?P<gap>\s*)(?<![a-zA-Z\\^_]){_UNIT}\s*", re.DOTALL)
_PRICE = re.compile(r"(?P<sign>[-+]?)\s*(?P<unit>USD|[£€¥₹])\s*(?P<value>.+)", re.DOTALL)
_COUNTED = re.compile(r"(?P<value>.*\d)\s+(?P<noun>[a-z]{3,})")
_PLAIN_UNIT = re.compile(  # no product, as symbols are
    rf"(?:(?:dozen|hundred|thousand|million|billion|trillion)\s++)?+{_NAME}"
    rf"(?>\s*+(?:{_POWER}|(?:/|\bper\b)\s*+{_NAME}))*+"
)
_START = re.compile(rf"\s*(?!in\s+[a-z]){_UNIT}(?!\s*\d)")


def unit_at_start(text: str) -> str:
    """The unit that a text begins with; "" for none."""
    found = _START.match(text)
    return f" {found.group().strip()}" if found else ""


def measured(text: str, nouns: tuple[str, ...] | None = None) -> tuple[str, Fraction, Unit | None]:
    """The value of a quantity, its scale (a thousand, a million) and its unit. A noun behind a number is a unit of its
    own: those of a list; with `nouns` None any, else these too."""
    text = re.sub(r"\b(km|m)p(?=h\b)", lambda found: "km/" if found[1] == "km" else "mi/", text)
    if price := _PRICE.fullmatch(text):
        value, scale, _ = measured(price["value"], nouns)
        return price["sign"] + value, scale, _product(price["unit"])[1]
    found = _MEASURED.fullmatch(text)
    if found and found["value"].strip():
        value, gap, unit = found["value"].strip(), found["gap"], found["unit"]
        is_word = "a" <= unit[0].lower() <= "z"
        single = not unit[1:2].isalpha()
        typed = (
            number(value) is not None and (not single or (gap and "\\" not in value)) and _PLAIN_UNIT.fullmatch(unit)
        )
        if not is_word or "\x1f" in gap or typed:
            scale, product = _product(unit, {"s": 2, "c": 3}.get((found["raised"] or " ")[0], 1))
            return value, scale, product
    counted = _COUNTED.fullmatch(text)
    if counted and number(counted["value"]) is not None and (nouns is None or _singular(counted["noun"]) in nouns):
        return counted["value"], Fraction(1), Unit(Fraction(1), ((_singular(counted["noun"]), 1),))
    return text, Fraction(1), None


def _singular(noun: str) -> str:
    return noun.removesuffix("s")


def _product(text: str, raised: int = 1) -> tuple[Fraction, Unit | None]:
    """The scale and the unit of names that are multiplied and divided."""
    scale, size, powers = Fraction(1), Fraction(1), Counter[str]()
    for found in _FACTOR.finditer(text):
        name = re.sub(r"\s", "", found["name"])
        basic, power, each = next(_UNITS[one] for one in (name, name[:-1], name[:-2]) if one in _UNITS)
        exponent = int(re.sub(r"[^-\d]", "", found["power"] or "1")) * raised * (-1 if found["per"] else 1)
        if not basic:
            scale *= each
            continue
        size *= each**exponent
        powers[basic] += power * exponent
    return scale, Unit(size, tuple(sorted(powers.items()))) if powers else None
