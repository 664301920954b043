"""The examples of docs/extending.md, as they stand there, train a run together."""

from __future__ import annotations

import re
import sqlite3
from pathlib import Path

import pytest

from areal_core.run.launcher import execute, run_folder
from tests.support.runs import tiny

PAGE = Path(__file__).resolve().parents[2] / "docs" / "extending.md"
STEPS = 2


@pytest.mark.slow
def test_the_examples_of_the_page_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = PAGE.read_text()
    examples = re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```$", text, re.S | re.M)
    names = dict(re.findall(r"(\w+\.\w+)=(my_\w+:\w+)", text))
    assert len(examples) == len(names) == 6
    for name, code in examples:
        (tmp_path / name).write_text(code)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{PAGE.parents[1]}")
    monkeypatch.syspath_prepend(str(tmp_path))
    groups: dict[str, dict[str, str]] = {}
    for field, path in names.items():
        group, _, field = field.partition(".")
        groups.setdefault(group, {})[field] = path
    config = tiny(
        tmp_path / "state",
        **groups | {"training": groups["training"] | {"steps": STEPS}, "task": {"held_out": 8, "max_new_tokens": 24}},
    )
    assert execute(config, run_id="mine", log=lambda line: None).steps == STEPS
    run = run_folder(config, "mine")
    requests = run.log_file("generation", 0).read_text()
    assert len(re.findall(r"^group-\d+-0: \d+ tokens, 4 completions$", requests, re.M)) >= STEPS * 8
    with sqlite3.connect(run.outbox) as outbox:
        points = dict(outbox.execute("SELECT step, value FROM metrics WHERE key = 'mine/share_of_long'").fetchall())
    assert set(points) == set(range(1, STEPS + 1))
