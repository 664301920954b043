"""Every term against numbers worked out by hand, and the training ones against the bytes of tensors in a real pass."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from areal_core.config.schema import RunConfig, load
from areal_core.models.folders import init_weights
from areal_core.models.spec import ModelSpec
from areal_core.planning.footprint import LOGITS_AT_ONCE, training_pass, training_state
from areal_core.planning.time_model import SPECS
from areal_core.training.batching.packing import Packed, pack
from areal_core.training.engines.torch_engine import TorchEngine
from areal_core.training.model import forward, operations
from tests.support.live_memory import LiveMemory

SMALL = {"vocab_size": 1000, "hidden_size": 64, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16}
SPEC = dataclasses.replace(SPECS["7b"], **SMALL, intermediate_size=100)
# q 64 x 64 + 64, k and v each 32 x 64 + 32, o 64 x 64, two norms of 64, three matrices of 100 x 64.
LAYER = 4160 + 2 * 2080 + 4096 + 128 + 19200  # 31,744
P = 2 * 1000 * 64 + 64 + 2 * LAYER  # 191,552


def config(*, generation: dict[str, Any] | None = None, **training: Any) -> RunConfig:
    """Of a task of rows with completions of 24 tokens for prompts of 8; four ranks, so that each has a quarter."""
    return load(
        {
            "model": {"path": "m", "context": 32},
            "task": {"max_prompt_tokens": 8, "max_new_tokens": 24},
            "training": {"ranks": 4, "microbatch_tokens": 1024} | training,
            "generation": generation or {},
        }
    )


A = 2 * 3 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 100))  # an adapter of rank 3: two layers of q, o; k, v; the MLP
HALF = {"dtype": "bfloat16"}
SHARDED = HALF | {"engine": "deepspeed"}
ADAPTER = {"lora": {"rank": 3}}


@pytest.mark.parametrize(
    ("training", "weights", "gradients", "optimiser", "reference"),
    [
        # The weights are the optimiser's own.
        ({}, 4 * P, 4 * P, 8 * P, 4 * P),
        # A copy of the weights for passes, and the gradient of a micro-batch beside the sum.
        (HALF, 2 * P, 6 * P, 12 * P, 2 * P),
        # The optimiser's own weights, and what layers round of them.
        (SHARDED | {"zero_stage": 0}, 6 * P, 4 * P, 8 * P, 2 * P),
        (SHARDED | {"zero_stage": 1}, 2 * P, 6 * P, 12 * P / 4, 2 * P),
        (SHARDED | {"zero_stage": 2}, 2 * P, 4 * P / 4, 12 * P / 4, 2 * P),
        (SHARDED | {"zero_stage": 3}, 2 * P / 4, 4 * P / 4, 12 * P / 4, 2 * P),
        ({"engine": "deepspeed", "zero_stage": 3}, 4 * P / 4, 4 * P / 4, 12 * P / 4, 4 * P),
        ({"engine": "deepspeed", "zero_stage": 0}, 4 * P, 4 * P, 8 * P, 4 * P),
        # With an adapter frozen weights are the reference model as well, unless each rank has a part of them.
        (ADAPTER, 4 * (P + A), 4 * A, 8 * A, 0),
        (ADAPTER | HALF, 2 * (P + A), 6 * A, 12 * A, 0),
        (ADAPTER | SHARDED | {"zero_stage": 0}, 2 * P + 6 * A, 4 * A, 8 * A, 0),
        (ADAPTER | SHARDED | {"zero_stage": 2}, 2 * (P + A), A, 3 * A, 0),
        (ADAPTER | SHARDED | {"zero_stage": 3}, (P + A) / 2, A, 3 * A, 2 * P),
    ],
)
def test_state_of_a_rank(
    training: dict[str, Any], weights: float, gradients: float, optimiser: float, reference: float
) -> None:
    chosen = config(**{"engine": "torch"} | training)
    state = {"weights": weights, "gradients": gradients, "optimiser": optimiser}
    assert training_state(chosen, SPEC) == state | {"reference": 0}
    assert training_state(chosen, SPEC, reference=True) == state | {"reference": reference}


# -- in fact -----------------------------------------------------------------------------------------------------------

REAL = dataclasses.replace(SPEC, layers=4, vocab_size=2000, intermediate_size=352)
TOKENS = 1024


def packed(spec: ModelSpec) -> Packed:
    """Four sequences, all but one token of each a completion's."""
    lengths, prompts = np.full(4, TOKENS // 4), np.full(4, 1)
    return pack(np.arange(TOKENS, dtype=np.int32) % spec.vocab_size, lengths, prompts, range(4))


def test_no_pass_makes_more_logits_at_once() -> None:
    assert max(forward._LOGITS_AT_ONCE, forward._LOGITS_AT_ONCE_GPU) == LOGITS_AT_ONCE


@pytest.mark.parametrize(("rank", "checkpointed"), [(None, False), (3, False), (3, True)])
def test_state_pass_and_update_of_the_torch_engine(
    rank: int | None, checkpointed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without compiled kernels passes keep what they keep on a GPU."""
    monkeypatch.setattr(operations, "compiled_for", lambda device, dtype: None)
    chosen = config(engine="torch", ranks=1, lora={"rank": rank}, checkpoint_activations=checkpointed)
    engine = TorchEngine(REAL, init_weights(REAL, 0), chosen.training, chosen.algorithm)
    known = (engine.flat, engine.gradient, *engine._frozen.values(), *engine._kept.values())
    assert sum(tensor.nbytes for tensor in dict.fromkeys(known)) == sum(training_state(chosen, REAL).values())
    with LiveMemory(*known) as a_pass:
        engine.start_gradient()
        logprobs, _ = engine.forward(packed(REAL))
        engine.backward(logprobs.sum(), last=True)
    assert a_pass.peak == pytest.approx(training_pass(chosen, REAL)["activations"], rel=0.08)
    with LiveMemory(*known) as update:
        engine.apply_gradient(1e-5, engine.reduce_gradient())
    assert rank or update.peak == pytest.approx(4 * REAL.parameters, rel=0.01)
