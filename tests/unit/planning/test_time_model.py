"""The time model against arithmetic by hand, and model shapes against the parameters that the real models have."""

import dataclasses

import pytest

from areal_core.config.groups import EmulationConfig
from areal_core.errors import ConfigError
from areal_core.planning.time_model import ACCELERATORS, MODELS, Pace, TimeModel, completion_length
from tests.support.emulation import Clock

# Round numbers: 3.35e12 * 0.8 = 2.68e12 bytes/s, 989e12 operations/s.
PLAIN = EmulationConfig(
    decode_overhead_s=0.01, bandwidth_share=0.8, prefill_share=0.5, training_share=0.4, memory_share=0.9
)
WEIGHTS = 2 * 1_777_088_000  # bytes
KV = 2 * 28 * 2 * 128 * 2  # bytes a token: keys and values, layers, heads, numbers of a head, bytes of a number
MATRICES = 1_777_088_000 - 151_936 * 1536 - 28 * (2 * 1536 + 2048) - 1536  # without embeddings, norms and biases


def test_choices_of_the_configuration_are_the_data_sheets() -> None:
    choices = {field.name: field.metadata.get("choices", ()) for field in dataclasses.fields(EmulationConfig)}
    assert set(choices["accelerator"]) == set(ACCELERATORS)
    assert set(choices["model"]) == set(MODELS)


def test_published_sizes() -> None:
    sizes = {name: round(model.spec.parameters / 1e9, 2) for name, model in MODELS.items()}
    assert sizes == {"qwen-1.5b": 1.78, "qwen-7b": 7.62, "qwen-14b": 14.77, "qwen-32b": 32.76}
    assert MODELS["qwen-1.5b"].kv_bytes == KV
    assert MODELS["qwen-1.5b"].flops_per_token == 2 * MATRICES
    assert MODELS["qwen-1.5b"].weight_bytes == WEIGHTS


def test_a_decode_step_reads_matrices_and_cache_and_looks_embeddings_up() -> None:
    model = TimeModel(PLAIN)
    assert model.decode_s(64, 300_000) == pytest.approx(0.01 + (2 * MATRICES + 300_000 * KV) / 2.68e12)
    # Every step adds a token to each of two completions: 1000, 1002, 1004.
    assert model.decode_s(2, 1000, steps=3) == pytest.approx(3 * 0.01 + (6 * MATRICES + 3006 * KV) / 2.68e12)
    assert model.decode_s(2, 1000, steps=3) == pytest.approx(sum(model.decode_s(2, 1000 + 2 * i) for i in range(3)))


def test_a_second_accelerator_halves_what_is_not_overhead_and_has_to_be_added_up_with() -> None:
    two = TimeModel(dataclasses.replace(PLAIN, tensor_parallel=2, all_reduce_s=2e-5))
    one = TimeModel(PLAIN)
    # Twice in each of 28 layers; a ring of two sends half of 8 x 1536 numbers and then the other half.
    added = 2 * 28 * (2e-5 + 8 * 1536 * 2 / 200e9)
    assert two.decode_s(8, 9000) - 0.01 == pytest.approx((one.decode_s(8, 9000) - 0.01) / 2 + added)
    assert two.prefill_s([500]) == pytest.approx(one.prefill_s([500]) / 2)
    assert two.transfer_s() == pytest.approx(one.transfer_s() / 2)


def test_prefill_training_and_transfer() -> None:
    model = TimeModel(PLAIN)
    flops = 3000 * 2 * MATRICES + (1000**2 + 2000**2) / 2 * 4 * 28 * 12 * 128
    assert model.prefill_s([1000, 2000]) == pytest.approx(flops / (0.5 * 989e12))
    assert model.transfer_s() == pytest.approx(WEIGHTS / 50e9)
    # As AReaL counts: 4 square matrices and 3 of the MLP a layer, attention both ways, both embeddings.
    counted = 3000 * 2 * (28 * (4 * 1536**2 + 3 * 1536 * 8960) + 2 * 151_936 * 1536)
    counted += 28 * 4 * (1000**2 + 2000**2) * 1536
    assert model.forward_s([1000, 2000], accelerators=4) == pytest.approx(counted / (0.4 * 989e12 * 4))
    assert model.train_s([1000, 2000], accelerators=4) == pytest.approx(4 * counted / (0.4 * 989e12 * 4))


def test_what_the_weights_leave_is_for_the_cache() -> None:
    assert TimeModel(PLAIN).kv_tokens == int((0.9 * 80e9 - WEIGHTS) // KV)
    with pytest.raises(
        ConfigError, match=r"^emulation\.tensor_parallel: must be larger, .*qwen-32b .* 1 x h800 .*, got 1$"
    ):
        TimeModel(dataclasses.replace(PLAIN, model="qwen-32b", memory_share=0.7))


def test_lengths_have_the_median_and_the_spread_that_were_asked_for() -> None:
    config = dataclasses.replace(PLAIN, length_median=1000.0, length_sigma=0.5)
    assert completion_length(config, 0.5) == 1000
    assert completion_length(config, 0.8413447) == pytest.approx(1000 * 2.718281828**0.5, rel=1e-3)  # one sigma up
    assert completion_length(config, 0.0) == 1


def test_lateness_is_made_up_for_within_bounds() -> None:
    clock = Clock()
    pace = Pace(10.0, clock=clock.now, sleep=clock.sleep)
    pace.spend(1.0)
    assert clock.now_s == pytest.approx(0.1)
    clock.now_s += 0.03  # the machine was busy
    pace.spend(1.0)
    assert clock.now_s == pytest.approx(0.2)
    clock.now_s += 5.0  # nobody asked for anything
    pace.spend(1.0)
    assert clock.now_s == pytest.approx(5.25)
    clock.now_s = 6.0
    pace.restart()
    pace.spend(1.0)
    assert clock.now_s == pytest.approx(6.1)
