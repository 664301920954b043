"""The result says what came of the run and where everything is."""

import dataclasses

from areal_core.config.schema import RunConfig
from areal_core.storage.rundir import RunInfo
from flows.comparison.design import Trial
from flows.roles import result_markdown, result_rows
from tests.support.comparison import made_up

_INFO = RunInfo(
    run_id="r-1",
    model_path="/model",
    checkpoint_url="s3://bucket/runs/r-1",
    tracking_uri="http://127.0.0.1:5000/",
    tracking_experiment_id="1",
    tracking_run_id="abc",
)
_KNOWN = made_up(
    Trial(arm="a", seed=3, run_id="r-1", config=RunConfig()), reason="score", time_to_score_s=55.0,
    effective_tokens_per_s=21904.4, generated_tokens_per_s=0.01234,
).summary  # fmt: skip


def test_rows_hold_score_cost_and_places() -> None:
    assert _KNOWN is not None
    rows = result_rows(_KNOWN, _INFO)
    pages = "http://127.0.0.1:5000/#/experiments/1/runs"
    expected = {
        "held-out accuracy": "0.200 -> 0.900 (best 0.900)",
        "steps": "25 (stop reason: score)",
        "time to score": "55.0 s",
        "effective throughput": "21,904 tokens/s",
        "generated throughput": "0.0123 tokens/s",
        "checkpoints": "s3://bucket/runs/r-1",
        "tracking": f"{pages}/abc?workflowType=machine_learning",
    }
    values = {row["what"]: row["value"] for row in rows}
    assert values.items() >= expected.items()
    assert values["table of runs"].startswith(f"{pages}?workflowType=machine_learning&")
    page = result_markdown("r-1", rows)
    assert all(f"| {what} | {value} |" in page for what, value in values.items())


def test_absent_figures_are_shown_as_dashes() -> None:
    assert _KNOWN is not None
    emulated = dataclasses.replace(_KNOWN, emulated="qwen-7b on 8 h800", accuracy_after=None, time_to_score_s=None)
    database = dataclasses.replace(_INFO, tracking_uri="sqlite:///x.db")
    rows = result_rows(emulated, database, "7 items")
    assert rows[0] == {"what": "emulated", "value": "qwen-7b on 8 h800"}
    expected = {"held-out accuracy": "0.200 -> - (best 0.900)", "time to score": "-", "tracking": "sqlite:///x.db"}
    assert {row["what"]: row["value"] for row in rows}.items() >= (expected | {"not in MLflow yet": "7 items"}).items()
