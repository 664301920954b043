"""One loss, one gradient and the same weights, whichever engine trains, however ranks partition the model and however a
batch is cut. An adapter gives the same log-probabilities in every engine and in transformers with peft."""

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from areal_core.config.schema import AlgorithmConfig
from areal_core.models.folders import write_model
from areal_core.models.spec import ModelSpec
from areal_core.storage.weights import publish
from areal_core.training.distributed.ranks import RankGroup
from areal_core.training.engines.engine import EngineState
from areal_core.training.engines.policy_engine import PolicyEngine
from areal_core.types import Float32Array, PolicyVersion
from tests.support import engines, forked
from tests.support.engines import CASES, run, trained
from tests.support.lora import LORA, adapter, by_peft, form
from tests.support.training import QWEN3, SPEC, batch, numbers, weights

PATIENCE_S = 240.0


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The outcomes of two ranks, on a machine without a compiler."""
    folder = tmp_path_factory.mktemp("engines")
    environment = {"PATH": "", "HOME": str(folder / "home"), "TORCH_EXTENSIONS_DIR": str(folder / "home")}
    started = [forked.start(run, rank, 2, folder, output=folder / "log", environment=environment) for rank in range(2)]
    for process in started:
        process.join(PATIENCE_S)
        process.kill()
    assert [process.exitcode for process in started] == [0, 0], (folder / "log").read_text()
    assert not (folder / "home").exists(), "something was compiled or cached"
    return [pickle.loads((folder / f"rank-{rank}").read_bytes()) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_engine_takes_the_same_steps(ranks: list[Any], case: str) -> None:
    """As one rank of the torch engine does, with all sequences of a minibatch at once."""
    shared = ("spec", "lora", "minibatches", "temperature", "several")
    settings = {name: CASES[case][name] for name in shared if name in CASES[case]}
    expected, exact = trained(RankGroup(), **settings)
    stats, weights = ranks[0][0][case]
    assert ranks[1][0][case][0] == stats
    half = "bfloat16" in case
    assert expected[0].grad_norm > 0.1
    assert stats[0].grad_norm == pytest.approx(expected[0].grad_norm, rel=2**-6 if half else 1e-5)
    for number, (one, other) in enumerate(zip(stats, expected, strict=True)):
        if not half:
            assert numbers(one) == pytest.approx(numbers(other), rel=1e-3 if number else 1e-4, abs=1e-5)
    assert weights.keys() == exact.keys()
    for name, values in exact.items():
        tolerance = 0.05 if half else 1e-3 if "adapter" in case else 1e-4
        assert np.linalg.norm(weights[name] - values) <= tolerance * np.linalg.norm(values), name
        assert (weights[name].view(np.uint32) & 0xFFFF).any(), name  # in float32, so that small updates are kept


@pytest.mark.slow
def test_divergence_raises_on_every_rank_and_changes_nothing(ranks: list[Any]) -> None:
    for _, errors in ranks:
        for error, changed in errors.values():
            assert error.startswith("step 9, update 0: loss")
            assert not changed


TOLERANCE = 1e-4  # nats


@pytest.fixture(params=[SPEC, QWEN3], ids=["tied", "qwen3"])
def spec(request: pytest.FixtureRequest) -> ModelSpec:
    return request.param


@pytest.fixture
def base_model(spec: ModelSpec, tmp_path: Path) -> Path:
    write_model(tmp_path / "base_model", spec, weights(spec), None)
    return tmp_path / "base_model"


@pytest.fixture
def adapter_version(spec: ModelSpec, tmp_path: Path) -> PolicyVersion:
    return publish(tmp_path / "weights", 7, adapter(spec), lora=form())


def adapted(kind: str, spec: ModelSpec, **fields: Any) -> PolicyEngine:
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
def by_transformers_with_peft(base_model: Path, folder: Path, tokens: np.ndarray, prompt: int) -> np.ndarray:
    logits = by_peft(base_model, folder)(torch.from_numpy(tokens)[None].long()).logits[0, prompt - 1 : -1].double()
    return logits.log_softmax(-1)[np.arange(len(logits)), tokens[prompt:]].numpy()


@pytest.mark.parametrize("kind", ["torch", "torch by transformers", pytest.param("zero 3", marks=pytest.mark.slow)])
def test_trainers_and_peft_give_the_same_log_probabilities(
    kind: str, spec: ModelSpec, base_model: Path, adapter_version: PolicyVersion
) -> None:
    engine = adapted(kind, spec)
    share = batch(minibatches=1)
    before = engine.logprobs(share)
    put(engine, adapter(spec))
    found = engine.logprobs(share)
    assert np.abs(found - before).max() > 0.5  # so that an adapter left out would show
    starts = np.cumsum(share.lengths) - share.lengths
    for start, length, prompt in zip(starts, share.lengths, share.prompt_lengths, strict=True):
        if not found[start : start + length].any():
            continue  # it has no gradient, and is in no pass
        wanted = by_transformers_with_peft(
            base_model, Path(adapter_version.path), share.tokens[start : start + length], int(prompt)
        )
        np.testing.assert_allclose(found[start + prompt : start + length], wanted, rtol=0, atol=TOLERANCE)
    engine.ranks.close()


@pytest.mark.parametrize("kind", ["torch by transformers", "zero 3"])
def test_the_reference_is_the_base_model_also_after_a_resume(kind: str) -> None:
    engine = adapted(kind, SPEC, algorithm=AlgorithmConfig(kl_coef=0.1))
    share = batch()
    base_model = engine.logprobs(share)
    put(engine, adapter(SPEC))
    np.testing.assert_allclose(engine.reference_logprobs(share), base_model, rtol=0, atol=1e-6)
    assert np.abs(engine.logprobs(share) - base_model).max() > 0.5
    assert engine.train_step(share, engine.proximal_logprobs(share)).metrics["loss/reference_kl"] > 0.01
    engine.ranks.close()


@pytest.mark.parametrize("kind", ["torch", "zero 2"])
def test_a_version_that_is_compared_with_its_server_is_its_adapter_on_the_base_model(kind: str) -> None:
    """Whatever the engine has trained meanwhile."""
    engine = adapted(kind, SPEC)
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
