"""What processes of other machines are started with; those of the head are in test_run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest

from areal_core.config import RunConfig, load
from areal_core.errors import ConfigError
from areal_core.roles import host_generation, host_trainer, interface, role_specs
from areal_core.rundir import RunDir, RunInfo


def prepared(root: Path, **launch: Any) -> tuple[RunDir, RunConfig]:
    launch = {"elsewhere": "both", "address": "127.0.0.1", "devices": 8} | launch
    config = load({"state_dir": str(root), "launch": launch, "training": {"ranks": 4, "hosts": 2, "minibatches": 1}})
    return RunDir.create(config, RunInfo(run_id="r", model_path="/models/base", checkpoint_url="/store/r")), config


def option(argv: list[str], name: str) -> str:
    return argv[argv.index(name) + 1]


def test_servers_of_another_machine_listen_on_its_address_and_have_numbers_of_their_own(tmp_path: Path) -> None:
    run, config = prepared(tmp_path)
    spec = host_generation(run, config, address="10.0.0.2", first=2, count=2)
    assert list(spec.indices) == [2, 3]
    assert option(spec.argv(3), "--host") == "10.0.0.2"
    assert option(spec.argv(3), "--ready-file") == str(run.ready_file("generation", 3))
    assert spec.cpus(3) is None
    head = role_specs(run, config, [0, 1])["generation"]
    assert option(head.argv(0), "--host") == "127.0.0.1"


def test_a_machines_gpus_are_counted_from_its_first_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    run, config = prepared(tmp_path, accelerator="cuda")
    servers = host_generation(run, config, address="10.0.0.2", first=2, count=2)
    assert [servers.env(index)["CUDA_VISIBLE_DEVICES"] for index in servers.indices] == ["4", "5"]
    assert host_trainer(run, config, address="127.0.0.1", node=1).env(1)["CUDA_VISIBLE_DEVICES"] == "4,5"
    run, config = prepared(tmp_path, accelerator="cuda", elsewhere="trainer")
    assert role_specs(run, config, [0])["generation"].env(1)["CUDA_VISIBLE_DEVICES"] == "5"


def test_ranks_of_another_machine_talk_through_the_interface_of_its_address(tmp_path: Path) -> None:
    run, config = prepared(tmp_path)
    spec = host_trainer(run, config, address="127.0.0.1", node=1)
    assert list(spec.indices) == [1]
    assert spec.env(1)["GLOO_SOCKET_IFNAME"] == "lo"
    assert spec.argv(1)[1:] == [
        *("-m", "areal_core.training.node"),
        *("--run-dir", str(run.root), "--address", "127.0.0.1"),
    ]


def test_interfaces_by_address() -> None:
    for name, addresses in psutil.net_if_addrs().items():
        for one in addresses:
            if one.family.name == "AF_INET":
                assert interface(one.address) == name
    with pytest.raises(ConfigError, match=r"^--address: no network interface of this machine has 203\.0\.113\.9$"):
        interface("203.0.113.9")
