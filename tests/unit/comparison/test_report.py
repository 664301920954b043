"""The report says what was compared, what failed, what differs and what does not, and how sure that is."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from flows.comparison.page import html, markdown
from flows.comparison.plan import Arm, Trial, plan
from flows.comparison.report import EMULATED, Report, findings, write_report
from flows.comparison.trials import TrialResult
from tests.support.comparison import failed, made_up

_ARMS = {"sync": ["mode=sync"], "async-1": ["mode=async", "rollout.max_staleness=1"]}
_PICTURES = {"throughput.png", "learning-curves.png", "staleness.png", "timeline.png"}


def _trials(seeds: Sequence[int] = (1, 2, 3)) -> list[Trial]:
    return plan("study", "cpu-async", _ARMS, seeds, ["training.steps=10"])


def _said(results: Sequence[TrialResult]) -> str:
    return markdown("study", findings(_arms(), results))


def _write(folder: Path, results: Sequence[TrialResult]) -> Report:
    return write_report("study", _arms(), results, folder / "report")


def _arms() -> list[Arm]:
    return [Arm(name=name, overrides=tuple(overrides)) for name, overrides in _ARMS.items()]


def _with(result: TrialResult, **fields: float) -> TrialResult:
    assert result.summary is not None
    return dataclasses.replace(result, summary=dataclasses.replace(result.summary, **fields))


def _known(trial: Trial) -> TrialResult:
    """Throughputs of 100, 200, 400 by seed; the other arm is faster by 1.5, 1.25, 2; the scores straddle."""
    base = {1: 100.0, 2: 200.0, 3: 400.0}[trial.seed]
    factor = 1.0 if trial.arm == "sync" else {1: 1.5, 2: 1.25, 3: 2.0}[trial.seed]
    score = 0.9 if trial.arm == "sync" else {1: 0.89, 2: 0.9, 3: 0.92}[trial.seed]
    return _with(made_up(trial), effective_tokens_per_s=base * factor, accuracy_after=score)


def _row(page: str, start: str, section: str) -> list[str]:
    """Cells of the row that starts so, in the table under a heading."""
    lines = page.split(f"## {section}")[1].split("\n## ")[0].splitlines()
    (line,) = [line for line in lines if line.startswith(f"| {start} |")]
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_tables_hold_medians_intervals_ratios_and_verdicts() -> None:
    page = _said([_known(trial) for trial in _trials()])
    assert _row(page, "effective tokens/s", "What was measured") == ["200 [100, 400]", "250 [150, 800]"]
    assert _row(page, "effective tokens/s per device", "What was measured") == ["100 [50, 200]", "125 [75, 400]"]
    against = "Against sync, seed by seed"
    assert _row(page, "effective tokens/s", against) == ["1.50x [1.25, 2.00] higher"]
    assert _row(page, "final score", against) == ["+0.000 [-0.010, +0.020] no difference"]
    assert _row(page, "staleness, max", against) == ["+1.0 [+1.0, +1.0] higher"]
    assert "|  | sync, 3 seeds: 75 % | async-1, 3 seeds: 75 % |" in page
    assert "|  | async-1, 3 pairs: 75 % |" in page
    assert "Intervals of 95 % need 6 seeds or more." in page
    assert "async-1 against sync, 3 pairs: 75 %: effective tokens/s: 1.50x [1.25, 2.00] higher;" in page
    assert "Seeds 1, 2, 3, the same in every arm; 6 trials, taken in turns." in page
    assert "5,120 trajectories a trial" in page
    assert "| sync | mode=sync | 2 | 2 | 3 seeds |" in page
    assert "| async-1 | mode=async rollout.max_staleness=1 | 2 | 2 | 3 seeds |" in page
    assert "Failed trials" not in page
    assert EMULATED not in page


def test_failed_trials_come_first_and_their_arm_speaks_of_fewer_seeds() -> None:
    results = [_known(trial) for trial in _trials()]
    results = [
        failed(r.trial, "no new step for 300 s") if (r.trial.arm, r.trial.seed) == ("async-1", 3) else r
        for r in results
    ]
    page = _said(results)
    assert "1 of 6 trials failed" in page
    assert page.index("- async-1, seed 3: no new step for 300 s") < page.index("## In short")
    assert "|  | sync, 3 seeds: 75 % | async-1, 2 of 3 seeds: 50 % |" in page
    assert "|  | async-1, 2 of 3 pairs: 50 % |" in page
    assert _row(page, "effective tokens/s", "Against sync, seed by seed") == ["1.38x [1.25, 1.50] higher"]
    whole = html("study", findings(_arms(), results))
    assert "<li>async-1, seed 3: no new step for 300 s</li>" in whole
    assert "<th>async-1, 2 of 3 seeds: 50 %</th>" in whole


def test_reference_that_failed_leaves_nothing_to_compare(tmp_path: Path) -> None:
    results = [failed(t, "dead") if t.arm == "sync" else made_up(t) for t in _trials([1])]
    report = _write(tmp_path, results)
    assert "async-1: no seed of it and of sync succeeded, so that there is nothing to compare." in report.markdown
    assert _row(report.markdown, "wall time", "Against sync, seed by seed") == ["-"]
    assert _row(report.markdown, "wall time, s", "What was measured")[0] == "-"
    assert {path.name for path in report.files} >= _PICTURES


def test_nothing_but_failures_is_still_a_report(tmp_path: Path) -> None:
    report = _write(tmp_path, [failed(trial, f"reason {trial.seed}") for trial in _trials([1, 2])])
    assert "4 of 4 trials failed" in report.markdown
    assert report.markdown.count("reason 1") == 2
    assert [path.name for path in report.files] == ["report.md", "report.html"]


def test_a_difference_too_small_to_be_shown_has_no_sign() -> None:
    results = [_with(_known(t), accuracy_after=0.9 if t.arm == "sync" else 0.8999999) for t in _trials()]
    assert _row(_said(results), "final score", "Against sync, seed by seed")[0].startswith("+0.000 [+0.000, +0.000]")


def test_one_seed_gives_no_verdict() -> None:
    page = _said([_known(trial) for trial in _trials([1])])
    assert _row(page, "effective tokens/s", "Against sync, seed by seed") == ["1.50x (one seed)"]
    assert "One seed has no interval and gives no verdict. Intervals of 95 % need 6 seeds or more." in page


def test_values_that_some_trials_lack_are_counted() -> None:
    results = [_known(trial) for trial in _trials()]
    lost = results[0]
    results[0] = dataclasses.replace(lost, curves={**lost.curves, "bubble/trainer_wait": []})
    page = _said(results)
    assert _row(page, "trainer waits, % of time", "What was measured")[0].endswith("] (2 of 3 seeds: 50 %)")
    assert _row(page, "trainer waits", "Against sync, seed by seed")[0].endswith(" lower (2 of 3 pairs: 50 %)")


def test_a_ratio_to_nothing_is_left_out() -> None:
    results = [_with(_known(t), effective_tokens_per_s=0.0) if t.arm == "sync" else _known(t) for t in _trials()]
    page = _said(results)
    assert _row(page, "effective tokens/s", "Against sync, seed by seed") == ["-"]


def test_trials_that_stopped_early_say_so() -> None:
    results = [_with(_known(trial), steps=4 + trial.seed) for trial in _trials()]
    assert "Trained on: 2,560 to 3,584 trajectories a trial." in _said(results)


@pytest.mark.parametrize("name", ["report.md", "report.html"])
def test_emulated_accelerators_are_announced_before_anything_else(tmp_path: Path, name: str) -> None:
    engines = ["generation.engine=emulated", "training.engine=emulated"]
    trials = plan("study", "cpu-async", _ARMS, [1, 2], ["training.steps=10", *engines])
    report = _write(tmp_path, [made_up(trial) for trial in trials])
    page = (tmp_path / "report" / name).read_text()
    assert page.index(EMULATED) < page.index("Experiment cpu")
    assert "final score" not in page
    assert "time to score" not in page
    assert "qwen-1.5b on 2 h800" in page
    assert {path.name for path in report.files} >= _PICTURES - {"learning-curves.png"}
    assert not (tmp_path / "report" / "learning-curves.png").exists()


def test_all_files_are_there_and_the_page_needs_none_of_them(tmp_path: Path) -> None:
    report = _write(tmp_path, [made_up(trial) for trial in _trials()])
    names = {path.name for path in report.files}
    assert names == {"report.md", "report.html", "trace-sync.json", "trace-async-1.json"} | _PICTURES
    assert all(path.stat().st_size for path in report.files)
    assert (tmp_path / "report" / "report.md").read_text() == report.markdown
    for name in _PICTURES:
        assert f"]({name})" in report.markdown
    page = (tmp_path / "report" / "report.html").read_text()
    assert page.count('src="data:image/png;base64,') == len(_PICTURES)
    assert page.count("src=") == len(_PICTURES)
    events = json.loads((tmp_path / "report" / "trace-sync.json").read_text())["traceEvents"]
    runs = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert runs == ["study.sync.s1", "study.sync.s2", "study.sync.s3"]


@pytest.mark.parametrize(
    ("change", "missing"),
    [
        (lambda r: dataclasses.replace(r, spans=[]), "timeline.png"),
        (lambda r: dataclasses.replace(r, staleness={}), "staleness.png"),
    ],
)
def test_what_there_is_nothing_to_draw_for_is_left_out(
    tmp_path: Path, change: Callable[[TrialResult], TrialResult], missing: str
) -> None:
    report = _write(tmp_path, [change(made_up(trial)) for trial in _trials([1])])
    assert _PICTURES - {path.name for path in report.files} == {missing}
    assert missing not in report.markdown


def test_pairs_have_a_coverage_of_their_own() -> None:
    lost = {("sync", 1), ("async-1", 2)}  # two seeds each, and one pair
    results = [failed(t, "dead") if (t.arm, t.seed) in lost else _known(t) for t in _trials()]
    page = _said(results)
    assert "|  | sync, 2 of 3 seeds: 50 % | async-1, 2 of 3 seeds: 50 % |" in page
    assert "|  | async-1, 1 of 3 pairs |" in page
    assert _row(page, "effective tokens/s", "Against sync, seed by seed") == ["2.00x (one seed)"]


def test_arm_that_did_not_reach_the_score_is_not_timed(tmp_path: Path) -> None:
    trials = plan("study", "cpu-async", _ARMS, (1, 2, 3), ["training.steps=10", "stop.score=0.8"])
    times = {"sync": {1: 10.0, 2: 10.0, 3: 10.0}, "async-1": {1: 1.0, 2: 1.0, 3: None}}
    results: list[TrialResult] = []
    for trial in trials:
        result = made_up(trial)
        assert result.summary is not None
        own = dataclasses.replace(result.summary, time_to_score_s=times[trial.arm][trial.seed])
        results.append(dataclasses.replace(result, summary=own))
    page = _write(tmp_path, results).markdown
    cells = _row(page, "time to score 0.8, s", "What was measured")
    assert cells == ["10.0 [10.0, 10.0]", "not reached by 1 of 3"]
    assert _row(page, "time to score 0.8", "Against sync, seed by seed") == ["async-1 not reached by 1 of 3"]
    assert "time to score 0.8: async-1 not reached by 1 of 3" in page


def test_resumed_trials_are_marked() -> None:
    results = [_with(_known(t), starts=2) if t.run_id == "study.async-1.s2" else _known(t) for t in _trials()]
    page = _said(results)
    assert "- async-1, seed 2: resumed: its times include work done twice" in page
    assert page.count("work done twice") == 1
    assert "(2 of 3 seeds: 50 %)" in _row(page, "devices idle, % of time", "What was measured")[1]
    assert "Resumed" not in _said([_known(t) for t in _trials()])


def test_trials_that_ran_later_are_named() -> None:
    results = [
        made_up(t, start_s=1e9 + 100 * (2 * t.seed + (t.arm != "sync")) + (1e4 if t.arm == "async-1" else 0))
        for t in _trials()
    ]
    page = _said(results)
    assert "not all taken in turns: at another time than sync of the same seed ran async-1 (seeds 1, 2, 3)" in page
    assert ", taken in turns" not in page
