"""Verifiers of the tasks that `benchmarks.trl` compares on, for an environment without this system's packages: the
scores from 0 to 1 that its own verifiers give the text of a completion."""

from __future__ import annotations

import re

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def arithmetic(completion: str, gold: str) -> float:
    """1 if the text after the last `#` is the gold answer, else 0."""
    _, mark, conclusion = completion.rpartition("#")
    return float(bool(mark) and conclusion == gold)


def needle(completion: str, gold: str) -> float:
    """Of the text in the last <answer> tags, or else of the last line: 1 if it is the gold answer in any case, else the
    gold answer's share of it."""
    tagged = _TAGGED.findall(completion)
    answer = (tagged[-1] if tagged else (completion.strip().splitlines() or [""])[-1]).strip()
    if answer.replace(" ", "").lower() == gold.lower():
        return 1.0
    return len(gold) / len(answer) if gold in answer else 0.0


VERIFIERS = {"arithmetic": arithmetic, "needle": needle}
