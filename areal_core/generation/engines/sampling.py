"""Counter-based random numbers: the one that samples a token depends on (seed, completion, position) alone.

So the same request gives the same completions in whatever batches they are decoded, however often decoding is
interrupted, and no generator's state has to be kept or moved.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 64) - 1
# SplitMix64 (Steele et al. 2014): its increment, 2^64 / golden ratio, and the factors of its finaliser.
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.integer]) -> NDArray[np.float64]:
    """One number in [0, 1) for each stream and position, both [N]: output number `position` of a SplitMix64 generator
    that starts at `seed`. numba compiles it too.

    Multiples of 2^-52: with a finer grid u * total could round up to total, and inversion would run off the end.
    """
    x = seeds + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_FIRST)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_SECOND)
    return ((x ^ (x >> np.uint64(31))) >> np.uint64(12)).astype(np.float64) * 2.0**-52


def stream_seed(seed: int, completion_index: int) -> int:
    """Seed of the stream of one completion of a request, in [0, 2^64); completion 0 of n has the seed that a single
    completion would have. Mixed twice, so that neighbouring seeds and completions have nothing in common."""
    return _mix(_mix(seed) + completion_index * _GOLDEN)


def _mix(x: int) -> int:
    x &= _MASK
    x = (x ^ (x >> 30)) * _FIRST & _MASK
    x = (x ^ (x >> 27)) * _SECOND & _MASK
    return x ^ (x >> 31)
