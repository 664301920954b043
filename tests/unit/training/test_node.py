"""torchrun's agent of one machine: its settings, its wait for the rendezvous, and how it ends."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from areal_core.config.schema import RunConfig, load
from areal_core.errors import ProcessError
from areal_core.storage.rundir import RunDir, RunInfo, write_json
from areal_core.training.distributed import node


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


def test_the_end_of_a_rank_is_told_on_one_line() -> None:
    ends = {3: ProcessFailure(1, 41, -signal.SIGKILL, ""), 1: ProcessFailure(0, 40, 1, "")}
    assert node._described(ChildFailedError("ranks", ends)) == "rank 1 exited with code 1; rank 3 was killed by SIGKILL"
