"""Models that transformers' modules run: as transformers says of one sequence at a time, and written as they came."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from areal_core.errors import ModelError
from areal_core.models.folders import read_weights, write_model
from areal_core.models.spec import read_spec
from areal_core.training.batching.packing import pack
from areal_core.training.model.transformers_policy import TransformersPolicy
from tests.support.training import SPEC
from tests.support.transformers_models import (
    KINDS,
    TOKENIZER,
    run_by_transformers,
    scores_of_targets,
    write_transformers_model,
)

# Lengths far apart: a micro-batch of several batches.
LENGTHS, PROMPTS = np.array([4, 7, 40, 4, 21]), np.array([1, 3, 5, 2, 20])
TOKENS = np.random.default_rng(0).integers(0, TOKENIZER.vocab_size, LENGTHS.sum()).astype(np.int32)
TEMPERATURE = 0.7


@pytest.fixture(params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_transformers_model(tmp_path / "model", request.param)


def one_at_a_time(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Log-probability and entropy of every token, by transformers; nan for the first ones."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rows = []
    for tokens in np.split(TOKENS, np.cumsum(LENGTHS)[:-1]):
        of_targets = torch.stack(scores_of_targets(model, tokens, TEMPERATURE)).detach().numpy()
        rows.append(np.pad(of_targets, ((0, 0), (1, 0)), constant_values=np.nan))
    logprobs, entropies = np.concatenate(rows, axis=1)
    return logprobs, entropies


@pytest.mark.parametrize("whole", [False, True])
def test_a_micro_batch_is_what_transformers_says_of_each_sequence(folder: Path, whole: bool) -> None:
    spec = read_spec(folder)
    policy = TransformersPolicy(spec, temperature=TEMPERATURE, whole=whole)
    policy.install(read_weights(folder, spec))
    packed = pack(TOKENS, LENGTHS, PROMPTS, range(len(LENGTHS)))
    with torch.no_grad():
        found = policy(packed)
    for values, expected in zip(found, one_at_a_time(folder), strict=True):
        np.testing.assert_allclose(values.numpy(), expected[packed.source], atol=1e-4)


def test_computing_activations_again_draws_no_dropout(tmp_path: Path) -> None:
    """GPT-2 has dropout where it is trained, as it is to be for that."""
    folder = write_transformers_model(tmp_path / "model", "gpt2")
    spec = read_spec(folder)
    packed = pack(TOKENS, LENGTHS, PROMPTS, range(len(LENGTHS)))
    found: list[torch.Tensor] = []
    for again in (False, True, True):
        policy = TransformersPolicy(spec, checkpoint_activations=again)
        weights = {name: tensor.requires_grad_() for name, tensor in read_weights(folder, spec).items()}
        policy.install(weights)
        policy(packed)[0].sum().backward()
        found.append(torch.cat([tensor.grad.flatten() for tensor in weights.values() if tensor.grad is not None]))
    for gradient in found[1:]:
        torch.testing.assert_close(gradient, found[0], rtol=1e-4, atol=1e-4)


def test_the_final_model_is_what_transformers_would_have_saved(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    spec = read_spec(folder)
    weights = {name: tensor + 0.01 for name, tensor in read_weights(folder, spec).items()}
    write_model(tmp_path / "final", spec, weights, folder / "tokenizer.json")
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "final", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in weights.items())
    assert replace(read_spec(tmp_path / "final"), transformers=None) == replace(spec, transformers=None)
    before, after = (json.loads((each / "config.json").read_text()) for each in (folder, tmp_path / "final"))
    assert after == before | {"dtype": "float32"}


def test_rotary_angles_keep_their_precision() -> None:
    policy = TransformersPolicy(run_by_transformers(SPEC))
    kept = {name: buffer.clone() for name, buffer in policy.named_buffers()}
    policy.to(torch.bfloat16)
    assert {parameter.dtype for parameter in policy.parameters()} == {torch.bfloat16}
    assert kept
    assert all(torch.equal(buffer, kept[name]) for name, buffer in policy.named_buffers())


@pytest.mark.parametrize(("architecture", "kind"), [("OursForCausalLM", "ours"), ("T5Model", "t5")])
def test_architectures_that_transformers_lacks_are_refused(architecture: str, kind: str) -> None:
    spec = run_by_transformers(SPEC)
    assert spec.transformers is not None
    config = json.dumps(json.loads(spec.transformers.config) | {"model_type": kind})
    spec = replace(spec, architecture=architecture, transformers=replace(spec.transformers, config=config))
    with pytest.raises(
        ModelError, match=rf"^architectures: {architecture} \(model_type '{kind}'\) is not a causal .*$"
    ):
        TransformersPolicy(spec)


def test_tensors_that_transformers_lays_out_in_another_way_are_refused_by_name() -> None:
    """As those of a mixture of experts, which it fuses."""
    spec = run_by_transformers(SPEC)
    assert spec.transformers is not None
    tensors = dict(spec.transformers.tensors)
    expert = "model.layers.0.mlp.experts.0.up_proj.weight"
    tensors[expert] = tensors.pop("model.layers.0.mlp.up_proj.weight")
    with pytest.raises(ModelError) as refused:
        TransformersPolicy(replace(spec, transformers=replace(spec.transformers, tensors=tuple(tensors.items()))))
    assert str(refused.value) == (
        f"{expert}: must have equal shapes in the model's files and in transformers' Qwen2ForCausalLM, "
        "got [24, 16] and no such tensor; this model can't be trained"
    )
