"""Pictures are drawn for whatever there is, at the size that they are looked at; arms keep their colours."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Sequence
from pathlib import Path

import pytest

from flows.comparison import figures
from flows.comparison.figures import Bars
from flows.comparison.plan import Trial, plan
from flows.comparison.statistics import median_interval
from flows.comparison.trials import TrialResult
from tests.support.comparison import failed, made_up


def _arms(count: int) -> dict[str, list[str]]:
    return {"sync": ["mode=sync"]} | {f"eta-{n}": [f"rollout.max_staleness={n}"] for n in range(1, count)}


def _trials(arms: int, seeds: Sequence[int], *overrides: str) -> list[Trial]:
    return plan("f", "cpu-async", _arms(arms), seeds, ["training.steps=10", *overrides])


def _size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", data[16:24])
    return width, height


@pytest.mark.parametrize(("arms", "seeds", "devices"), [(2, [1, 2], 2), (9, [1], 3)])
def test_every_picture_is_drawn(tmp_path: Path, arms: int, seeds: list[int], devices: int) -> None:
    results = [made_up(trial) for trial in _trials(arms, seeds, f"launch.devices={devices}")]
    results[-1] = failed(results[-1].trial, "dead")  # with one seed, an arm without anything
    names = list(_arms(arms))
    figures.learning_curves(names, results, 0.5, tmp_path / "curves.png")
    figures.staleness_shares(names, results, tmp_path / "staleness.png")
    figures.timelines(names, results, tmp_path / "timeline.png")
    values = {arm: {seed: 10.0 * seed for seed in seeds} for arm in names}
    panel = Bars(
        title="speed",
        values={**values, names[-1]: {}},
        intervals={arm: median_interval(values[arm].values()) for arm in names[:-1]},
        labels=dict.fromkeys(names, "x"),
    )
    figures.bars(names, [panel, panel], tmp_path / "bars.png")
    for name in ("curves", "staleness", "timeline", "bars"):
        width, height = _size(tmp_path / f"{name}.png")
        assert width == 1600
        assert 250 < height < 5000


def test_reference_is_dark_and_no_two_arms_look_alike() -> None:
    arms = list(_arms(19))
    styles = [figures._style(arms, arm) for arm in arms]
    assert len(set(styles)) == len(arms)
    assert [style for style in styles if style[0] == "#333333"] == [("#333333", "-")]


def _curve(result: TrialResult, **curves: list[tuple[int, float]]) -> TrialResult:
    return dataclasses.replace(result, curves={name.replace("__", "/"): points for name, points in curves.items()})


def test_a_curve_over_time_starts_at_nought_and_leaves_out_points_without_a_place() -> None:
    trial = _trials(2, [1])[0]
    result = _curve(
        made_up(trial),
        heldout__accuracy=[(0, 0.1), (1, 0.5), (2, float("nan")), (3, 0.9)],
        time__elapsed_s=[(1, 2.5), (2, 4.0)],
    )
    assert figures._line(result, "heldout/accuracy", None) == {0: (0.0, 0.1), 1: (1.0, 0.5), 3: (3.0, 0.9)}
    assert figures._line(result, "heldout/accuracy", "time/elapsed_s") == {0: (0.0, 0.1), 1: (2.5, 0.5)}


def test_timeline_needs_two_versions_and_a_summary() -> None:
    result = made_up(_trials(2, [1])[0])
    published = [span for span in result.spans if span.kind == "publish"]
    assert figures.drawable([result]) == [result]
    assert figures.drawable([dataclasses.replace(result, spans=published[:1])]) == []
    assert figures.drawable([dataclasses.replace(result, summary=None)]) == []
