"""The result says what came of the run and where everything is."""

import dataclasses

import pytest

from areal_core.storage.rundir import RunInfo
from areal_core.types import RunSummary, TokenLedger
from flows.run_result import result_markdown, result_rows, tracking_page

_INFO = RunInfo(
    run_id="r-1",
    model_path="/model",
    checkpoint_url="s3://bucket/runs/r-1",
    tracking_uri="http://127.0.0.1:5000/",
    tracking_experiment_id="1",
    tracking_run_id="abc",
)
_SUMMARY = RunSummary(
    run_id="r-1",
    name="cpu-async",
    mode="async",
    seed=3,
    reason="score",
    steps=12,
    accuracy_before=0.17,
    accuracy_after=0.77,
    best_accuracy=0.78,
    rl_wall_s=61.25,
    time_to_score_s=55.0,
    tokens=TokenLedger(generated=10, consumed=6, dropped=1, buffered=2, in_flight=1),
    effective_tokens_per_s=21904.4,
    generated_tokens_per_s=23000.0,
    staleness_mean=1.25,
    staleness_max=3,
    model_url="s3://bucket/runs/r-1/final",
    incarnation=0,
)


def _values(summary: RunSummary = _SUMMARY, info: RunInfo = _INFO) -> dict[str, str]:
    return {row["what"]: row["value"] for row in result_rows(summary, info)}


def test_rows_hold_score_cost_and_places() -> None:
    summary = dataclasses.replace(_SUMMARY, bound="Cores did.")
    values = _values(summary)
    assert values["bottleneck"] == "Cores did."
    assert values["held-out accuracy"] == "0.170 -> 0.770 (best 0.780)"
    assert values["steps"] == "12 (stop reason: score)"
    assert values["time to score"] == "55.0 s"
    assert values["tokens"] == "10 generated; ledger: 10 = 6 consumed + 1 dropped + 2 buffered + 1 in flight"
    assert values["model"] == "s3://bucket/runs/r-1/final"
    assert values["checkpoints"] == "s3://bucket/runs/r-1"
    pages = "http://127.0.0.1:5000/#/experiments/1/runs"
    assert values["tracking"] == f"{pages}/abc?workflowType=machine_learning"
    assert values["table of runs"].startswith(f"{pages}?workflowType=machine_learning&")
    assert not {"emulated", "not yet tracked"} & values.keys()
    page = result_markdown("r-1", result_rows(summary, _INFO))
    assert page.startswith("# r-1\n\n| | |\n|---|---|\n")
    assert all(f"| {what} | {value} |" in page for what, value in values.items())


@pytest.mark.parametrize(("rate", "shown"), [(0.01234, "0.0123"), (3.456, "3.46"), (21904.4, "21,904")])
def test_slow_rates_have_three_digits(rate: float, shown: str) -> None:
    summary = dataclasses.replace(_SUMMARY, effective_tokens_per_s=rate, generated_tokens_per_s=rate)
    values = _values(summary)
    assert values["effective throughput"] == values["generated throughput"] == f"{shown} tokens/s"


def test_absent_figures_are_shown_as_dashes() -> None:
    unscored = {"accuracy_before": None, "accuracy_after": None, "best_accuracy": None, "time_to_score_s": None}
    emulated = dataclasses.replace(_SUMMARY, emulated="qwen-7b on 8 h800", **unscored)
    assert result_rows(emulated, _INFO, "7 items")[0] == {"what": "emulated", "value": "qwen-7b on 8 h800"}
    assert {"what": "not yet tracked", "value": "7 items"} in result_rows(emulated, _INFO, "7 items")
    database = dataclasses.replace(_INFO, tracking_uri="sqlite:///x.db")
    values = _values(emulated, database)
    assert (values["time to score"], values["held-out accuracy"]) == ("-", "- -> - (best -)")
    assert (values["bottleneck"], values["tracking"], tracking_page(database)) == ("-", "sqlite:///x.db", None)
    assert _values(info=dataclasses.replace(_INFO, tracking_uri=None))["tracking"] == "off"
