"""Verifiers for the tasks of `benchmarks.trl`, for an environment without this system's packages.

They return the same scores, from 0 to 1, as the verifiers of this system.
"""

from __future__ import annotations

import re

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def arithmetic(completion: str, gold: str) -> float:
    """1 if the text after the last `#` is the gold answer, else 0."""
    _, mark, conclusion = completion.rpartition("#")
    return float(bool(mark) and conclusion == gold)


def needle(completion: str, gold: str) -> float:
    """Score the text in the last <answer> tags, or else the last line.
    1 if it equals the gold answer in any case, else the gold answer's share of it."""
    tagged = _TAGGED.findall(completion)
    answer = (tagged[-1] if tagged else (completion.strip().splitlines() or [""])[-1]).strip()
    if answer.replace(" ", "").lower() == gold.lower():
        return 1.0
    return len(gold) / len(answer) if gold in answer else 0.0


VERIFIERS = {"arithmetic": arithmetic, "needle": needle}
