"""Policy version 0: the embedded model is warmed up once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from areal_core.config.schema import load
from areal_core.errors import ModelError, ProcessError
from areal_core.launch.supervisor import FileLock
from areal_core.models import gguf
from areal_core.run import folders as module
from areal_core.run.preflight import preflight
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


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["true"], r"^warmup-0 exited with code 0 and left no /"),
        (["sh", "-c", "echo out of luck; exit 3"], r"^warmup-0 exited with code 3; .* ends: out of luck$"),
    ],
)
def test_failed_warm_up_is_named(
    base: dict[str, Any], monkeypatch: pytest.MonkeyPatch, command: list[str], said: str
) -> None:
    monkeypatch.setattr(module, "python", lambda *arguments: command)
    Path(base["state_dir"]).mkdir()
    with pytest.raises(ProcessError, match=said):
        module.base_model(load(base | {"model": TINY}), print)


def test_a_gguf_file_is_converted_once_and_again_when_it_has_changed(
    base: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made: list[str] = []

    def convert(file: Path, folder: Path) -> None:
        made.append(file.read_text())
        folder.mkdir()

    monkeypatch.setattr(gguf, "convert", convert)
    file = tmp_path / "small.gguf"
    config = load(base | {"model": {"path": str(file)}})
    folders = []
    for content in ("one", "another"):
        file.write_text(content)
        folders += [module.base_model(config, print) for _ in range(2)]
    assert made == ["one", "another"]
    assert (folders[0], folders[2]) == (folders[1], folders[3])
    assert folders[0] != folders[2]
    file.unlink()
    with pytest.raises(ModelError, match=r"^model\.path: .*small\.gguf: No such file or directory$"):
        preflight(config)


def test_two_runs_do_not_make_the_same_model_at_once(base: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_WARMUP_LOCK_S", 0.0)
    config = load(base | {"model": TINY})
    cache = Path(base["state_dir"]) / "cache"
    cache.mkdir(parents=True)
    busy = pytest.raises(ProcessError, match="is still held by another run, which makes its base model")
    with FileLock(cache / f"{cache_key(config)}.lock", timeout_s=0.0, busy=""), busy:
        prepare(config, log=print)
