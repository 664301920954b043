from __future__ import annotations

import dataclasses

import pytest

from areal_core.run.progress import RunProgress, conclude, describe
from areal_core.types import RunStatus, RunSummary, TokenLedger

STATUS = RunStatus(
    step=7, steps=35, version=6, reward=0.4125, accuracy=None, staleness=0.834, effective_tokens_per_s=12345.0,
    generated_tokens_per_s=None, elapsed_s=20.0, eta_s=62.4, finished=None, truncated=0.254, zero_variance=1.0,
)  # fmt: skip
LINE = (
    "step 7/35  reward 0.412  accuracy -  staleness 0.83  truncated 25%  zero-variance 100%  12.3k tokens/s  1:02 left"
)


def test_describe() -> None:
    assert describe(STATUS) == LINE
    assert describe(dataclasses.replace(STATUS, eta_s=3725.0)).endswith("1:02:05 left")
    assert describe(dataclasses.replace(STATUS, finished="score")).endswith("finishing: score")
    assert describe(dataclasses.replace(STATUS, finished="\x1b\n")).endswith(r"finishing: \x1b\n")
    assert "  12.3k emulated tokens/s  " in describe(dataclasses.replace(STATUS, emulated=True))


@pytest.mark.parametrize(
    ("rate", "line", "end"),
    [(0.0, "0", "0"), (0.01234, "0.0123", "0.0123"), (9.996, "10.00", "10.00"), (34.56, "34.6", "34.6"),
     (999.4, "999", "999"), (1234.0, "1.23k", "1,234"), (12_345.0, "12.3k", "12,345"), (2.5e6, "2,500k", "2,500,000")],
)  # fmt: skip
def test_rates_of_every_magnitude_have_three_digits(rate: float, line: str, end: str) -> None:
    assert f"  {line} tokens/s  " in describe(dataclasses.replace(STATUS, effective_tokens_per_s=rate))
    assert f"  tokens/s: {end} trained, " in conclude(dataclasses.replace(SUMMARY, effective_tokens_per_s=rate))


def test_a_line_a_step_and_log_lines_send_nothing_to_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    progress = RunProgress()
    for status in (STATUS, STATUS, dataclasses.replace(STATUS, step=8)):
        progress.update(status)
        progress.log("the verifier [failed]: \x1b]0;owned\x07 \u202e")
    said = r"the verifier [failed]: \x1b]0;owned\x07 \u202e"
    assert capsys.readouterr().err.splitlines() == [LINE, said, said, LINE.replace("7/35", "8/35"), said]


SUMMARY = RunSummary(
    run_id="r", name="n", mode="async", seed=1, reason="score", steps=12, accuracy_before=0.1712,
    accuracy_after=0.8, best_accuracy=0.81, rl_wall_s=61.0, time_to_score_s=50.0, effective_tokens_per_s=20000.4,
    generated_tokens_per_s=21000.0, staleness_mean=0.5, staleness_max=2, model_url="/store/r/final", incarnation=0,
    tokens=TokenLedger(generated=3, consumed=2, dropped=1, buffered=0, in_flight=0),
)  # fmt: skip


def test_conclude() -> None:
    lines = conclude(SUMMARY).splitlines()
    assert lines[0] == "run r finished: 12 steps in 1:01 (stop reason: score)"
    assert lines[1:3] == ["  held-out accuracy 0.171 -> 0.800, best 0.810", "  score reached after 0:50"]
    assert "  truncated completions: -, zero-variance groups: -" in lines
    told = conclude(dataclasses.replace(SUMMARY, bound="Generation limited this run. " * 9)).splitlines()
    assert told[: len(lines)] == lines
    assert max(map(len, told)) <= 120
    stuck = {"truncated": 1.0, "zero_variance": 0.125, "alerts": ("nothing was learnt",), "emulated": "qwen-7b"}
    changed = conclude(dataclasses.replace(SUMMARY, accuracy_before=None, time_to_score_s=None, **stuck))
    assert changed.splitlines()[1:3] == ["  emulated: qwen-7b", "  held-out accuracy - -> 0.800, best 0.810"]
    assert "  truncated completions: 100.0%, zero-variance groups: 12.5%\n  alert: nothing was learnt\n" in changed
    assert "score reached" not in changed
