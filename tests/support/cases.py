"""Cases of the mathematical verifiers, from files of tests/data: `gold  ==  answer  |  answer`, or `!=`."""

import re
from pathlib import Path

_DATA = Path(__file__).parents[1] / "data"
_LINE = re.compile(r"(?P<gold>.+?)  (?P<sign>==|!=)  (?P<answers>.+)")


def equality_cases(name: str) -> list[tuple[str, str, bool]]:
    """(gold answer, other answer, whether they are the same) of every case in a file."""
    lines = (_DATA / name).read_text(encoding="utf-8").splitlines()
    read = [_LINE.fullmatch(line) for line in lines if line and not line.startswith("# ")]
    assert None not in read, name
    return [(one["gold"], other, one["sign"] == "==") for one in read if one for other in one["answers"].split("  |  ")]
