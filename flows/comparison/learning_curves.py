"""The picture of a comparison: held-out accuracy and reward over steps, wall time and tokens, a colour an arm."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from flows.comparison.measures import succeeded
from flows.comparison.trials import TrialResult

Line = dict[int, tuple[float, float]]  # step -> (x, y)

_CURVES = {"heldout/accuracy": "held-out accuracy", "reward/mean": "mean reward of a batch"}
_POSITIONS = {None: "training step", "time/elapsed_s": "wall time, s", "ledger/consumed_tokens": "tokens trained on"}
_COLOURS = ("#222222", *(f"C{index}" for index in range(10)))  # the reference is the dark one


def draw_learning_curves(arms: Sequence[str], results: Sequence[TrialResult], target: float | None, path: Path) -> None:
    """A thin line a seed, a thick one their median, whose point is the median of the seeds' points of one step, in both
    directions; it ends at the last step that all of them have. `target`, the score that is timed, is dotted."""
    figure = Figure(figsize=(10.0, 6.2), layout="constrained", dpi=140)
    grid: Any = figure.subplots(len(_CURVES), len(_POSITIONS), sharey="row", sharex="col")
    for panels, (key, name) in zip(grid, _CURVES.items(), strict=True):
        panels[0].set_ylabel(name)
        for panel, position in zip(panels, _POSITIONS, strict=True):
            panel.spines[["top", "right"]].set_visible(False)
            panel.grid(color="#dddddd", linewidth=0.6)
            for index, arm in enumerate(arms):
                lines = [_line(result, key, position) for result in succeeded(results, arm)]
                _draw(panel, [line for line in lines if line], _COLOURS[index % len(_COLOURS)], arm)
    if target is not None:
        for panel in grid[0]:
            panel.axhline(target, color="#888888", linestyle=":", label=f"score {target:g}", zorder=1)
    for panel, label in zip(grid[-1], _POSITIONS.values(), strict=True):
        panel.set_xlabel(label)
    grid[-1][0].xaxis.set_major_locator(MaxNLocator(integer=True))
    grid[-1][2].xaxis.set_major_formatter(EngFormatter(sep=""))
    figure.legend(*grid[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=6, frameon=False)
    figure.savefig(path)


def _line(result: TrialResult, key: str, position: str | None) -> Line:
    """A curve over `position`, another one, or over steps. A point whose position is unknown is left out."""
    points = [(step, value) for step, value in result.curves.get(key, []) if math.isfinite(value)]
    if position is None:
        return {step: (float(step), value) for step, value in points}
    places = {0: 0.0, **dict(result.curves.get(position, []))}
    return {step: (places[step], value) for step, value in points if step in places}


def _draw(axes: Axes, lines: Sequence[Line], colour: str, arm: str) -> None:
    if not lines:
        return
    for line in lines:
        axes.plot(*zip(*line.values(), strict=True), color=colour, linewidth=0.8, alpha=0.4)
    axes.plot(*zip(*median_line(lines), strict=True), color=colour, linewidth=2.2, zorder=3, label=arm)


def median_line(lines: Sequence[Line]) -> list[tuple[float, float]]:
    last = min(max(line) for line in lines)
    median: list[tuple[float, float]] = []
    for step in sorted({step for line in lines for step in line if step <= last}):
        xs, ys = zip(*(line[step] for line in lines if step in line), strict=True)
        median.append((statistics.median(xs), statistics.median(ys)))
    return median
