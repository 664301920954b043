"""Model folders: what is written loads in transformers with the same logits, and what is broken is refused by name."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from areal_core.errors import ModelError
from areal_core.models import folders
from areal_core.models.spec import ModelSpec, check_weights, read_spec, stop_token_ids, weight_shapes
from tests.support.transformers_models import write_transformers_model

SPEC = ModelSpec(
    architecture="Qwen2ForCausalLM", vocab_size=23, hidden_size=32, layers=2, heads=4, kv_heads=2, head_dim=8,
    intermediate_size=48, rope_theta=10000.0, rms_eps=1e-6, qkv_bias=True, tie_embeddings=True, context=64,
    eos_token_ids=(1,),
)  # fmt: skip
LLAMA = dataclasses.replace(
    SPEC, architecture="LlamaForCausalLM", qkv_bias=False, tie_embeddings=False, rope_theta=5e5, eos_token_ids=(1, 4)
)
QWEN3 = dataclasses.replace(LLAMA, architecture="Qwen3ForCausalLM", qk_norm=True, head_dim=12)


@pytest.fixture
def folder(tmp_path):
    folders.write_model(tmp_path, SPEC, folders.init_weights(SPEC, seed=0), None)
    return tmp_path


def edit_config(folder, **changes):
    file = folder / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in config.items() if value != "remove"}))


@pytest.mark.parametrize("spec", [SPEC, LLAMA, QWEN3], ids=["qwen2-tied", "llama", "qwen3"])
def test_written_model_is_read_back_and_loads_in_transformers(tmp_path, spec):
    from transformers import AutoModelForCausalLM

    weights = folders.init_weights(spec, seed=3)
    drawn = ("bias", "q_norm.weight", "k_norm.weight")
    weights |= {name: torch.randn(tensor.shape) for name, tensor in weights.items() if name.endswith(drawn)}
    folders.write_model(tmp_path, spec, weights, None)

    assert read_spec(tmp_path) == spec
    read = folders.read_weights(tmp_path, spec)
    assert set(read) == set(weights)
    assert all(torch.equal(read[name], weights[name]) for name in weights)

    reference, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    state = reference.state_dict()
    assert all(torch.equal(state[name], weights[name]) for name in weights)
    assert reference.config.rope_parameters["rope_theta"] == spec.rope_theta
    assert sum(p.numel() for p in reference.parameters()) == spec.parameters


def test_a_width_of_heads_that_is_not_named_is_that_of_transformers(tmp_path):
    from transformers import AutoConfig

    folders.write_model(tmp_path, QWEN3, folders.init_weights(QWEN3, seed=0), None)
    edit_config(tmp_path, head_dim="remove")
    assert read_spec(tmp_path).head_dim == AutoConfig.from_pretrained(tmp_path).head_dim == 128


def test_sharded_weights_and_older_rope_field_are_read(folder):
    weights = folders.read_weights(folder, SPEC)
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in halves.items():
        save_file({name: weights[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in halves.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    edit_config(folder, rope_parameters="remove", rope_theta=123.0)
    assert read_spec(folder).rope_theta == 123.0
    again = folders.read_weights(folder, SPEC)
    assert all(torch.equal(again[name], weights[name]) for name in names)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"layer_types": "full_attention"}, "layer_types"),
        ({"architectures": ["Qwen3ForCausalLM"], "attention_bias": True}, "attention_bias"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "rope_type"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "rope_type"),
    ],
)
def test_other_architectures_are_left_to_transformers(folder, changes, named):
    edit_config(folder, **changes)
    spec = read_spec(folder)
    assert spec.transformers is not None
    assert named in spec.transformers.why
    assert weight_shapes(spec) == weight_shapes(SPEC)  # as the file has them
    assert (spec.parameters, spec.context, spec.layers) == (SPEC.parameters, SPEC.context, SPEC.layers)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": None}, "architectures"),
        ({"hidden_act": "gelu", "quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_act": "gelu", "hidden_size": 0}, "hidden_size"),
        ({"vocab_size": "remove"}, "vocab_size"),
        ({"num_hidden_layers": "3"}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 7}, "head_dim"),
    ],
)
def test_broken_config_is_refused_in_one_line(folder, changes, named):
    edit_config(folder, **changes)
    with pytest.raises(ModelError, match=named) as raised:
        read_spec(folder)
    assert str(folder) in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("ids", [23, -1, True, "<eos>", 1.0, [1, 151643]])
def test_end_tokens_that_the_model_lacks_are_refused(folder, file, ids):
    edit_config(folder, eos_token_id=ids)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids if file != "config.json" else None}))
    for read in (read_spec, stop_token_ids):
        with pytest.raises(ModelError, match=rf"{folder}: eos_token_id of {file} must be token ids from 0 to 22"):
            read(folder)


@pytest.mark.parametrize("kind", ["qwen2", "gemma2"])
@pytest.mark.parametrize("stored", ["same", "other"])
@pytest.mark.parametrize("said", [True, "remove"])
def test_a_head_is_the_embedding_where_transformers_ties_them(folder, kind, stored, said):
    from transformers import AutoModelForCausalLM

    if kind == "gemma2":
        write_transformers_model(folder, kind)
    tensors = load_file(folder / "model.safetensors")
    table = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = table.clone() if stored == "same" else table.flip(0)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    edit_config(folder, tie_word_embeddings=said)
    spec = read_spec(folder)
    folders.write_model(folder / "again", spec, folders.read_weights(folder, spec), None)
    ours, theirs = (AutoModelForCausalLM.from_pretrained(each) for each in (folder / "again", folder))
    tied = theirs.lm_head.weight is theirs.model.embed_tokens.weight
    assert (spec.tie_embeddings, ours.config.tie_word_embeddings) == (tied, tied)
    assert torch.equal(ours(torch.arange(10)[None]).logits, theirs(torch.arange(10)[None]).logits)


def test_missing_and_broken_files_are_refused(folder):
    weights, name = folders.init_weights(SPEC, seed=0), "model.layers.1.mlp.up_proj.weight"
    missing = {other: tensor for other, tensor in weights.items() if other != name}
    for found, said in (
        (weights | {name: torch.zeros(32, 48)}, rf"{name}.*\[48, 32\]"),
        (weights | {"extra": torch.zeros(1)}, "extra"),
        (missing, rf"{name}.*missing"),
    ):
        with pytest.raises(ModelError, match=said):
            check_weights(SPEC, found)
    with pytest.raises(ModelError, match=r"nowhere.*config\.json"):
        read_spec(folder / "nowhere")
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json"):
        read_spec(folder)
    (folder / "model.safetensors").write_bytes(b"\x08")
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        folders.read_weights(folder, SPEC)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="no such file"):
        folders.read_weights(folder, SPEC)
