"""Coefficients that a control has changed survive the trainer: they are part of its checkpoints."""

from __future__ import annotations

from areal_core.config.schema import AlgorithmConfig
from tests.support.engines import made
from tests.support.training import batch

ADAPTIVE = AlgorithmConfig(control="adaptive_kl", kl_coef=0.1, kl_target=1e-4, entropy_coef=0.01)


def coefficients(resumed_at: int) -> list[float]:
    """Of eight steps; before one of them a new engine takes the state."""
    engine = made(algorithm=ADAPTIVE)
    found: list[float] = []
    for step in range(1, 9):
        if step == resumed_at:
            state, engine = engine.state(), made(algorithm=ADAPTIVE)
            engine.load_state(state)
        share = batch(step)
        found.append(engine.train_step(share, engine.proximal_logprobs(share)).metrics["control/kl_coef"])
    return found


def test_adaptive_coefficient_is_the_same_after_a_resume() -> None:
    whole = coefficients(resumed_at=0)
    assert coefficients(resumed_at=4) == whole
    assert whole[0] == 0.1
    assert len(set(whole)) == 8
