"""torchrun's agent of one machine: its settings, its wait for the rendezvous, and how it ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from areal_core.config.schema import RunConfig, load
from areal_core.errors import ProcessError
from areal_core.launch.process import SPENT
from areal_core.storage.rundir import RunDir, RunInfo, write_json
from areal_core.training.distributed import node

PATIENCE_S = 90.0


def prepared(root: Path, *, ranks: int = 4, **launch: Any) -> tuple[RunDir, RunConfig]:
    launch = {"remote_roles": "trainer", "restarts": 1, "stop_timeout_s": 9.0, "start_timeout_s": 30.0} | launch
    training = {"ranks": ranks, "hosts": 2, "minibatches": 1}
    config = load({"state_dir": str(root), "launch": launch, "training": training})
    return RunDir.create(config, RunInfo(run_id="r", model_path="/models/base", checkpoint_url="/store/r")), config


def test_the_agent_awaits_the_rendezvous(tmp_path: Path) -> None:
    run, _ = prepared(tmp_path)
    with pytest.raises(ProcessError, match=r"^no rendezvous in 0\.1 s \(launch\.start_timeout_s\)"):
        node.await_rendezvous(run, 0.1)
    write_json(run.ready_file("rendezvous"), {"pid": 1, "url": "tcp://10.0.0.1:700"})
    assert node.await_rendezvous(run, 0.1) == "10.0.0.1:700"


@pytest.mark.slow
@pytest.mark.recovery
def test_ranks_that_fail_too_often_end_it_with_a_status_of_its_own(tmp_path: Path) -> None:
    run, _ = prepared(tmp_path, ranks=2, restarts=0)  # there is no model: every rank fails at once
    ready = str(run.ready_file("rendezvous"))
    module, address = [sys.executable, "-m"], ["--address", "127.0.0.1"]
    rendezvous = [*module, "areal_core.training.distributed.rendezvous", *address, "--ready-file", ready]
    agent = [*module, "areal_core.training.distributed.node", "--run-dir", str(run.root), *address, "--node"]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    outputs = [tmp_path / f"agent-{index}.txt" for index in range(2)]
    processes = [subprocess.Popen(rendezvous)]
    try:
        for number, path in enumerate(outputs):
            with path.open("wb") as file:
                started = subprocess.Popen([*agent, str(number)], env=environment, stdout=file, stderr=file)
                processes.append(started)
        deadline = time.monotonic() + PATIENCE_S
        while all(process.poll() is None for process in processes[1:]):  # once one is spent, the other may wait for it
            assert time.monotonic() < deadline, [path.read_text() for path in outputs]
            time.sleep(0.05)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    codes, said = [process.returncode for process in processes[1:]], [path.read_text() for path in outputs]
    assert SPENT in codes, said
    last = said[codes.index(SPENT)].splitlines()[-1]
    assert re.fullmatch(r"areal: error: rank \d exited with code 1", last)


def test_the_end_of_a_rank_is_told_on_one_line() -> None:
    ends = {3: ProcessFailure(1, 41, -signal.SIGKILL, ""), 1: ProcessFailure(0, 40, 1, "")}
    assert node._described(ChildFailedError("ranks", ends)) == "rank 1 exited with code 1; rank 3 was killed by SIGKILL"
