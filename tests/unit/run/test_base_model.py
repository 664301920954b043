"""Policy version 0: the embedded model is warmed up once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from areal_core.config.schema import load
from areal_core.errors import ProcessError
from areal_core.launch.supervisor import FileLock
from areal_core.run import base_model as module
from areal_core.run.prepare import prepare
from areal_core.training.recipe import cache_key

TINY = {"hidden_size": 8, "layers": 1, "heads": 1, "kv_heads": 1, "intermediate_size": 8}


def test_the_embedded_model_is_made_once(base: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """By a command that only makes the folder, the last of its arguments; the real one makes the models of the ring."""
    monkeypatch.setattr(module, "python", lambda *arguments: ["mkdir", str(arguments[-1])])
    config = load(base | {"model": TINY})
    Path(base["state_dir"]).mkdir()
    lines: list[str] = []
    made = [module.base_model(config, lines.append) for _ in range(2)]
    assert made == [Path(base["state_dir"]).absolute() / "cache" / cache_key(config)] * 2
    assert [line for line in lines if "warming up" in line] == lines[:1]


def test_a_warm_up_that_leaves_no_model(base: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "python", lambda *arguments: ["true"])
    Path(base["state_dir"]).mkdir()
    with pytest.raises(ProcessError, match=r"^warmup-0 exited with code 0 and left no /"):
        module.base_model(load(base | {"model": TINY}), lambda line: None)


def test_a_warm_up_that_fails(base: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "python", lambda *arguments: ["sh", "-c", "echo out of luck; exit 3"])
    with pytest.raises(ProcessError, match=r"^warmup-0 exited with code 3; .* ends: out of luck$"):
        prepare(load(base | {"model": TINY}), log=lambda line: None)


def test_two_runs_do_not_make_the_same_model_at_once(base: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_WARMUP_LOCK_S", 0.0)
    config = load(base | {"model": TINY})
    cache = Path(base["state_dir"]) / "cache"
    cache.mkdir(parents=True)
    busy = pytest.raises(ProcessError, match="is still held by another run's warm-up")
    with FileLock(cache / f"{cache_key(config)}.lock", timeout_s=0.0, busy=""), busy:
        prepare(config, log=lambda line: None)
