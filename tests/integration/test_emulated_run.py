"""Whole runs on emulated accelerators: real processes, hand-overs and token ledgers, emulated time."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from areal_core.config.schema import RunConfig
from areal_core.errors import ConfigError
from areal_core.run.launcher import execute, run_folder
from areal_core.run.progress import conclude
from areal_core.tracking.outbox import Outbox
from areal_core.tracking.timeline import read_timeline
from areal_core.types import RunStatus
from tests.support.runs import merged, tiny

STEPS = 3


def emulated(root: Path, *, mode: str = "async", **fields: dict[str, Any]) -> RunConfig:
    groups: dict[str, dict[str, Any]] = {
        "task": {"max_operations": 3, "max_prompt_tokens": 8, "max_new_tokens": 32, "held_out": 16},
        "generation": {"engine": "emulated", "slots": 8},
        "rollout": {"batch_size": 16},
        "training": {"engine": "emulated", "steps": STEPS},
        "launch": {"devices": 3, "restarts": 0},
        "emulation": {"speed": 200.0, "length_median": 1500.0, "handover_s": 2.0},
    }
    return tiny(root, mode=mode, **merged(groups, fields))


@pytest.mark.slow
@pytest.mark.end_to_end
def test_emulated_run_balances_its_tokens_and_names_what_it_emulates(tmp_path: Path) -> None:
    config = emulated(tmp_path)
    seen: list[RunStatus] = []
    summary = execute(config, run_id="r", log=print, on_status=seen.append)
    assert (summary.reason, summary.steps, summary.incarnation) == ("steps", STEPS, 0)
    assert (summary.tokens.generated, summary.tokens.allowance) == (summary.tokens.accounted, 0)
    assert summary.tokens.consumed > 0
    assert summary.tokens.dropped == 0
    assert summary.accuracy_before is summary.accuracy_after is summary.best_accuracy is None
    assert not summary.alerts  # that nothing is learnt is no news
    assert summary.emulated == "qwen-1.5b on 3 h800, 200 s in one, 128 tokens as one"
    assert f"emulated: {summary.emulated}" in conclude(summary)
    assert summary.name == "emulated-cpu-async"
    assert seen
    assert all(status.emulated for status in seen)
    # Tokens a second are the emulated cluster's, token counts and seconds this machine's.
    real = summary.tokens.consumed / summary.rl_wall_s
    assert summary.effective_tokens_per_s == pytest.approx(real * 128 / 200)
    run = run_folder(config, "r")
    spans = read_timeline(run.timeline)
    # One trainer for all devices, spans of servers and trainer, no evaluation.
    assert {span.process for span in spans} == {"generation-0", "trainer-0", "publisher-0", "rewards-0"}
    assert [span.step for span in spans if span.kind == "train"] == list(range(1, STEPS + 1))
    with closing(Outbox(run.outbox, "r")) as outbox:
        curves = outbox.history()
    assert [step for step, _ in curves["throughput/effective_tokens_per_s"]] == list(range(1, STEPS + 1))
    assert "heldout/accuracy" not in curves
    assert not list(run.logs.glob("evaluator*"))
    assert [json.loads((run.weights / f"v{STEPS:06d}" / "manifest.json").read_text())["version"]] == [STEPS]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"training": {"engine": "torch"}}, "training.engine: must be emulated with generation.engine=emulated, got "),
        ({"generation": {"engine": "embedded"}}, "training.engine: must be torch or deepspeed with generation.engine="),
        ({"launch": {"devices": 1}}, "launch.devices: must be at least 2 where accelerators are emulated (1 generate "),
        ({"stop": {"score": 0.0}}, "stop.score: must be null where accelerators are emulated "),
        ({"emulation": {"model": "qwen-32b"}}, "emulation.tensor_parallel: qwen-32b does not fit into 1 x h800"),
    ],
)
def test_settings_that_can_not_be_emulated_are_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        execute(emulated(tmp_path, **fields), run_id="r", log=print)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
