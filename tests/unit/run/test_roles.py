"""How processes are started: those of the head node, and those of remote workers."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from areal_core.config.schema import RunConfig, load
from areal_core.run.roles import generation, role_specs, training_node
from areal_core.storage.rundir import RunDir, RunInfo

EMULATED = {"generation": {"engine": "emulated"}, "training": {"engine": "emulated"}}


def config(root: Path, **fields: Any) -> RunConfig:
    return load({"state_dir": str(root), **fields})


def folder(settings: RunConfig) -> RunDir:
    return RunDir.create(settings, RunInfo(run_id="r", model_path="/models/base", checkpoint_url="/store/r"))


def option(argv: list[str], name: str) -> str:
    return argv[argv.index(name) + 1]


def test_roles_of_a_run(tmp_path: Path) -> None:
    settings = config(tmp_path, mode="sync", generation={"slots": 7})
    run = folder(settings)
    specs = role_specs(run, settings, [0, 1])
    one = ("controller", "rendezvous", "node", "files", "evaluator", "tracker")
    counts = {"generation": 2, "trainer": 2} | dict.fromkeys(one, 1)
    # The evaluator steps one embedded engine itself.
    assert {name: spec.count for name, spec in specs.items()} == counts | {"evaluation": 0}
    server = specs["generation"].argv(1)
    assert (server[2], option(server, "--slots")) == ("areal_core.generation.server.routes", "7")
    ranks = [specs["trainer"].env(rank) for rank in (0, 1)]  # as torchrun would set them
    assert [(env["RANK"], env["LOCAL_RANK"], env["WORLD_SIZE"]) for env in ranks] == [("0", "0", "2"), ("1", "1", "2")]
    assert specs["trainer"].gang
    settings = config(tmp_path, generation={"slots": 7}, evaluation={"servers": 2, "slots": 9})
    evaluating = role_specs(run, settings, [0, 1])["evaluation"]
    assert (evaluating.count, option(evaluating.argv(1), "--slots")) == (2, "9")


@pytest.mark.parametrize(
    ("python", "found"), [(None, sys.executable), ("venv/bin/python", os.path.abspath("venv/bin/python"))]
)
def test_servers_of_vllm_get_what_its_command_line_needs(tmp_path: Path, python: str | None, found: str) -> None:
    vllm = {"python": python, "dtype": "float16", "tensor_parallel": 2, "kv_cache_gib": 3, "arguments": "--seed 4"}
    generation = {"engine": "vllm", "slots": 37, "vllm": vllm}
    settings = config(tmp_path, generation=generation)
    run = folder(settings)
    server = role_specs(run, settings, [0, 1])["generation"].argv(0)
    assert server[:3] == [sys.executable, "-m", "areal_core.generation.vllm.server"]
    wanted = {"--python": found, "--model": "/models/base", "--slots": "37", "--dtype": "float16"}
    wanted |= {"--tensor-parallel": "2", "--kv-cache-gib": "3", "--log-file": str(run.log_file("vllm", 0))}
    assert {name: option(server, name) for name in wanted} == wanted
    assert "--arguments=--seed 4" in server
    assert "--sleep" not in server
    sleeping = config(tmp_path, mode="sync", generation={**generation, "sleep": True})
    assert "--sleep" in role_specs(run, sleeping, [0, 1])["generation"].argv(0)


@pytest.mark.parametrize(
    ("fields", "servers", "ranks", "cores", "nice"),
    [
        pytest.param({}, 2, 2, {3, 5}, 10, id="async: both on all cores, generation behind training"),
        pytest.param({"launch": {"devices": 3}}, 3, 2, {3, 5, 6}, 10, id="a rank for four groups of a minibatch"),
        pytest.param(
            {"launch": {"devices": 6}, "training": {"minibatches": 1}}, 6, 6, {3, 5, 6, 7}, 10, id="more than cores"
        ),
        pytest.param({"rollout": {"batch_size": 64}}, 2, 1, {3, 5}, 10, id="a rank at least"),
        pytest.param({"mode": "sync"}, 2, 2, {3, 5}, 0, id="sync: in turns"),
        pytest.param({"launch": {"devices": 4}} | EMULATED, 3, 1, None, 0, id="emulated devices are no cores"),
        pytest.param({"launch": {"devices": 4, "accelerator": "cuda"}}, 3, 1, None, 0, id="GPUs are not shared"),
    ],
)
def test_the_cores_and_priorities_of_roles(
    tmp_path: Path, fields: dict[str, Any], servers: int, ranks: int, cores: set[int] | None, nice: int
) -> None:
    settings = config(tmp_path, **fields)
    specs = role_specs(folder(settings), settings, [3, 5, 6, 7])
    assert (specs["generation"].count, specs["trainer"].count) == (servers, ranks)
    assert specs["generation"].cpus == specs["trainer"].cpus == cores
    assert specs["controller"].cpus is specs["evaluator"].cpus is None
    assert (specs["trainer"].nice, specs["controller"].nice, specs["generation"].nice) == (0, 0, nice)
    assert specs["evaluator"].nice == specs["evaluation"].nice == settings.launch.evaluator_nice > nice


@pytest.mark.parametrize(
    ("fields", "gpu"),
    [
        pytest.param({"generation": {"servers": 2}}, "3", id="after servers and ranks"),
        pytest.param({"mode": "sync", "training": {"ranks": 2}, "generation": {"servers": 1}}, "2", id="in turns"),
    ],
)
def test_the_evaluators_own_servers_may_have_gpus_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], gpu: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    launch = {"accelerator": "cuda", "devices": 4}
    settings = config(tmp_path, launch=launch, evaluation={"accelerator": "cuda"}, **fields)
    run = folder(settings)
    spec = role_specs(run, settings, [0, 1])["evaluation"]
    assert spec.env(0)["CUDA_VISIBLE_DEVICES"] == gpu
    assert option(spec.argv(0), "--device") == "cuda"
    beside = config(tmp_path, launch=launch, **fields)
    assert "CUDA_VISIBLE_DEVICES" not in role_specs(run, beside, [0, 1])["evaluation"].env(0)


# -- remote workers ----------------------------------------------------------------------------------------------------


def test_servers_of_another_machine_have_its_address_and_numbers_and_gpus_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    launch = {"remote_roles": "both", "address": "127.0.0.1", "devices": 8, "accelerator": "cuda"}
    training = {"ranks": 4, "hosts": 2, "minibatches": 1}
    settings = config(tmp_path, launch=launch, training=training)
    run = folder(settings)
    spec = generation(run, settings, address="10.0.0.2", first=2, count=2)
    assert list(spec.indices) == [2, 3]
    assert option(spec.argv(3), "--host") == "10.0.0.2"
    assert option(spec.argv(3), "--ready-file") == str(run.ready_file("generation", 3))
    assert spec.cpus is None
    assert [spec.env(index)["CUDA_VISIBLE_DEVICES"] for index in spec.indices] == ["4", "5"]
    assert option(role_specs(run, settings, [0, 1])["generation"].argv(0), "--host") == "127.0.0.1"
    assert training_node(run, settings, address="127.0.0.1", node=1).env(1)["CUDA_VISIBLE_DEVICES"] == "4,5"
    settings = config(tmp_path, launch=launch | {"remote_roles": "trainer"}, training=training)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5")
    specs = role_specs(run, settings, [0])
    assert specs["generation"].env(1)["CUDA_VISIBLE_DEVICES"] == "1"
    assert specs["node"].env(0)["CUDA_VISIBLE_DEVICES"] == "4,5"  # after four servers
