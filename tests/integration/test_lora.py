"""One adapter, the same log-probabilities: of both training engines, whichever module runs the model, of the embedded
engine, and of transformers with peft, which loads what was published."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from areal_core.config.schema import AlgorithmConfig
from areal_core.generation.engines.engine import read_version
from areal_core.models.folders import write_model
from areal_core.models.spec import ModelSpec, read_arrays
from areal_core.storage.weights import publish
from areal_core.training.engines.engine import EngineState
from areal_core.training.engines.policy_engine import PolicyEngine
from areal_core.types import Float32Array, PolicyVersion
from tests.support import engines
from tests.support.generation import request
from tests.support.lora import LORA, adapter, by_peft, form
from tests.support.offline import OfflineEngine
from tests.support.training import QWEN3, SPEC, batch, weights

pytestmark = pytest.mark.slow
TOLERANCE = 1e-4  # nats


@pytest.fixture(params=[SPEC, QWEN3], ids=["tied", "qwen3"])
def spec(request: pytest.FixtureRequest) -> ModelSpec:
    return request.param


@pytest.fixture
def base(spec: ModelSpec, tmp_path: Path) -> Path:
    write_model(tmp_path / "base", spec, weights(spec), None)
    return tmp_path / "base"


@pytest.fixture
def version(spec: ModelSpec, tmp_path: Path) -> PolicyVersion:
    return publish(tmp_path / "weights", 7, adapter(spec), lora=form())


def made(kind: str, spec: ModelSpec, **fields: Any) -> PolicyEngine:
    """An adapted engine: its name and ZeRO stage, and `by transformers`."""
    engine, _, runs = kind.partition(" by ")
    stage = None if engine == "torch" else int(engine.removeprefix("zero "))
    return engines.made(spec, stage=stage, transformers=bool(runs), **{"lora": LORA, **fields})


def put(engine: PolicyEngine, tensors: dict[str, Float32Array]) -> None:
    state = engine.state()
    engine.load_state(
        EngineState(
            arrays=state.arrays | {f"weight/{name}": array for name, array in tensors.items()}, scalars=state.scalars
        )
    )


@torch.inference_mode()
def expected(base: Path, folder: Path, tokens: np.ndarray, prompt: int) -> np.ndarray:
    logits = by_peft(base, folder)(torch.from_numpy(tokens)[None].long()).logits[0, prompt - 1 : -1].double()
    return logits.log_softmax(-1)[np.arange(len(logits)), tokens[prompt:]].numpy()


@pytest.mark.parametrize(
    "kind",
    [
        "torch",
        "torch by transformers",
        "zero 3",
    ],
)
def test_trainers_and_peft_give_the_same_log_probabilities(
    kind: str, spec: ModelSpec, base: Path, version: PolicyVersion
) -> None:
    engine = made(kind, spec)
    share = batch(minibatches=1)
    before = engine.logprobs(share)
    put(engine, adapter(spec))
    found = engine.logprobs(share)
    assert np.abs(found - before).max() > 0.5  # so that an adapter left out would show
    starts = np.cumsum(share.lengths) - share.lengths
    for start, length, prompt in zip(starts, share.lengths, share.prompt_lengths, strict=True):
        if not found[start : start + length].any():
            continue  # it has no gradient, and is in no pass
        wanted = expected(base, Path(version.path), share.tokens[start : start + length], int(prompt))
        np.testing.assert_allclose(found[start + prompt : start + length], wanted, rtol=0, atol=TOLERANCE)
    engine.ranks.close()


def test_the_embedded_engine_and_peft_give_the_same_log_probabilities(
    spec: ModelSpec, base: Path, version: PolicyVersion
) -> None:
    engine = OfflineEngine(spec, read_arrays(base, spec), slots=4, base=base)
    engine.swap(read_version(engine, Path(version.path), version.digest), version.version)
    asked = request(n=2, max_tokens=12)
    [completions] = engine.generate([asked])
    for completion in completions:
        tokens = np.array([*asked.token_ids, *completion.token_ids])
        wanted = expected(base, Path(version.path), tokens, len(asked.token_ids))
        np.testing.assert_allclose(completion.logprobs, wanted, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("kind", ["torch by transformers", "zero 3"])
def test_the_reference_is_the_base_model_also_after_a_resume(kind: str) -> None:
    engine = made(kind, SPEC, algorithm=AlgorithmConfig(kl_coef=0.1))
    share = batch()
    base = engine.logprobs(share)
    put(engine, adapter(SPEC))
    np.testing.assert_allclose(engine.reference_logprobs(share), base, rtol=0, atol=1e-6)
    assert np.abs(engine.logprobs(share) - base).max() > 0.5
    assert engine.train_step(share, engine.proximal_logprobs(share)).metrics["loss/reference_kl"] > 0.01
    engine.ranks.close()


@pytest.mark.parametrize("kind", ["torch", "zero 2"])
def test_a_version_that_is_compared_with_its_server_is_its_adapter_on_the_base_model(kind: str) -> None:
    """Whatever the engine has trained meanwhile."""
    engine = made(kind, SPEC)
    share = batch(minibatches=1)
    put(engine, adapter(SPEC))
    of_version = replace(share, behaviour_logprobs=engine.logprobs(share))
    put(engine, adapter(SPEC, seed=1))
    total, tokens = engine.train_inference_kl(of_version, adapter(SPEC), 0)
    assert tokens > 0
    assert total / tokens < 1e-8
    other, _ = engine.train_inference_kl(of_version, adapter(SPEC, seed=1), 0)
    assert other / tokens > 1e-2
    engine.ranks.close()
