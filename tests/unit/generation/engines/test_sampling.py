"""Random numbers that depend on (seed, completion, position) alone."""

import numpy as np

from areal_core.generation.engines.sampling import stream_seed, uniforms


def streams(*seeds):
    return np.array(seeds, dtype=np.uint64)


def test_a_stream_is_the_splitmix64_generator_of_its_seed():
    # First outputs of SplitMix64 for seed 1234567 (the reference implementation's own test vector), cut to 52 bits.
    outputs = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    drawn = uniforms(streams(*[1234567] * 4), np.arange(4))
    assert drawn.tolist() == [(output >> 12) / 2**52 for output in outputs]


def test_stream_seeds_differ_between_completions_and_requests_and_fit_64_bits():
    seeds = {stream_seed(seed, completion) for seed in (0, 1, 2, 2**63, -1) for completion in range(200)}
    assert len(seeds) == 5 * 200
    assert all(0 <= seed < 2**64 for seed in seeds)
