"""The examples of docs/extending.md, as they stand there, train a run together."""

from __future__ import annotations

import dataclasses
import re
import sqlite3
from pathlib import Path

import pytest

from areal_core.models.folders import init_weights, write_model
from areal_core.models.tokenizer import Tokenizer
from areal_core.run.launcher import execute, run_folder
from tests.support.chat import chat_folder
from tests.support.generation import LLAMA_GQA
from tests.support.runs import tiny

PAGE = Path(__file__).resolve().parents[2] / "docs" / "extending.md"
STEPS = 2


@pytest.mark.slow
@pytest.mark.end_to_end
def test_the_examples_of_the_page_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = PAGE.read_text()
    examples = re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```$", text, re.S | re.M)
    names = dict(re.findall(r"(\w+\.\w+)=(my_\w+:\w+)", text))
    assert len(examples) == len(names) == 8
    for name, code in examples:
        (tmp_path / name).write_text(code)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{PAGE.parents[1]}")
    monkeypatch.syspath_prepend(str(tmp_path))
    groups: dict[str, dict[str, str]] = {}
    for field, path in names.items():
        group, _, field = field.partition(".")
        groups.setdefault(group, {})[field] = path
    limits = {"held_out": 8, "max_prompt_tokens": 256, "max_new_tokens": 24, "chat": {"enabled": True}}
    changed = {
        "model": {"path": str(_talking_model(tmp_path / "model")), "context": 512},
        "task": groups["task"] | limits,
        "algorithm": groups["algorithm"] | {"entropy_coef": 0.01},
        "training": groups["training"] | {"steps": STEPS},
    }
    config = tiny(tmp_path / "state", warm=False, **groups | changed)
    assert execute(config, run_id="mine", log=lambda line: None).steps == STEPS
    run = run_folder(config, "mine")
    requests = run.log_file("generation", 0).read_text()
    assert len(re.findall(r"^group-\d+-0: \d+ tokens, 4 completions$", requests, re.M)) >= STEPS * 8
    with sqlite3.connect(run.outbox) as outbox:
        points = outbox.execute("SELECT key, step FROM metrics WHERE key GLOB 'mine/*' OR key GLOB 'control/*'")
        curves = {"mine/share_of_long", "mine/price_of_length", "mine/price", "mine/far"}
        curves |= {"control/learning_rate", "control/entropy_coef"}
        assert set(points) == {(curve, step) for curve in curves for step in range(1, STEPS + 1)}


def _talking_model(folder: Path) -> Path:
    """A small model that has learnt nothing, with a tokenizer of bytes and a chat template."""
    tokenizer = Tokenizer.from_folder(chat_folder(folder))
    spec = dataclasses.replace(
        LLAMA_GQA, vocab_size=tokenizer.vocab_size, context=512, eos_token_ids=(tokenizer.token_id("<|im_end|>"),)
    )
    write_model(folder, spec, init_weights(spec, seed=0), folder / "tokenizer.json")
    return folder
