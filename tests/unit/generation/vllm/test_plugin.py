"""The plugin in vLLM's environment: the module imports vLLM."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.support.live_servers import VLLM_PYTHON, require_vllm

HEADS = """
import json, sys
from pathlib import Path
import torch
from safetensors.torch import save_file
from areal_core.generation.vllm import plugin
from areal_core.models.verified import weights_digest

file, embedding = Path(sys.argv[1]) / "f", "model.embed_tokens.weight"
found = []
for others in ({}, {"lm_head.weight": torch.ones(2)}):
    save_file({embedding: torch.zeros(2), **others}, file)
    found.append(plugin._read(file, weights_digest(file), {}, head_is_embedding=True)["lm_head.weight"].tolist())
print(json.dumps(found))
"""


@pytest.mark.vllm
def test_an_update_keeps_a_head_of_its_own(tmp_path: Path) -> None:
    """Of a base model whose configuration says that the head is the embedding."""
    require_vllm()
    ended = subprocess.run([str(VLLM_PYTHON), "-c", HEADS, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout.splitlines()[-1]) == [[0, 0], [1, 1]]
