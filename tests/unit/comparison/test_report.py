"""The report says what was compared, what failed, what differs and how sure that is."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from flows.comparison.design import Trial, plan_trials
from flows.comparison.report import EMULATED, metrics, report_page, result_table, result_title
from flows.comparison.trials import TrialResult
from tests.support.comparison import failed, made_up

_ARMS = {"sync": ["mode=sync"], "async-1": ["mode=async", "rollout.max_staleness=1"]}


def _trials(seeds: Sequence[int] = (1, 2, 3), *overrides: str) -> list[Trial]:
    return plan_trials("study", "cpu-async", _ARMS, seeds, ["training.steps=10", *overrides])


def _known(trial: Trial, **known: float) -> TrialResult:
    """Throughputs of 100, 200, 400 by seed; the other arm is faster by 1.5, 1.25, 2; the scores straddle."""
    base = {1: 100.0, 2: 200.0, 3: 400.0}[trial.seed]
    factor = 1.0 if trial.arm == "sync" else {1: 1.5, 2: 1.25, 3: 2.0}[trial.seed]
    score = 0.9 if trial.arm == "sync" else {1: 0.89, 2: 0.9, 3: 0.92}[trial.seed]
    return made_up(trial, **{"effective_tokens_per_s": base * factor, "accuracy_after": score, **known})


def _row(page: str, start: str) -> list[str]:
    """Cells of the table of results in the row that starts so."""
    (line,) = [line for line in page.split("## Results")[1].splitlines() if line.startswith(f"| {start} |")]
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_table_holds_medians_intervals_ratios_and_verdicts() -> None:
    page = report_page("study", _ARMS, [_known(trial) for trial in _trials()])
    assert _row(page, "effective tokens/s") == ["200 [100, 400]", "250 [150, 800]; 1.50x [1.25, 2.00] higher"]
    assert _row(page, "final score, held-out accuracy") == [
        "0.900 [0.900, 0.900]",
        "0.900 [0.890, 0.920]; +0.000 [-0.010, +0.020] no difference",
    ]
    assert _row(page, "trainer waits, % of time")[1] == "30.0 [30.0, 30.0]; -30.0 [-30.0, -30.0] lower"
    assert "An interval of 3 values holds the true median with 75 %" in page
    assert "Seeds 1, 2, 3, the same in every arm; 6 trials." in page
    assert "5,120 trajectories a trial" in page
    assert "| sync | mode=sync |  | 2 + 2 | 3 of 3 |" in page
    settings = r"mode=async rollout.max\_staleness=1 | mode, rollout.max\_staleness"
    assert f"| async-1 | {settings} | 2 + 2 | 3 of 3 |" in page
    assert "Failed" not in page
    assert EMULATED not in page


def test_failed_and_resumed_trials_come_first_and_an_arm_speaks_of_fewer_seeds() -> None:
    results = [_known(trial, starts=1 + (trial.run_id == "study.sync.s2")) for trial in _trials()]
    results = [failed(r.trial, "no new_step") if r.trial.run_id == "study.async-1.s3" else r for r in results]
    page = report_page("study", _ARMS, results)
    assert page.index(r"- async-1, seed 3: no new\_step") < page.index("## Results")
    assert page.index("- sync, seed 2: resumed: its times include work done twice") < page.index("## Results")
    fewer = "200 [150, 250] (n=2: 50 %); 1.38x [1.25, 1.50] (n=2: 50 %) higher"
    assert _row(page, "effective tokens/s") == ["200 [100, 400]", fewer]


@pytest.mark.parametrize(
    ("lost", "cells"),
    [
        ({("sync", 1), ("async-1", 2)}, "475 [150, 800] (n=2: 50 %); 2.00x (n=1)"),  # two seeds each, and one pair
        ({("sync", seed) for seed in (1, 2, 3)}, "250 [150, 800]"),
        ({("async-1", seed) for seed in (1, 2, 3)}, "-"),
    ],
)
def test_only_pairs_are_compared(lost: set[tuple[str, int]], cells: str) -> None:
    results = [failed(t, "dead") if (t.arm, t.seed) in lost else _known(t) for t in _trials()]
    assert _row(report_page("study", _ARMS, results), "effective tokens/s")[1] == cells


def test_difference_too_small_to_be_shown_has_no_sign_and_ratio_to_nothing_is_left_out() -> None:
    def cell(row: str, field: str, sync: float, other: float) -> str:
        results = [_known(trial, **{field: sync if trial.arm == "sync" else other}) for trial in _trials()]
        return _row(report_page("study", _ARMS, results), row)[1]

    score = "final score, held-out accuracy"
    assert "+0.000 [+0.000, +0.000]" in cell(score, "accuracy_after", 0.9, 0.8999999)
    assert "-0.100 [-0.100, -0.100] lower" in cell(score, "accuracy_after", 0.9, 0.8)
    assert cell("effective tokens/s", "effective_tokens_per_s", 0.0, 1.0) == "1.00 [1.00, 1.00]"


def test_emulated_accelerators_are_announced_before_anything_else() -> None:
    trials = _trials([1, 2], "generation.engine=emulated", "training.engine=emulated")
    results = [made_up(trial) for trial in trials]
    page = report_page("study", _ARMS, results)
    assert page.index(EMULATED) < page.index("Experiment cpu")
    assert "score" not in page.split("## Results")[1].split("\n\n")[1]
    assert "qwen-1.5b on 2 h800" in page
    assert result_title("study", _ARMS, results).startswith(EMULATED)


def test_headline_has_speed_ratio_score_and_trials_of_every_arm() -> None:
    results = [_known(trial) for trial in _trials()]
    headline = result_table(_ARMS, results)[1]
    assert (headline["arm"], headline["succeeded"]) == ("async-1", "3 of 3")
    assert headline["effective tokens/s"] == "250 [150, 800]; 1.50x [1.25, 2.00] higher"
    assert headline["time to score 0.75, s"] == "8.0 [8.0, 8.0]; 1.00x [1.00, 1.00] no difference"
    assert result_table(_ARMS, results[:2])[1]["effective tokens/s"] == "150; 1.50x"  # one seed gives no verdict
    assert "One seed has no interval and gives no verdict" in result_title("study", _ARMS, results[:2])


def test_metrics_hold_ratios_and_differences_with_their_intervals() -> None:
    found = metrics(_ARMS, [_known(trial) for trial in _trials()])
    speed = "comparison/async-1.effective_tokens_per_s.ratio"
    assert [found[key] for key in (speed, f"{speed}.low", f"{speed}.high")] == [1.5, 1.25, 2.0]
    assert found["comparison/async-1.final_score.difference"] == pytest.approx(0.0)
    assert not any("sync." in key and "async" not in key for key in found)
