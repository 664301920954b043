"""Model folders: one that is sound and as small as can be, and those that runs warm up."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

from areal_core.config.schema import RunConfig
from areal_core.models.folders import ModelSpec, init_weights, write_model
from areal_core.models.tokenizer import EOS, char_tokenizer
from areal_core.training.recipe import cache_key
from areal_core.training.warmup import make_model
from tests.support.generation import QWEN2

_SMALLEST = {"hidden_size": 8, "layers": 1, "heads": 1, "kv_heads": 1, "intermediate_size": 8, "tie_embeddings": False}
_TOKENIZER = char_tokenizer()
_EMBEDDED = {"vocab_size": _TOKENIZER.vocab_size, "context": 160, "eos_token_ids": (_TOKENIZER.token_id(EOS),)}
SPEC = replace(QWEN2, **_SMALLEST, **_EMBEDDED)


def write_tiny(folder: Path, spec: ModelSpec = SPEC) -> Path:
    """A folder that runs of the embedded task can start from."""
    folder.mkdir(parents=True, exist_ok=True)
    _TOKENIZER.save(folder / "tokenizer.json")
    write_model(folder, spec, init_weights(spec, seed=0), folder / "tokenizer.json")
    return folder


def put_base_model(config: RunConfig) -> None:
    """Put the base model of a run where the run looks for it. It is made once a session, in this process: by itself
    every run of a state folder of its own would start a process for that, whose import of torch alone takes seconds."""
    made = Path(config.state_dir) / "cache" / cache_key(config)
    if made.exists():
        return
    folder = Path(_made().name) / made.name
    if not folder.exists():
        make_model(config, folder)
    shutil.copytree(folder, made)


@cache
def _made() -> tempfile.TemporaryDirectory[str]:
    """Removed when this process ends."""
    return tempfile.TemporaryDirectory(prefix="areal-base-models-")
