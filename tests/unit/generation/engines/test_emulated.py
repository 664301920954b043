"""The emulated engine: completions of the right lengths at the right time, interrupted as real ones are."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from areal_core.api.wire import version_spans
from areal_core.errors import GenerationError, ModelError
from areal_core.generation.engines.emulated import EmulatedEngine
from areal_core.generation.engines.engine import Generation
from areal_core.generation.engines.sampling import stream_seed, uniforms
from areal_core.planning.time_model import TimeModel, completion_length
from areal_core.types import Completion, GenerationRequest
from tests.support.emulation import CONFIG, LIMIT, MODEL, SCALE, Clock, engine, pace, request
from tests.support.models import SPEC
from tests.support.offline import gathered

PROMPT = 3 * SCALE  # real tokens of the prompt of `request`


def real_length(wanted: GenerationRequest, index: int) -> int:
    """The length of a completion before the limit."""
    share = uniforms(np.array([stream_seed(wanted.seed, index)], np.uint64), np.zeros(1, np.int64))[0]
    return completion_length(CONFIG, float(share))


def wire_length(wanted: GenerationRequest, index: int) -> int:
    return min(-(-real_length(wanted, index) // SCALE), LIMIT)


def run(served: EmulatedEngine, ended: Sequence[Generation] = ()) -> dict[str, list[Completion]]:
    """Completions by request, once all have ended; those in `ended` have."""
    done = list(ended)
    while served.running or served.waiting:
        done += served.step()
    return gathered(done)


def advance(served: EmulatedEngine, clock: Clock, until_s: float) -> list[Generation]:
    done: list[Generation] = []
    while clock.now_s < until_s and (served.running or served.waiting):
        done += served.step()
    return done


def test_completions_have_the_lengths_of_their_seed_in_any_batch() -> None:
    requests = [request(f"r{seed}", seed=seed, n=8) for seed in range(6)]
    alone = {each.request_id: run_alone(each) for each in requests}
    together = engine(Clock(), slots=10)
    for each in requests:
        together.add(each)
    completions = run(together)
    reasons = set()
    for each in requests:
        lengths = [len(completion.token_ids) for completion in completions[each.request_id]]
        assert lengths == [wire_length(each, index) for index in range(8)]
        assert lengths == [len(completion.token_ids) for completion in alone[each.request_id]]
        for index, completion in enumerate(completions[each.request_id]):
            cut = real_length(each, index) >= LIMIT * SCALE
            assert completion.finish_reason == ("length" if cut else "stop")
            assert ((completion.token_ids == 1).nonzero()[0].tolist()) == (
                [] if cut else [len(completion.token_ids) - 1]
            )
            assert np.isfinite(completion.logprobs).all()
            assert len(completion.logprobs) == len(completion.versions) == len(completion.token_ids)
            reasons.add(completion.finish_reason)
    assert reasons == {"stop", "length"}
    assert together.stats.generated_tokens == sum(len(a.token_ids) for group in completions.values() for a in group)


def run_alone(wanted: GenerationRequest) -> tuple[Completion, ...]:
    served = engine(Clock())
    served.add(wanted)
    return run(served)[wanted.request_id]


def test_a_completion_takes_the_time_of_its_prefill_and_its_decode_steps() -> None:
    clock, wanted = Clock(), request(n=1)
    served = engine(clock)
    served.add(wanted)
    run(served)
    steps = min(real_length(wanted, 0), LIMIT * SCALE)
    expected_s = MODEL.prefill_s([PROMPT]) + MODEL.decode_s(1, PROMPT, steps)
    assert clock.now_s * CONFIG.speed == pytest.approx(expected_s)


def test_completions_that_run_together_share_the_reading_of_weights() -> None:
    clock, wanted = Clock(), request(n=16)
    served = engine(clock)
    served.add(wanted)
    run(served)
    left = sorted(min(real_length(wanted, index), LIMIT * SCALE) for index in range(16))
    expected_s, done = MODEL.prefill_s([PROMPT]), 0
    for running, length in zip(range(16, 0, -1), left, strict=True):  # the shortest completion leaves first
        expected_s += MODEL.decode_s(running, running * (PROMPT + done), length - done)
        done = length
    assert clock.now_s * CONFIG.speed == pytest.approx(expected_s)


def test_a_step_takes_milliseconds_however_much_there_is_to_pay() -> None:
    clock = Clock()
    config = dataclasses.replace(CONFIG, prefill_share=1e-5)
    served = engine(clock, config)
    served.add(request(n=8))
    run(served)
    assert TimeModel(config).prefill_s([PROMPT]) > 5 * 0.004 * CONFIG.speed
    assert clock.longest_s < 0.0041


def test_an_update_stands_still_for_hand_over_and_recomputation_before_it_returns() -> None:
    clock = Clock()
    served = engine(clock)
    served.add(request(n=2))
    advance(served, clock, 0.01)
    served.clear_cache()
    before_s = clock.now_s
    served.swap(None, 1, recompute=False)
    recompute_s = 1e-3 * served.stats.recompute_ms
    assert clock.now_s - before_s == pytest.approx(CONFIG.handover_s / CONFIG.speed + recompute_s)
    assert recompute_s > 0
    sampled = served.stats.generated_tokens
    advance(served, clock, clock.now_s + 0.02)
    assert served.stats.generated_tokens > sampled  # nothing is owed any more


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


def test_accelerators_that_train_in_between_get_their_weights_with_the_change() -> None:
    clock = Clock()
    served = EmulatedEngine(SPEC, CONFIG, slots=4, context=32, switches=True, pace=pace(clock))
    served.swap(None, 1)
    assert clock.now_s == 0.0
    assert served.stats.swap_ms == 0.0


def test_slots_bound_what_runs_and_drained_engines_start_nothing() -> None:
    clock = Clock()
    served = engine(clock, slots=3)
    served.add(request(n=8))
    served.step()
    assert (served.running, served.waiting) == (3, 5)
    served.admitting = False
    ended: list[Generation] = []
    while served.running:
        ended += served.step()
    assert served.waiting == 5
    served.admitting = True
    assert [len(a.token_ids) for a in run(served, ended)["r"]] == [wire_length(request(), index) for index in range(8)]


def test_the_cache_bounds_what_runs_and_nothing_is_lost_when_it_is_full() -> None:
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
    assert [len(a.token_ids) for a in gathered(completions)["r"]] == [
        wire_length(request(), index) for index in range(16)
    ]


def test_an_update_in_the_middle_splits_versions_and_costs_a_recomputation() -> None:
    plain, clock = Clock(), Clock()
    wanted = request(n=1, seed=3)
    undisturbed = engine(plain)
    undisturbed.add(wanted)
    run(undisturbed)
    served = engine(clock)
    served.add(wanted)
    advance(served, clock, plain.now_s / 2)
    sampled = served.stats.generated_tokens
    before_s = clock.now_s
    clock.now_s += 7.0  # paused
    served.clear_cache()
    served.swap(None, 5, recompute=False)
    (completion,) = run(served)["r"]
    total = wire_length(wanted, 0)
    assert 0 < sampled < total
    assert version_spans(completion.versions) == [(0, 0, sampled), (5, sampled, total)]
    extra_s = clock.now_s - 7.0 - plain.now_s
    recomputed = round(served.stats.recomputed_tokens)
    assert recomputed == pytest.approx(3 + sampled, abs=1)
    assert extra_s * CONFIG.speed == pytest.approx(CONFIG.handover_s + served.stats.recompute_ms * 1e-3 * CONFIG.speed)
    assert MODEL.prefill_s([PROMPT + sampled * SCALE]) <= served.stats.recompute_ms * 1e-3 * CONFIG.speed
    assert before_s < plain.now_s


def test_aborted_completions_keep_what_they_have() -> None:
    clock = Clock()
    served = engine(clock, slots=6)
    served.add(request("group-1-0", n=4, seed=1))
    served.add(request("b", n=4, seed=2))
    assert advance(served, clock, 0.004) == []
    before = served.stats.rollout_tokens
    aborted = gathered(served.abort(["group-1-0", "unknown"]))
    assert aborted.keys() == {"group-1-0"}
    assert {completion.finish_reason for completion in aborted["group-1-0"]} == {"abort"}
    assert all(len(completion.token_ids) < LIMIT for completion in aborted["group-1-0"])
    left = sum(len(completion.token_ids) for completion in aborted["group-1-0"])
    completions = run(served)["b"]
    assert [len(completion.token_ids) for completion in completions] == [
        wire_length(request(seed=2), index) for index in range(4)
    ]
    assert served.stats.generated_tokens == left + sum(len(completion.token_ids) for completion in completions)
    assert served.stats.rollout_tokens == before == left > 0  # counted apart, and whether or not they have ended
    served.add(request("c"))
    assert [len(completion.token_ids) for completion in gathered(served.abort())["c"]] == [0] * 4
    assert (served.running, served.waiting) == (0, 0)


def test_what_the_real_engine_refuses_is_refused() -> None:
    served = engine(Clock())
    served.add(request("a"))
    with pytest.raises(GenerationError, match=r"^request_id: a is already being served$"):
        served.add(request("a"))
    with pytest.raises(GenerationError, match=r"^max_tokens: must be at least 1, got 0$"):
        served.check(request(max_tokens=0))


def test_weights_are_looked_at(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"model.norm.weight": np.zeros(3, np.float32)}, file)
    with pytest.raises(ModelError, match=r"^model\.embed_tokens\.weight: tensor is missing"):
        engine(Clock()).read(file)


def test_emulated_time_is_slept_through() -> None:
    """A second of real time: what it costs in CPU time is a small part, on any machine that is not on its knees."""
    served = EmulatedEngine(SPEC, dataclasses.replace(CONFIG, speed=2.0, length_sigma=0.0), slots=64, context=32)
    served.add(request(n=32))
    cpu, start = time.process_time(), time.monotonic()
    run(served)
    assert time.process_time() - cpu < 0.5 * (time.monotonic() - start)


def test_it_starts_without_torch() -> None:
    modules = "areal_core.generation.server.routes, areal_core.generation.engines.emulated"
    code = f"import {modules}, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
