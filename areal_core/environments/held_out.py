"""Texts that are kept out of training: a fixed share of all that a generated task can have, chosen by hash."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")

SEED = 20250530  # of the draws that are held out: the set is the same for every run
_DRAWS = 200  # for each that is held out, as one in ten is; a task that needs more has too few prompts
HELD_OUT_SHARE = 0.1  # of hash space


def is_held_out(text: str) -> bool:
    """Whether this prompt is reserved for evaluation: decided by its hash alone."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) < HELD_OUT_SHARE * 2**64


def reserved(draws: Iterable[tuple[str, T]], count: int, fits: Callable[[T], bool] = lambda drawn: True) -> list[T]:
    """What is drawn with the first `count` distinct texts that are reserved and fit; fewer where draws are too much
    alike."""
    found: dict[str, T] = {}
    for text, drawn in itertools.islice(draws, _DRAWS * count):
        if is_held_out(text) and text not in found and fits(drawn):
            found[text] = drawn
            if len(found) == count:
                break
    return list(found.values())
