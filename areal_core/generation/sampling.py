"""Counter-based random numbers: what a token is drawn with depends on (seed, answer, position) and on nothing else.

So the same request gives the same answers in whatever company its answers are decoded, however often decoding is
interrupted, and no generator's state has to be kept or moved.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio, the increment of SplitMix64
_MASK = (1 << 64) - 1


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.integer]) -> NDArray[np.float64]:
    """One number in [0, 1) for each stream and position, both [N]: output number `position` of a SplitMix64 generator
    (Steele et al. 2014) that starts at `seed`.

    Multiples of 2^-52: with a finer grid u * total could round up to total, and inversion would run off the end.
    """
    counters = (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    return (_mix(seeds + counters) >> np.uint64(12)).astype(np.float64) * 2.0**-52


def stream_seed(seed: int, answer_index: int) -> int:
    """Seed of the stream of one answer of a request, in [0, 2^64); answer 0 of n answers has the seed that a single
    answer would have. Mixed twice, so that neighbouring seeds and answers have nothing in common."""
    mixed = _mix(np.array([seed & _MASK], dtype=np.uint64))
    return int(_mix(mixed + np.array([answer_index], dtype=np.uint64) * _GOLDEN)[0])


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
