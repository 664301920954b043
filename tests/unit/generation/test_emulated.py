"""The emulated engine: completions of the right lengths at the right time, interrupted as real ones are."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from areal_core.api.wire import version_spans
from areal_core.errors import ModelError
from areal_core.generation.engines.emulated import EmulatedEngine
from areal_core.generation.engines.engine import Generation
from areal_core.generation.engines.scheduler import stream_seed, uniforms
from areal_core.planning.time_model import completion_length
from areal_core.types import Completion, GenerationRequest
from tests.support.emulation import CONFIG, LIMIT, MODEL, SCALE, Clock, engine, request
from tests.support.offline import gathered

PROMPT = 3 * SCALE  # real tokens of the prompt of `request`


def real_length(wanted: GenerationRequest, index: int) -> int:
    """The length of a completion before the limit."""
    share = uniforms(np.array([stream_seed(wanted.seed, index)], np.uint64), np.zeros(1, np.int64))[0]
    return completion_length(CONFIG, float(share))


def wire_length(wanted: GenerationRequest, index: int) -> int:
    return min(-(-real_length(wanted, index) // SCALE), LIMIT)


def run(served: EmulatedEngine, *wanted: GenerationRequest) -> dict[str, list[Completion]]:
    """Completions by request, once all have ended."""
    for each in wanted:
        served.add(each)
    done: list[Generation] = []
    while served.running or served.waiting:
        done += served.step()
    return gathered(done)


def lengths(completions: Sequence[Completion]) -> list[int]:
    return [len(completion.token_ids) for completion in completions]


def test_completions_have_the_lengths_of_their_seed_in_any_batch() -> None:
    requests = [request(f"r{seed}", seed=seed, n=8) for seed in range(6)]
    together = engine(Clock(), slots=10)
    completions = run(together, *requests)
    reasons = set()
    for each in requests:
        found = completions[each.request_id]
        assert lengths(found) == [wire_length(each, index) for index in range(8)]
        assert lengths(found) == lengths(run(engine(Clock()), each)[each.request_id])
        for index, completion in enumerate(found):
            cut = real_length(each, index) >= LIMIT * SCALE
            assert completion.finish_reason == ("length" if cut else "stop")
            assert (completion.token_ids == 1).nonzero()[0].tolist() == ([] if cut else [len(completion.token_ids) - 1])
            assert np.isfinite(completion.logprobs).all()
            assert len(completion.logprobs) == len(completion.versions) == len(completion.token_ids)
            reasons.add(completion.finish_reason)
    assert reasons == {"stop", "length"}
    assert together.stats.generated_tokens == sum(sum(lengths(group)) for group in completions.values())


@pytest.mark.parametrize("n", [1, 16])
def test_completions_that_run_together_share_the_reading_of_weights(n: int) -> None:
    clock, wanted = Clock(), request(n=n)
    run(engine(clock), wanted)
    left = sorted(min(real_length(wanted, index), LIMIT * SCALE) for index in range(n))
    expected_s, done = MODEL.prefill_s([PROMPT]), 0
    for running, length in zip(range(n, 0, -1), left, strict=True):  # the shortest completion leaves first
        expected_s += MODEL.decode_s(running, running * (PROMPT + done), length - done)
        done = length
    assert clock.now_s * CONFIG.speed == pytest.approx(expected_s)


def test_an_update_stands_still_no_longer_than_its_caller_waits() -> None:
    clock = Clock()
    config = dataclasses.replace(CONFIG, speed=1.0, handover_s=60.0)
    served = engine(clock, config)
    served.add(request(n=2))
    served.step()
    before_s, sampled = clock.now_s, served.stats.generated_tokens
    served.swap(None, 1)
    assert clock.now_s - before_s == pytest.approx(5.0)
    while served.stats.generated_tokens == sampled:
        served.step()
    assert 60.0 < clock.now_s - before_s < 61.0  # the rest passes in steps


def test_a_full_cache_bounds_the_running_completions_and_loses_none() -> None:
    # Room for the prompts of all sixteen, and for three completions at their full length.
    kv_tokens = 3 * (PROMPT + LIMIT * SCALE)
    share = (MODEL.cost.weight_bytes + (kv_tokens + 0.5) * MODEL.cost.kv_bytes) / 80e9
    served = engine(Clock(), dataclasses.replace(CONFIG, memory_share=share))
    served.add(request(n=16))
    running: list[int] = []
    completions: list[Generation] = []
    while served.running or served.waiting:
        completions += served.step()
        running.append(served.running)
    assert running[0] == 16
    assert any(before < after for before, after in pairwise(running))  # some gave way, and came back
    assert lengths(gathered(completions)["r"]) == [wire_length(request(), index) for index in range(16)]


def test_an_update_in_the_middle_splits_versions_and_costs_a_recomputation() -> None:
    plain, clock = Clock(), Clock()
    wanted = request(n=1, seed=3)
    run(engine(plain), wanted)
    served = engine(clock)
    served.add(wanted)
    while clock.now_s < plain.now_s / 2:
        assert not served.step()
    sampled = served.stats.generated_tokens
    clock.now_s += 7.0  # paused
    served.clear_cache()
    served.swap(None, 5, recompute=False)
    (completion,) = run(served)["r"]
    total = wire_length(wanted, 0)
    assert 0 < sampled < total
    assert version_spans(completion.versions) == [(0, 0, sampled), (5, sampled, total)]
    assert round(served.stats.recomputed_tokens) == pytest.approx(3 + sampled, abs=1)
    recompute_s = served.stats.recompute_ms * 1e-3 * CONFIG.speed
    assert (clock.now_s - 7.0 - plain.now_s) * CONFIG.speed == pytest.approx(CONFIG.handover_s + recompute_s)
    assert MODEL.prefill_s([PROMPT + sampled * SCALE]) <= recompute_s


def test_weights_are_looked_at(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"model.norm.weight": np.zeros(3, np.float32)}, file)
    with pytest.raises(ModelError, match=r"^model\.embed_tokens\.weight: tensor is missing"):
        engine(Clock()).read(file)
