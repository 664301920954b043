"""Texts that are kept out of training: a fixed share of all that a generated task can have, chosen by hash."""

from __future__ import annotations

import hashlib

HELD_OUT_SHARE = 0.1  # of hash space


def is_held_out(text: str) -> bool:
    """Whether this prompt is reserved for evaluation: decided by its hash alone."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) < HELD_OUT_SHARE * 2**64
