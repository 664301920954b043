"""The emulated trainer takes the accelerators' time and leaves the weights alone."""

import dataclasses

import numpy as np
import pytest

from areal_core.config.groups import EmulationConfig, GenerationConfig, LaunchConfig, TrainingConfig
from areal_core.config.schema import RunConfig
from areal_core.training.engines.emulated import EmulatedTrainingEngine
from tests.support.emulation import CONFIG, MODEL, SCALE, Clock, pace
from tests.support.training import batch

WEIGHTS = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(2, np.float32)}


def engine(
    clock: Clock, emulation: EmulationConfig = CONFIG, *, mode: str = "async", devices: int = 4
) -> EmulatedTrainingEngine:
    """Of two ranks, beside two generation servers, or in turn with them on two devices."""
    config = RunConfig(
        mode=mode,
        emulation=emulation,
        generation=GenerationConfig(servers=2),
        training=TrainingConfig(ranks=2, learning_rate=1e-4),
        launch=LaunchConfig(devices=devices),
    )
    return EmulatedTrainingEngine(config, WEIGHTS, pace(clock))


@pytest.mark.parametrize(
    ("mode", "devices", "idle_s", "replicas"),
    [("async", 4, 0.0, 1), ("async", 4, 0.0, 3), ("sync", 4, 3.0, 1), ("sync", 2, 13.0, 1)],
)
def test_a_step_takes_the_time_of_its_passes(mode: str, devices: int, idle_s: float, replicas: int) -> None:
    """On the accelerators of all replicas, which each rank stands for."""
    clock, share = Clock(), batch(3)
    config = dataclasses.replace(CONFIG, switch_s=5.0, rewards_s=3.0, tensor_parallel=2, replicas=replicas)
    trainer = engine(clock, config, mode=mode, devices=devices)
    lengths = [SCALE * length for length in share.lengths.tolist()]
    proximal = trainer.proximal_logprobs(share)
    later = [lengths[index] for index in share.minibatches[1]]
    assert clock.now_s * CONFIG.speed == pytest.approx(MODEL.forward_s(later, 4 * replicas))
    assert (proximal[share.versions >= 0] < 0).all()
    assert not proximal[share.versions < 0].any()
    clock.now_s = 100.0  # what lies between is the trainer's own time
    stats = trainer.train_step(share, proximal)
    assert (clock.now_s - 100.0) * CONFIG.speed == pytest.approx(MODEL.train_s(lengths, 4 * replicas) + idle_s)
    assert stats.updates == 2
    assert stats.loss_tokens == sum(share.loss_tokens)
    assert stats.train_inference_kl is None


def test_weights_stay_and_the_state_goes_on() -> None:
    first, second = engine(Clock()), engine(Clock())
    first.train_step(batch(1), None)
    for name, array in first.weights().items():
        assert np.array_equal(array, WEIGHTS[name])
    state = first.state()
    assert set(state.arrays) == {"weight/a", "weight/b"}  # as the controller restores a version from them
    second.load_state(state)
    assert second.state().scalars == {"updates": 2}
