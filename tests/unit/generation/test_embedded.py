"""The embedded engine against transformers, its kernels against numpy and torch, and itself in other batches."""

import dataclasses
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from areal_core.errors import DivergenceError, GenerationError
from areal_core.generation.engines import embedded as engine_module
from areal_core.generation.engines import kernels
from areal_core.generation.engines.decoder import CpuDecoder
from areal_core.generation.engines.scheduler import uniforms
from areal_core.generation.engines.slots import Pass
from areal_core.generation.engines.torch_decoder import TorchDecoder
from areal_core.models import vectors
from tests.support.generation import LLAMA_GQA, QWEN2, QWEN2_GQA, QWEN3, SPECS, Reference, request, weights
from tests.support.offline import OfflineEngine, gathered


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class TorchEngine(OfflineEngine):
    """The decoder of other devices, on this one."""

    def prepare(self, weights):
        return TorchDecoder(self.spec, weights, self.context, "cpu")


KINDS = {"cpu": OfflineEngine, "torch": TorchEngine}


def engine(spec=QWEN2, seed=1, kind="cpu", **options):
    return KINDS[kind](spec, weights(spec, seed), **({"slots": 8} | options))


def finish(engine, done=()):
    """Completions by request, once all have ended; those in `done` have."""
    done = list(done)
    while engine.running or engine.waiting:
        done += engine.step()
    assert sum(generation.last for generation in done) == len({generation.request.request_id for generation in done})
    return gathered(done)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_logprobs_are_those_of_transformers_before_across_and_after_interruptions(tmp_path, spec, kind):
    """More completions than slots, prompts of 1 to 13 tokens, groups, limits below and above a block of the cache."""
    reference = Reference(tmp_path, spec, {0: 1, 3: 2, 4: 3})
    served = engine(spec, kind=kind)
    mixed = [request(f"r{i}", range(2, 3 + 3 * i), n=1 + 2 * i, max_tokens=10 + 15 * i, seed=i) for i in range(5)]
    for item in mixed:
        served.add(item)
    done = []
    for version, seed in ((3, 2), (4, 3)):
        for _ in range(6):
            done += served.step()
        served.swap(served.prepare(weights(spec, seed)), version)
        assert served.running  # the swap interrupted something
    found = finish(served, done)

    assert len(found) == 5
    spans = set()
    for asked in mixed:
        assert len(found[asked.request_id]) == asked.n
        for completion in found[asked.request_id]:
            assert len(completion.token_ids) == len(completion.logprobs) == len(completion.versions) > 0
            assert (np.diff(completion.versions) >= 0).all()
            spans.add(tuple(np.unique(completion.versions).tolist()))
            reference.check(asked, completion)
    assert any(len(span) > 1 for span in spans)
    assert {version for span in spans for version in span} == {0, 3, 4}


def test_an_update_in_the_middle_of_a_group_recomputes_its_prompt_once():
    served = engine()
    served.add(request(n=3, max_tokens=9, stop_token_ids=()))
    for _ in range(4):
        served.step()
    served.swap(served.prepare(weights(QWEN2, 2)), 7)
    assert served.stats.recomputed_tokens == (3 + 4 - 1) + 2 * (4 - 1)  # all but the last, which the next step feeds
    assert [one.versions.tolist() for one in finish(served)["r"]] == [[0] * 4 + [7] * 5] * 3
    spent_ms = served.stats.recompute_ms
    assert spent_ms > 0
    served.add(request("later", prompt=range(2, 12), max_tokens=3))
    finish(served)
    assert served.stats.recompute_ms == spent_ms  # prefill of a new prompt is no recomputation


@pytest.mark.parametrize(("kind", "seed"), [*(("cpu", seed) for seed in range(6)), ("torch", 0), ("torch", 1)])
def test_completions_are_batch_invariant_however_they_are_disturbed(monkeypatch, seed, kind):
    """Prompts and limits around the blocks of the cache, completions of a group that start together and one by one,
    prompts longer than what one pass prefills, arrivals, aborts and cleared caches. To the bit, where that is
    promised."""
    monkeypatch.setattr(engine_module, "_PREFILL_TOKENS", 40)
    rng = random.Random(seed)
    spec = dataclasses.replace((QWEN2, QWEN2_GQA)[seed % 2], context=260)
    requests = [
        request(
            f"r{i}",
            [rng.randrange(2, spec.vocab_size) for _ in range(rng.choice([1, 15, 16, 17, 64, 65, 128]))],
            n=rng.choice([1, 3, 9]),
            max_tokens=rng.choice([1, 15, 16, 17, 64, 90]),
            seed=i,
            stop_token_ids=(),
            temperature=rng.choice([0.7, 1.0]),
        )
        for i in range(10)
    ]
    alone = engine(spec, kind=kind, slots=7)
    wanted = {each.request_id: alone.generate([each])[0] for each in requests}
    served = engine(spec, kind=kind, slots=7)
    arriving, done, cleared = list(requests), [], 0
    while arriving or served.running or served.waiting:
        if arriving and (rng.random() < 0.2 or not (served.running or served.waiting)):
            served.add(arriving.pop(0))
        done += served.step()
        if rng.random() < 0.05:
            served.clear_cache()
            cleared += served.running > 0
        if rng.random() < 0.01:
            done += served.abort(None if rng.random() < 0.3 else [rng.choice(requests).request_id])
    assert cleared > 3
    found = gathered(done)
    assert found.keys() == wanted.keys()
    for request_id, completions in found.items():
        for completion, other in zip(completions, wanted[request_id], strict=True):
            length = len(completion.token_ids)
            assert completion.finish_reason == "abort" or length == len(other.token_ids)
            assert completion.token_ids.tolist() == other.token_ids[:length].tolist()
            np.testing.assert_allclose(
                completion.logprobs, other.logprobs[:length], atol=2e-4 if kind == "torch" else 0, rtol=0
            )


