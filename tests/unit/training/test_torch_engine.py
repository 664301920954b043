import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from areal_core.config.groups import TrainingConfig
from areal_core.config.schema import AlgorithmConfig
from areal_core.errors import DivergenceError, ModelError
from areal_core.models.adapters import adapter_shapes
from areal_core.models.tensorfile import to_bfloat16
from areal_core.training.engines.torch_engine import TorchEngine
from tests.support.lora import LORA, form
from tests.support.training import SPEC, TRAINING, batch, engine, numbers, train, weights

HALF = replace(TRAINING, dtype="bfloat16")
ADAPTED = replace(TRAINING, lora=LORA)
CASES = {"float32": TRAINING, "bfloat16": HALF, "lora": ADAPTED, "lora-bfloat16": replace(HALF, lora=LORA)}


def assert_close(one: dict[str, np.ndarray], other: dict[str, np.ndarray], tolerance: float = 1e-5) -> None:
    """Relative to the largest entry of each tensor."""
    assert one.keys() == other.keys()
    for name, values in one.items():
        np.testing.assert_allclose(other[name], values, rtol=0, atol=tolerance * np.abs(values).max(), err_msg=name)


@pytest.mark.parametrize("share_prompts", [False, True])
def test_the_first_minibatch_is_its_own_proximal_policy(share_prompts: bool):
    """As if it were not the first: after an empty one, all of pi_prox is recomputed."""
    share = batch(capacity=40, share_prompts=share_prompts)
    behind = replace(share, minibatches=((), *share.minibatches))
    one, other = engine(), engine()
    recomputed, later = other.proximal_logprobs(behind), one.proximal_logprobs(share)
    first = np.isin(np.repeat(np.arange(len(share.lengths)), share.lengths), share.minibatches[0])
    assert (recomputed[share.loss_mask & share.advantages.astype(bool)] < 0).all()
    np.testing.assert_allclose(later, np.where(first, 0, recomputed), atol=1e-5)
    stats, expected = one.train_step(share, later), other.train_step(behind, recomputed)
    assert numbers(stats) == pytest.approx(numbers(expected), rel=1e-5, abs=1e-7)
    assert_close(other.weights(), one.weights(), 1e-5)
    unlike = engine()
    unlike.train_step(share, np.where(first, np.float32(np.nan), later))  # whatever is given for it
    assert_close(one.weights(), unlike.weights(), 0)


