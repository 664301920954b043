"""`areal try` on a real base model, with generation servers and reward workers."""

from __future__ import annotations

from pathlib import Path

import areal_core as areal
from tests.support.runs import tiny


def test_a_verifier_that_accepts_everything_is_named(tmp_path: Path) -> None:
    config = tiny(
        tmp_path, environment={"verifier": "tests.support.verifiers:ends", "verify_truncated": True}, tracking={}
    )
    report = areal.try_out(config, prompts=2)
    assert report.result.page.exists()
    assert report.result.records[0].prompt
    assert (report.figures.groups, report.figures.rollouts) == (2, 2 * config.algorithm.group_size)
    [(fatal, problem)] = report.problems
    assert fatal
    assert problem.startswith("environment.verifier: all rewards are equal in 100% of groups, and 100% of the rollouts")