def test_an_id_that_is_being_served_is_refused():
    served = engine()
    served.add(request("taken"))
    with pytest.raises(GenerationError, match=r"^request_id: taken is already being served$"):
        served.add(request("taken"))
    assert served.waiting == 1
    finish(served)
    served.add(request("taken"))


def test_abort_of_a_group_of_which_some_completions_are_finished_and_some_wait():
    served = engine(slots=2)
    served.add(request(n=5, max_tokens=3, stop_token_ids=()))
    before = [generation for _ in range(4) for generation in served.step()]
    assert [(list(generation.completions), generation.last) for generation in before] == [([0, 1], False)]
    after = served.abort()
    assert [generation.last for generation in after] == [False] * (len(after) - 1) + [True]
    assert [(len(a.token_ids), a.finish_reason) for a in gathered(before + after)["r"]] == [
        (3, "length"), (3, "length"), (1, "abort"), (1, "abort"), (0, "abort"),
    ]  # fmt: skip
    assert (served.running, served.waiting) == (0, 0)
    assert served.step() == []


def test_tokens_of_the_rollout_are_counted_apart_as_they_are_sampled():
    served = engine(slots=2)
    served.add(request("group-1-0", n=3, max_tokens=4, stop_token_ids=()))
    served.add(request("held-out-1", max_tokens=4, stop_token_ids=()))
    ended = [generation for _ in range(6) for generation in served.step()]
    assert (served.stats.generated_tokens, served.stats.rollout_tokens) == (4 + 4 + 2 + 2, 4 + 4 + 2)
    finish(served, ended)
    assert (served.stats.generated_tokens, served.stats.rollout_tokens) == (16, 12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tensor", ["model.norm.weight", "model.layers.0.self_attn.k_proj.weight"])
def test_logits_that_are_not_finite_are_an_error(tensor, kind):
    broken = weights(QWEN2, 1)
    broken[tensor] = torch.full_like(broken[tensor], torch.inf)
    with pytest.raises(DivergenceError, match="version 5"):
        KINDS[kind](QWEN2, broken, slots=2, version=5).generate([request()])


def test_the_prompt_of_a_group_is_prefilled_once_and_again_after_an_update():
    served, ran = engine(slots=4), []
    gather = served._batch.gather
    served._batch.gather = lambda running: ran.append(gather(running)) or ran[-1]
    served.add(request(prompt=range(2, 22), n=6, max_tokens=5, stop_token_ids=()))
    ended = [generation for _ in range(6) for generation in served.step()]
    served.swap(served.prepare(weights(QWEN2, 2)), 1)
    finish(served, ended)
    # Twenty tokens for four completions; none for those that start later; all once more after the update.
    assert [len(rows.tokens) for rows, _, _ in ran] == [20, 4, 4, 4, 4, 2, 20 + 1, 2, 2, 2, 1]


def test_decoding_goes_on_while_long_prompts_are_prefilled(monkeypatch):
    monkeypatch.setattr(engine_module, "_PREFILL_TOKENS", 8)
    served = engine(slots=2)
    served.add(request("short", max_tokens=9, stop_token_ids=()))
    served.step()
    served.add(request("long", [2] * 60, max_tokens=3, stop_token_ids=()))
    for _ in range(5):
        served.step()
    assert served.stats.generated_tokens == 6  # all of them of the short one


SHAPES = {
    "qwen2": QWEN2,
    "qwen2-gqa": QWEN2_GQA,
    "llama-untied": LLAMA_GQA,
    "nothing-divides": dataclasses.replace(
        LLAMA_GQA, hidden_size=70, heads=5, kv_heads=1, head_dim=18, intermediate_size=37, vocab_size=131
    ),
    "qwen3": QWEN3,
    "wide": dataclasses.replace(QWEN2, hidden_size=192, heads=6, kv_heads=2, head_dim=64, intermediate_size=320),
}


def rows(tokens, slots, positions, ends, of, temperatures):
    ints = (np.array(array, dtype=np.int32) for array in (tokens, slots, positions, ends, of))
    return Pass(*ints, np.array(temperatures, dtype=np.float32), np.linspace(0, 0.99, len(of)))


@pytest.mark.parametrize("spec", SHAPES.values(), ids=SHAPES)
def test_passes_agree_with_the_decoder_in_torch(spec):
    """Sequences prefilled whole and in parts, among decode steps; several completions that sample from one row."""
    tensors, context = weights(spec, 3), 96
    first, second, third = np.random.default_rng(1).integers(0, spec.vocab_size, (3, context)).astype(np.int32)
    passes = [
        rows([*first[:20], *second[:3]], [2] * 20 + [0] * 3, [*range(20), *range(3)], [19, 22], [0, 0, 1], [1, 0, 2]),
        rows([first[20], *second[3:40]], [2] + [0] * 37, [20, *range(3, 40)], [0], [0], [0.5]),
        rows([first[21], *third[:33], second[40]], [2, *[1] * 33, 0], [21, *range(33), 40], [0, 34], [1, 0], [1, 1]),
    ]
    sampled = []
    for decoder in (CpuDecoder(spec, tensors, context), TorchDecoder(spec, tensors, context, "cpu")):
        cache = decoder.cache(3, 64)
        sampled.append([decoder.run(cache, each) for each in passes])
    for (tokens, logprobs), (expected_tokens, expected) in zip(*sampled, strict=True):
        assert tokens.tolist() == expected_tokens.tolist()
        np.testing.assert_allclose(logprobs, expected, atol=5e-5)  # float32 on both sides, at a temperature of 0.5


def draw(logits, temperatures, uniforms):
    vocab = logits.shape[1]
    width = vectors.round_up(vocab, kernels.COLUMNS)
    padded = np.full((len(logits), width), 99, dtype=np.float32)  # what must not be looked at
    padded[:, :vocab] = logits
    count = len(uniforms)
    tokens, logprobs = np.empty(count, dtype=np.int32), np.empty(count, dtype=np.float32)
    assert kernels.draw(
        padded.reshape(-1), vocab, width, np.arange(count, dtype=np.int32), count,
        np.array(temperatures, dtype=np.float32), np.array(uniforms), tokens, logprobs,
    )  # fmt: skip
    return tokens, logprobs


@pytest.mark.parametrize("vocab", [2, 16, 23, 1000])
@pytest.mark.parametrize("temperature", [0.05, 1.0, 7.0])
def test_a_draw_inverts_the_distribution(vocab, temperature):
    random = np.random.default_rng(vocab)
    logits = random.normal(scale=3, size=(500, vocab)).astype(np.float32)
    uniforms = random.uniform(size=500)
    tokens, logprobs = draw(logits, [temperature] * 500, uniforms)
    exact = torch.from_numpy(logits.astype(np.float64) / temperature).log_softmax(-1).numpy()
    cumulative = np.exp(exact).cumsum(-1)
    chosen = np.arange(500), tokens
    assert (uniforms < cumulative[chosen] + 1e-6).all()
    assert (uniforms > cumulative[chosen] - np.exp(exact[chosen]) - 1e-6).all()
    rounding = float(np.finfo(np.float32).eps)  # of a logit, a few times
    np.testing.assert_allclose(logprobs, exact[chosen], atol=4 * rounding * np.abs(logits).max() / temperature)


def test_a_draw_takes_the_first_and_the_last_token_that_can_be_sampled():
    logits = np.array([[-1e9, 0, 0, -1e9]] * 2, dtype=np.float32)
    tokens, logprobs = draw(logits, [1, 1], [0.0, 1 - 2.0**-52])
    assert tokens.tolist() == [1, 2]
    np.testing.assert_allclose(logprobs, np.log(0.5))


def test_unused_slots_take_no_memory():
    """24 layers and 128 slots of 2048 tokens are reserved; short sequences touch few of them."""

    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096  # bytes

    spec = dataclasses.replace(LLAMA_GQA, layers=24, head_dim=64, context=2048)
    decoder = CpuDecoder(spec, weights(spec, 1), 2048)
    before = resident()
    cache = decoder.cache(128, 2048)
    assert cache.flat.nbytes == 24 * 128 * 2 * 2048 * 2 * 64 * 4  # 3.2 GB
    decoder.run(cache, rows([2] * 40, range(40), [0] * 40, range(40), range(40), [1] * 40))
    assert resident() - before < 100 * 2**20


def test_a_stream_is_the_splitmix64_generator_of_its_seed():
    # First outputs of SplitMix64 for seed 1234567 (the reference implementation's own test vector), cut to 52 bits.
    outputs = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    drawn = uniforms(np.full(4, 1234567, np.uint64), np.arange(4))
    assert drawn.tolist() == [(output >> 12) / 2**52 for output in outputs]
