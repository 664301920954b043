import dataclasses
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from areal_core.errors import ModelError
from areal_core.models.folders import init_weights
from areal_core.models.gguf import convert
from areal_core.models.spec import ModelSpec, check_folder, read_arrays
from areal_core.models.tokenizer import Tokenizer
from tests.support.models import SPEC

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = [("a", "b"), ("ab", "c"), ("1", "2"), ("Ã", "©")]
TOKENS = [
    "<|end|>",
    *BYTES,
    *("".join(merge) for merge in MERGES),
    "xyz",
]  # no merges make the last one
LLAMA = dataclasses.replace(
    SPEC,
    architecture="LlamaForCausalLM",
    vocab_size=len(TOKENS),
    hidden_size=32,
    heads=4,
    kv_heads=2,
    head_dim=8,
    intermediate_size=64,
    layers=2,
    qkv_bias=False,
    eos_token_ids=(0,),
)
QWEN2 = dataclasses.replace(LLAMA, architecture="Qwen2ForCausalLM", qkv_bias=True, tie_embeddings=False)
QWEN3 = dataclasses.replace(LLAMA, architecture="Qwen3ForCausalLM", qk_norm=True, head_dim=12)


def weights_of(spec: ModelSpec) -> dict[str, np.ndarray]:
    """Also biases and norms differ from each other."""
    noise = torch.Generator().manual_seed(1)
    weights = init_weights(spec, seed=0)
    return {name: (value + 0.1 * torch.randn(value.shape, generator=noise)).numpy() for name, value in weights.items()}


