"""Learning curves: which points a line has, and what the median of several is."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from flows.comparison.design import plan_trials
from flows.comparison.report import _line, draw_learning_curves, median_line
from tests.support.comparison import failed, made_up

_ARMS = {"sync": ["mode=sync"]} | {f"eta-{n}": [f"rollout.max_staleness={n}"] for n in range(1, 13)}


def test_more_arms_than_colours_and_an_arm_without_a_trial_are_drawn(tmp_path: Path) -> None:
    results = [made_up(trial) for trial in plan_trials("f", "cpu-async", _ARMS, [1, 2], ["training.steps=3"])]
    results = [failed(r.trial, "dead") if r.trial.arm == "eta-1" else r for r in results]
    draw_learning_curves(list(_ARMS), results, 0.5, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_curve_over_time_starts_at_nought_and_leaves_out_points_without_a_place() -> None:
    trial = plan_trials("f", "cpu-async", _ARMS, [1])[0]
    scores = [(0, 0.1), (1, 0.5), (2, float("nan")), (3, 0.9)]
    curves = {"heldout/accuracy": scores, "time/elapsed_s": [(1, 2.5), (2, 4.0)]}
    result = dataclasses.replace(made_up(trial), curves=curves)
    assert _line(result, "heldout/accuracy", None) == {0: (0.0, 0.1), 1: (1.0, 0.5), 3: (3.0, 0.9)}
    assert _line(result, "heldout/accuracy", "time/elapsed_s") == {0: (0.0, 0.1), 1: (2.5, 0.5)}


def test_a_median_ends_with_the_shortest_run() -> None:
    runs = [
        {1: (1.0, 0.1), 2: (2.0, 0.5), 3: (3.0, 0.9)},
        {1: (2.0, 0.3), 2: (6.0, 0.4)},
        {2: (3.0, 0.0), 5: (9.0, 1.0)},
    ]
    assert median_line(runs) == [(1.5, 0.2), (3.0, 0.4)]
