"""Convert GGUF files of Llama, Qwen2 and Qwen3 decoders (llama.cpp, Ollama) to model folders.

The `gguf` package dequantises model weights to float32. The tokenizer is built from the file's tokens and merges. A
file names its pre-tokenizer but does not hold it: `_CUTS` has those of the supported families.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
from gguf import GGUFReader
from safetensors.numpy import save_file
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from areal_core.errors import ModelError
from areal_core.models.spec import ModelSpec, check_shapes, check_tokens, weight_shapes, write_config
from areal_core.models.tokenizer import Tokenizer, write_settings
from areal_core.types import Float32Array

_ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", gguf.MODEL_ARCH.LLAMA),
    "qwen2": ("Qwen2ForCausalLM", gguf.MODEL_ARCH.QWEN2),
    "qwen3": ("Qwen3ForCausalLM", gguf.MODEL_ARCH.QWEN3),
}
_CONTROL, _USER_DEFINED = gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _by_words(digits: str) -> list[Any]:
    pattern = Regex(_WORDS.replace("DIGITS", digits))
    return [
        pre_tokenizers.Split(pattern, "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]


_CUTS = {  # tokenizer.ggml.pre -> pre-tokenizers
    "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "default": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "llama-bpe": _by_words("{1,3}"),
    "qwen2": _by_words(""),
}


def convert(file: Path, folder: Path) -> None:
    """Convert a GGUF file to a transformers folder: model weights, tokenizer, chat template.

    Raises ModelError naming the file and the missing or unsupported field.
    """
    reader = _opened(file)
    try:
        fields = {name: field.contents() for name, field in reader.fields.items()}
        spec = _spec(fields, {tensor.name: tuple(tensor.shape.tolist()) for tensor in reader.tensors})
        weights = _weights(reader, spec, str(fields["general.architecture"]))
        tokenizer, bos = _tokenizer(fields), _bos(fields)
    except ModelError as error:
        raise ModelError(f"{file}: {error}") from None
    work = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    write_config(work, spec, "float32")
    save_file(weights, work / "model.safetensors", {"format": "pt"})
    tokenizer.save(work / "tokenizer.json")
    tokens = fields["tokenizer.ggml.tokens"]
    template = fields.get("tokenizer.chat_template")
    write_settings(
        work / "tokenizer_config.json",
        eos=tokens[spec.eos_token_ids[0]] if spec.eos_token_ids else None,
        bos=tokens[bos[0]] if bos else None,
        context=spec.context,
        chat_template=None if template is None else str(template),
    )
    work.rename(folder)


def _opened(file: Path) -> GGUFReader:
    try:
        return GGUFReader(file)
    except FileNotFoundError:
        raise ModelError(f"{file}: no such file") from None
    except (OSError, ValueError, IndexError, KeyError) as error:  # raised by the package for damaged files
        raise ModelError(f"{file}: not a readable GGUF file ({error})") from error


def _spec(fields: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> ModelSpec:
    kind = str(_field(fields, "general.architecture"))
    if kind not in _ARCHITECTURES:
        raise ModelError(f"general.architecture must be one of {', '.join(_ARCHITECTURES)}, got {kind!r}")
    if fields.get(f"{kind}.rope.scaling.type", "none") != "none" or "rope_freqs.weight" in shapes:
        raise ModelError("scaled rotary embeddings are not supported")

    def field(name: str, default: Any = None) -> Any:
        return _field(fields, f"{kind}.{name}", default)

    hidden, heads = field("embedding_length"), field("attention.head_count")
    if "token_embd.weight" not in shapes:
        raise ModelError("it has no token_embd.weight")
    vocabulary = shapes["token_embd.weight"][1]
    ends = dict.fromkeys(fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot"))
    eos_token_ids = check_tokens(
        [token for token in ends if token is not None],
        min(vocabulary, len(_field(fields, "tokenizer.ggml.tokens"))),
        "tokenizer.ggml.eos_token_id and eot_token_id",
    )
    return ModelSpec(
        architecture=_ARCHITECTURES[kind][0],
        vocab_size=vocabulary,
        hidden_size=hidden,
        layers=field("block_count"),
        heads=heads,
        kv_heads=field("attention.head_count_kv", heads),
        head_dim=field("attention.key_length", hidden // heads),
        intermediate_size=field("feed_forward_length"),
        rope_theta=field("rope.freq_base", 10000.0),
        rms_eps=field("attention.layer_norm_rms_epsilon"),
        qkv_bias=kind == "qwen2",
        qk_norm=kind == "qwen3",
        tie_embeddings="output.weight" not in shapes,
        context=field("context_length"),
        eos_token_ids=eos_token_ids,
    )


def _field(fields: dict[str, Any], name: str, default: Any = None) -> Any:
    value = fields.get(name, default)
    if value is None:
        raise ModelError(f"it has no {name}")
    return value


def _weights(reader: GGUFReader, spec: ModelSpec, kind: str) -> dict[str, Float32Array]:
    stored = {tensor.name: tensor for tensor in reader.tensors}
    names = gguf.get_tensor_name_map(_ARCHITECTURES[kind][1], spec.layers)
    weights: dict[str, Float32Array] = {}
    for name in weight_shapes(spec):
        tensor = stored.get(names.get_name(name, try_suffixes=(".weight", ".bias")) or "")
        if tensor is None:
            continue  # `check_shapes` reports it
        array = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        if kind == "llama" and (found := re.search(r"\.([qk])_proj\.", name)):
            array = _halves(array, spec.heads if found[1] == "q" else spec.kv_heads)
        weights[name] = np.ascontiguousarray(array)
    check_shapes(weight_shapes(spec), weights)
    return weights


def _halves(array: Float32Array, heads: int) -> Float32Array:
    """Reorder query or key rows from llama.cpp to transformers. [heads * head_dim, ...] -> the same.

    transformers rotates the two halves of a head. llama.cpp keeps rows that are rotated together side by side.
    """
    return array.reshape(heads, -1, 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def _tokenizer(fields: dict[str, Any]) -> Tokenizer:
    if (kind := _field(fields, "tokenizer.ggml.model")) != "gpt2":
        raise ModelError(f"tokenizer.ggml.model must be gpt2, byte-level BPE, got {kind!r}")
    if (cut := fields.get("tokenizer.ggml.pre", "default")) not in _CUTS:
        raise ModelError(f"tokenizer.ggml.pre must be one of {', '.join(_CUTS)}, got {cut!r}")
    tokens, kinds = _field(fields, "tokenizer.ggml.tokens"), _field(fields, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ", 1)) for merge in _field(fields, "tokenizer.ggml.merges")]
    vocabulary, llama_3 = {token: place for place, token in enumerate(tokens)}, cut == "llama-bpe"
    inner = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=llama_3))
    if cut == "qwen2":
        inner.normalizer = normalizers.NFC()
    inner.pre_tokenizer = pre_tokenizers.Sequence(_CUTS[cut])
    if fields.get("tokenizer.ggml.add_bos_token", llama_3):
        first = [(tokens[token], token) for token in _bos(fields)]
        inner.post_processor = processors.TemplateProcessing([*dict(first), "$A"], special_tokens=first)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(_added(tokens, kinds, _CONTROL, special=True))
    inner.add_tokens(_added(tokens, kinds, _USER_DEFINED, special=False))
    return Tokenizer(inner)


def _bos(fields: dict[str, Any]) -> tuple[int, ...]:
    name = "tokenizer.ggml.bos_token_id"
    return check_tokens([fields[name]] if name in fields else [], len(_field(fields, "tokenizer.ggml.tokens")), name)


def _added(tokens: list[str], kinds: list[int], wanted: int, *, special: bool) -> list[AddedToken]:
    return [
        AddedToken(token, special=special, normalized=False)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind == wanted
    ]
