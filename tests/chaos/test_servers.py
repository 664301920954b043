"""Generation servers are killed and hung in the middle of a run, and come back: no trajectory is lost, none is there
twice, and every token's version is correct."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.support.runs import Launched
from tests.support.trajectories import PublishedWeights, ServerView, audited, check_trajectories, has_come_back

pytestmark = pytest.mark.chaos


def until_it_decodes(run: Launched, index: int) -> None:
    """Wait until a server has so many running completions that some still run a moment later."""
    server = ServerView(run.url("generation", index), run.run.token())
    run.wait_for(f"generation-{index} decodes", lambda: server.running() >= 4)


def check_the_loss(run: Launched, index: int) -> None:
    """The controller's log: one server was taken out, its requests failed, and none of them twice."""
    log = run.run.log_file("controller").read_text()
    assert re.findall(r"generation server (\S+) is removed", log) == [f"generation-{index}"]
    assert "attempt 1 failed: " in log
    assert "attempt 2 failed: " not in log


@pytest.mark.parametrize(
    ("interruption", "signum", "said"),
    [
        ("recompute", signal.SIGKILL, "generation-1 was killed by SIGKILL: restart 1 of 2"),
        ("resubmit", signal.SIGKILL, "generation-1 was killed by SIGKILL: restart 1 of 2"),
        ("resubmit", signal.SIGSTOP, "the controller removed the generation server at "),
    ],
)
def test_one_of_three_servers_is_killed_or_hangs_and_comes_back(
    tmp_path: Path, interruption: str, signum: signal.Signals, said: str
) -> None:
    config = audited(tmp_path, servers=3, interruption=interruption, steps=60)
    with Launched(config, f"{signum.name}-{interruption}") as run, PublishedWeights(run) as published:
        server = run.pid("generation", 1)
        run.until_step(10)
        until_it_decodes(run, 1)
        os.kill(server, signum)
        has_come_back(run, 1, but=server)
        run.finished()
        assert run.output().count(said) == 1
        check_the_loss(run, 1)
        check_trajectories(run, published)