def test_first_update_by_hand():
    """The gradient is clipped to its norm, then AdamW: w (1 - lr decay) - lr g / (|g| + eps), moments corrected."""
    one, share = engine(replace(TRAINING, grad_clip=1e-3)), batch(minibatches=1)
    stats = one.train_step(share, one.logprobs(share))
    assert stats.grad_norm > 0.1
    arrays = one.state().arrays
    clipped = {name: arrays[f"exp_avg/{name}"] / (1 - TRAINING.beta1) for name in weights()}
    assert sum((values**2).sum() for values in clipped.values()) ** 0.5 == pytest.approx(1e-3, rel=1e-3)
    rate = 1e-2 / 4  # the first of four warm-up updates
    for name, before in weights().items():
        gradient = clipped[name]
        step = rate * gradient / (np.abs(gradient) + TRAINING.adam_eps)
        expected = before.numpy() * (1 - rate * TRAINING.weight_decay) - step
        np.testing.assert_allclose(arrays[f"weight/{name}"], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("training", CASES.values(), ids=CASES)
def test_a_loaded_state_goes_on_bitwise(training: TrainingConfig):
    straight, first, resumed = engine(training), engine(training), engine(training)
    expected = train(straight, range(1, 5))[2:]
    train(first, range(1, 3))
    state = first.state()
    assert state.scalars == {"updates": 4, "control": {}}
    resumed.load_state(state)
    assert train(resumed, range(3, 5)) == expected
    for name, values in straight.state().arrays.items():
        assert values.tobytes() == resumed.state().arrays[name].tobytes(), name


def test_an_adapter_is_all_that_is_trained_and_saved():
    one = engine(ADAPTED)
    base = {name: tensor.clone() for name, tensor in one._frozen.items()}
    before = one.weights()
    assert before.keys() == adapter_shapes(SPEC, form()).keys()
    train(one, range(1, 3))
    assert all((tensor == base[name]).all() for name, tensor in one._frozen.items())
    assert not any(tensor.requires_grad for tensor in one._frozen.values())
    assert all((array != before[name]).any() for name, array in one.weights().items())
    kinds = {name.partition("/")[0]: name for name in one.state().arrays}
    assert kinds.keys() == {"rng", "weight", "exp_avg", "exp_avg_sq"}
    assert all(name == "rng" or ".lora_" in name for name in one.state().arrays)


def test_an_adapter_of_another_rank_is_refused():
    state = engine(replace(TRAINING, lora=replace(LORA, rank=2))).state()
    with pytest.raises(ModelError, match=r"q_proj.lora_A.weight: expected shape \[3, 16\].*got shape \[2, 16\]"):
        engine(ADAPTED).load_state(state)
    with pytest.raises(ModelError, match=r"lora_A.weight: expected shape \[3, 16\] in the saved state, got nothing"):
        engine(ADAPTED).load_state(engine().state())


def test_norms_of_millions_of_elements_are_right():
    spec = replace(SPEC, vocab_size=2**18)
    one = TorchEngine(spec, weights(spec), TRAINING, AlgorithmConfig())
    before = one.flat.clone()
    expected = float(one.gradient.normal_(generator=torch.Generator().manual_seed(0)).double().norm())
    assert one.reduce_gradient() == pytest.approx(expected, rel=1e-6)
    change = one.apply_gradient(1e-2, expected)
    assert float(one.gradient.double().norm()) == pytest.approx(TRAINING.grad_clip, rel=1e-6)
    assert change == pytest.approx(float((one.flat - before).double().norm()), rel=1e-7)


def test_log_probabilities_that_are_not_finite_raise():
    one = engine()
    state = one.state()
    state.arrays["weight/model.norm.weight"][:] = np.nan
    one.load_state(state)
    with pytest.raises(DivergenceError, match="proximal log-probabilities of step 1 are not finite"):
        one.logprobs(batch())


@pytest.mark.parametrize("training", [TRAINING, HALF], ids=lambda training: training.dtype)
def test_layers_computed_again_change_no_bit(training: TrainingConfig):
    one, other = engine(training), engine(replace(training, checkpoint_activations=True))
    assert train(one, range(1, 3)) == train(other, range(1, 3))
    for name, values in one.weights().items():
        assert values.tobytes() == other.weights()[name].tobytes()


def test_bfloat16_weights_take_updates_that_bfloat16_can_not_hold():
    """Weights, moments and what is published are float32: steps of 1e-6 add up."""
    one = engine(replace(HALF, learning_rate=1e-6, warmup_steps=0, weight_decay=0.0))
    before = one.weights()
    train(one, range(1, 6))  # ten updates
    for name, values in one.weights().items():
        assert values.dtype == np.float32
        if name.endswith("norm.weight"):  # near 1, where bfloat16 has steps of 1/128
            assert 0 < np.abs(values - before[name]).max() < 2e-5
    assert all(array.dtype == np.float32 for name, array in one.state().arrays.items() if name != "rng")


def test_bfloat16_gradients_add_up_in_float32():
    """256 micro-batches of 1/256 each: in bfloat16, 1 + 1/256 is 1."""
    one = engine(HALF)
    [[packed, *_], *_] = batch().microbatches

    def add(share: float) -> None:
        one.backward(one.forward(packed)[0].sum() * share, last=False)

    one.start_gradient()
    add(1.0)
    whole = one.reduce_gradient()
    for _ in range(256):
        add(1 / 256)
    assert one.reduce_gradient() == pytest.approx(2 * whole, rel=1e-4)
    one.start_gradient()
    add(1.0)
    assert one.reduce_gradient() == whole


def test_train_inference_kl_is_measured_in_the_precision_of_training():
    share = batch()
    one, half = engine(), engine(HALF)
    logprobs = half.logprobs(share)
    share = replace(share, behaviour_logprobs=logprobs)
    total, tokens = half.train_inference_kl(share, half.weights(), 0)
    sampled = int(share.lengths[:16].sum())
    assert (total, tokens) == (pytest.approx(0, abs=1e-12), int(share.loss_mask[:sampled].sum()))
    assert one.train_inference_kl(share, one.weights(), 0)[0] > 1e-6


def test_train_inference_kl_is_measured_where_the_version_has_sampled():
    share, one = batch(), engine()
    share = replace(share, behaviour_logprobs=one.logprobs(share), versions=np.where(share.loss_mask, 3, -1))
    start = int(share.lengths[:-1].sum())
    share.versions[start:][share.loss_mask[start:]] = 5  # the last sequence alone
    assert one.train_inference_kl(share, one.weights(), 5) == (
        pytest.approx(0, abs=1e-9),
        int(share.loss_mask[start:].sum()),
    )
    assert one.train_inference_kl(share, one.weights(), 4) == (0.0, 0)


def test_a_rank_starts_without_torchs_compiler():
    """Whose import takes seconds."""
    code = (
        "import sys; from tests.support.training import engine, train; train(engine(), range(1, 2)); "
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


@pytest.mark.parametrize("training", [TRAINING, HALF], ids=["float32", "bfloat16"])
def test_served_weights_are_those_of_passes_and_stay_until_the_call_after_the_next(training: TrainingConfig) -> None:
    one = engine(training)
    first, expected = one.served(), one.weights()
    kept = {name: array.copy() for name, array in first.items()}
    one.train_step(batch(), None)
    second = one.served()
    for name, array in expected.items():
        np.testing.assert_array_equal(first[name], to_bfloat16(array) if training is HALF else array)
        np.testing.assert_array_equal(first[name], kept[name])
    assert any((first[name] != second[name]).any() for name in first)
    assert np.shares_memory(one.served()["model.norm.weight"], first["model.norm.weight"])
