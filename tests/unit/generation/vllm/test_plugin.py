"""Which of vLLM's processes on a machine checks a file, in vLLM's environment: the module imports vLLM."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.support.live_servers import VLLM_PYTHON, require_vllm

SCRIPT = """
import fcntl, json, os, sys
from pathlib import Path
from areal_core.generation.vllm import plugin

def asked(sha256="a"):
    with plugin._unchecked(file, sha256) as unchecked:
        return unchecked

root = Path(sys.argv[1])
file, plugin._MARKS, plugin._MARKS_KEPT, plugin._CHECK_S = root / "f", root, 3, 0.2
file.write_bytes(b"weights")
found = {"first, second": [asked(), asked()], "of another hash": asked("b")}
folder = root / f"areal-checked-{os.getuid()}"
others = set(folder.iterdir())
try:
    with plugin._unchecked(file, "c"):
        raise ValueError
except ValueError:
    found["after one that failed"] = asked("c")
(mark,) = set(folder.iterdir()) - others
held = mark.open()
fcntl.flock(held, fcntl.LOCK_EX)
found["while one that has checked is stopped"] = asked("c")
mark.write_bytes(b"")
found["while one that checks is stopped"] = asked("c")
file.write_bytes(b"WEIGHTS")
found["once it has changed"] = asked()
for sha256 in "defgh":
    asked(sha256)
found["marks"] = len(list(folder.iterdir()))
folder.chmod(0o770)
try:
    asked()
except PermissionError as error:
    found["others could write the marks"] = str(error)
print(json.dumps(found))
"""


HEADS = """
import hashlib, json, sys
from pathlib import Path
import torch
from safetensors.torch import save_file
from areal_core.generation.vllm import plugin

file, embedding = Path(sys.argv[1]) / "f", "model.embed_tokens.weight"
found = []
for others in ({}, {"lm_head.weight": torch.ones(2)}):
    save_file({embedding: torch.zeros(2), **others}, file)
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    found.append(plugin._read(file, sha256, {}, head_is_embedding=True)["lm_head.weight"].tolist())
print(json.dumps(found))
"""


@pytest.mark.vllm
def test_an_update_keeps_a_head_of_its_own(tmp_path: Path) -> None:
    """Of a base model whose configuration says that the head is the embedding."""
    require_vllm()
    ended = subprocess.run([str(VLLM_PYTHON), "-c", HEADS, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout.splitlines()[-1]) == [[0, 0], [1, 1]]


@pytest.mark.vllm
def test_one_process_checks_a_file_unless_it_fails_or_stands_still(tmp_path: Path) -> None:
    require_vllm()
    command = [str(VLLM_PYTHON), "-c", SCRIPT, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    refusal = found.pop("others could write the marks")
    assert refusal.endswith(": must be a folder that this user alone can write")
    assert found == {
        "first, second": [True, False],
        "of another hash": True,
        "after one that failed": True,
        "while one that has checked is stopped": False,
        "while one that checks is stopped": True,
        "once it has changed": True,
        "marks": 3,
    }