def write(file: Path, spec: ModelSpec, kind: str, *, pre: str = "smollm", omit: str = "", **fields: object) -> Path:
    """As llama.cpp's converter does, from its documentation: a rotated pair of a Llama's head lies side by side."""
    writer = GGUFWriter(file, str(fields.pop("architecture", kind)))
    writer.add_context_length(spec.context)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_block_count(spec.layers)
    writer.add_feed_forward_length(spec.intermediate_size)
    writer.add_head_count(spec.heads)
    writer.add_head_count_kv(spec.kv_heads)
    if spec.head_dim != spec.hidden_size // spec.heads:
        writer.add_key_length(spec.head_dim)
    writer.add_rope_freq_base(spec.rope_theta)
    writer.add_layer_norm_rms_eps(spec.rms_eps)
    writer.add_tokenizer_model(str(fields.pop("tokenizer", "gpt2")))
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([gguf.TokenType.CONTROL] + [gguf.TokenType.NORMAL] * (len(TOKENS) - 1))
    writer.add_token_merges([" ".join(merge) for merge in MERGES])
    writer.add_eos_token_id(int(str(fields.pop("eos", 0))))
    if "bos" in fields:
        writer.add_bos_token_id(int(str(fields.pop("bos"))))
    if "add_bos" in fields:
        writer.add_add_bos_token(bool(fields.pop("add_bos")))
    writer.add_chat_template("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    for name, value in fields.items():
        writer.add_string(f"{kind}.{name.replace('__', '.')}", str(value))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[kind.upper()], spec.layers)
    for name, array in weights_of(spec).items():
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target is not None
        if kind == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = spec.heads if "q_proj" in name else spec.kv_heads
            array = array.reshape(heads, 2, spec.head_dim // 2, -1).swapaxes(1, 2).reshape(array.shape)
        if name == "model.layers.1.mlp.up_proj.weight":
            writer.add_tensor(
                target, gguf.quantize(array, GGMLQuantizationType.Q8_0), raw_dtype=GGMLQuantizationType.Q8_0
            )
        elif target != omit:
            writer.add_tensor(target, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.mark.parametrize(("kind", "spec"), [("llama", LLAMA), ("qwen2", QWEN2), ("qwen3", QWEN3)])
def test_a_file_becomes_the_folder_that_it_was_made_of(tmp_path, kind, spec):
    convert(write(tmp_path / "x.gguf", spec, kind), tmp_path / "x")
    assert check_folder(tmp_path / "x") == dataclasses.replace(spec, rms_eps=pytest.approx(spec.rms_eps))
    found = read_arrays(tmp_path / "x", spec)
    for name, expected in weights_of(spec).items():
        if name == "model.layers.1.mlp.up_proj.weight":
            step = np.abs(expected).max() / 127  # of 8 bits; the step itself has 11
            np.testing.assert_allclose(found[name], expected, atol=(0.5 + 128 * 2**-11) * step, rtol=0)
        else:
            np.testing.assert_array_equal(found[name], expected, name)
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(tmp_path / "x"),
        AutoTokenizer.from_pretrained(tmp_path / "x"),
    )
    text = tokenizer.apply_chat_template([{"content": "abc 12<|end|>"}], tokenize=False)
    ids = Tokenizer.from_folder(tmp_path / "x").encode(text)
    assert tokenizer(text)["input_ids"] == list(ids)
    assert model(torch.tensor([ids])).logits.shape == (1, len(ids), spec.vocab_size)


@pytest.mark.parametrize(
    ("pre", "pieces", "special"),
    [
        ("smollm", ["abc", "Ġ", "ab", "Ġ", "1", "2", "<|end|>"], ["x", "y", "z", "e", "Ì", "ģ"]),  # digits one by one
        ("gpt-2", ["abc", "Ġ", "ab", "Ġ", "12", "<|end|>"], ["x", "y", "z", "e", "Ì", "ģ"]),
        ("llama-bpe", ["abc", "Ġ", "ab", "Ġ", "12", "<|end|>"], ["xyz", "e", "Ì", "ģ"]),  # a word that is a token
        ("qwen2", ["abc", "Ġ", "ab", "Ġ", "1", "2", "<|end|>"], ["x", "y", "z", "Ã©"]),  # composed before it is cut
    ],
)
def test_a_text_is_cut_as_the_family_of_the_file_does(tmp_path, pre, pieces, special):
    convert(write(tmp_path / "x.gguf", LLAMA, "llama", pre=pre), tmp_path / "x")
    tokenizer = Tokenizer.from_folder(tmp_path / "x")
    ids = tokenizer.encode("abc ab 12<|end|>")
    assert [TOKENS[token] for token in ids] == pieces
    assert tokenizer.decode(ids) == "abc ab 12"
    assert [TOKENS[token] for text in ("xyz", "e\u0301") for token in tokenizer.encode(text)] == special


@pytest.mark.parametrize(
    ("pre", "fields", "begins"),
    [
        ("llama-bpe", {"bos": 5}, True),
        ("llama-bpe", {"bos": 5, "add_bos": False}, False),
        ("llama-bpe", {}, False),
        ("smollm", {"bos": 5}, False),
        ("smollm", {"bos": 5, "add_bos": True}, True),
    ],
)
def test_a_prompt_begins_as_the_file_says(tmp_path, pre, fields, begins):
    convert(write(tmp_path / "x.gguf", LLAMA, "llama", pre=pre, **fields), tmp_path / "x")
    tokenizer, theirs = Tokenizer.from_folder(tmp_path / "x"), AutoTokenizer.from_pretrained(tmp_path / "x")
    expected = [*([5] if begins else []), *tokenizer.encode("12")]
    assert list(tokenizer.encode("12", opening=True)) == theirs("12")["input_ids"] == expected
    assert theirs.bos_token == (TOKENS[5] if "bos" in fields else None)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"architecture": "gemma"}, "general.architecture must be one of llama, qwen2, qwen3, got 'gemma'"),
        ({"tokenizer": "llama"}, "tokenizer.ggml.model must be gpt2, byte-level BPE, got 'llama'"),
        (
            {"pre": "chatglm"},
            "tokenizer.ggml.pre must be one of gpt-2, default, smollm, llama-bpe, qwen2, got 'chatglm'",
        ),
        (
            {"eos": 999},
            "tokenizer.ggml.eos_token_id and eot_token_id must be token ids from 0 to 261, below",
        ),
        ({"bos": 999}, "tokenizer.ggml.bos_token_id must be token ids from 0 to 261, below vocab_size, got [999]"),
        ({"rope__scaling__type": "yarn"}, "scaled rotary embeddings are not supported"),
        ({"omit": "blk.0.attn_q.weight"}, "model.layers.0.self_attn.q_proj.weight: tensor is missing, expected shape"),
        ({"omit": "token_embd.weight"}, "it has no token_embd.weight"),
    ],
)
def test_unsupported_fields_are_named(tmp_path, fields, said):
    file = write(tmp_path / "x.gguf", LLAMA, "llama", **fields)
    with pytest.raises(ModelError) as caught:
        convert(file, tmp_path / "x")
    assert str(caught.value).startswith(f"{file}: {said}")
    assert not (tmp_path / "x").exists()


def test_a_file_that_is_none_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"absent\.gguf: no such file$"):
        convert(tmp_path / "absent.gguf", tmp_path / "x")
    whole = write(tmp_path / "x.gguf", LLAMA, "llama").read_bytes()
    for content in (b"", b"no model" * 9, whole[:100], whole[: len(whole) // 2]):
        (tmp_path / "broken").write_bytes(content)
        with pytest.raises(ModelError, match=r"broken: not a readable GGUF file"):
            convert(tmp_path / "broken", tmp_path / "x")
