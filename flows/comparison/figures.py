"""The pictures of a comparison. An arm has the same colour in all of them; the reference is the dark one.

Colours are those of Okabe and Ito, which people with any common colour blindness can tell apart. Every picture is ten
inches wide and legible at 1000 pixels.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter, MaxNLocator, PercentFormatter

from areal_core.tracking.timeline import Span
from flows.comparison.measures import in_ring_order, publications, rl_window, succeeded, time_scale
from flows.comparison.statistics import Interval
from flows.comparison.trials import TrialResult

Line = dict[int, tuple[float, float]]  # step -> (x, y)
Dash = Literal["-", "--", ":"]

_WIDTH_IN, _DPI = 10.0, 160
_INK, _FAINT = "#222222", "#dddddd"
_TEXT, _SMALL = 10.0, 8.5  # points
_REFERENCE_COLOUR = "#333333"
_ARM_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
_DASHES: tuple[Dash, ...] = ("-", "--", ":")  # of arms whose colours come again
_KINDS = {  # colour and name in the key, in the order of the ring
    "generate": ("#56b4e9", "generate"),
    "update": ("#cc79a7", "paused for an update"),
    "score": ("#0072b2", "score"),
    "recompute": ("#f0e442", "recompute log-probabilities"),
    "train": ("#d55e00", "train"),
    "publish": ("#222222", "publish"),
    "checkpoint": ("#8c6d46", "checkpoint"),
    "evaluate": ("#009e73", "evaluate"),
    "wait": ("#e6e6e6", "wait"),
}
_ROWS_IN, _ROW_IN = 11.0, (0.17, 0.26)  # of the timeline: height of all processes; of one, at least and at most
_WINDOW_STEPS = 3
_CURVES = {"heldout/accuracy": "held-out accuracy", "reward/mean": "mean reward of a batch"}
_POSITIONS = {None: "training step", "time/elapsed_s": "wall time, s", "ledger/consumed_tokens": "tokens trained on"}


@dataclass(frozen=True, kw_only=True)
class Bars:
    """A panel of bars, one an arm."""

    title: str
    values: Mapping[str, Mapping[int, float]]  # arm -> seed -> value
    intervals: Mapping[str, Interval]  # arm -> of these; an arm without a value is absent
    labels: Mapping[str, str]  # arm -> what stands beside its bar


def learning_curves(arms: Sequence[str], results: Sequence[TrialResult], target: float | None, path: Path) -> None:
    """Held-out accuracy and reward over steps, wall time and tokens: a thin line a seed, a thick one their median.

    A point of the median is the median of the seeds' points of one step, in both directions; it ends at the last step
    that all of them have.
    """
    figure = Figure(figsize=(_WIDTH_IN, 6.2), layout="constrained")
    grid: Any = figure.subplots(len(_CURVES), len(_POSITIONS), sharey="row", sharex="col")
    for panels, (key, name) in zip(grid, _CURVES.items(), strict=True):
        for panel, position in zip(panels, _POSITIONS, strict=True):
            _plain(panel, grid="both")
            for arm in arms:
                lines = [_line(result, key, position) for result in succeeded(results, arm)]
                _draw_lines(panel, [line for line in lines if line], *_style(arms, arm))
        panels[0].set_ylabel(name, fontsize=_TEXT)
    if target is not None:
        for panel in grid[0]:
            panel.axhline(target, color=_INK, linewidth=0.9, linestyle=(0, (2, 2)), zorder=1)
        where = {"xy": (1.0, target), "xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
        grid[0][0].annotate(f"score {target:g}", xytext=(-3, -3), ha="right", va="top", fontsize=_SMALL, **where)
    for panel, label in zip(grid[-1], _POSITIONS.values(), strict=True):
        panel.set_xlabel(label, fontsize=_TEXT)
    grid[-1][0].xaxis.set_major_locator(MaxNLocator(integer=True))
    grid[-1][2].xaxis.set_major_formatter(EngFormatter(sep=""))
    _key_of_arms(figure, arms, results)
    _save(figure, path)


def staleness_shares(arms: Sequence[str], results: Sequence[TrialResult], path: Path) -> None:
    """Share of the tokens trained on by their staleness: a panel an arm, bars over all seeds, a dot a seed."""
    drawn = [arm for arm in arms if any(sum(result.staleness.values()) for result in succeeded(results, arm))]
    columns = min(4, len(drawn))
    rows = math.ceil(len(drawn) / columns)
    figure = Figure(figsize=(_WIDTH_IN, 0.4 + 2.5 * rows), layout="constrained")
    grid: Any = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    panels = list(grid.flat)
    for panel, arm in zip(panels, drawn, strict=False):
        _draw_staleness(panel, arm, [r.staleness for r in succeeded(results, arm)], _style(arms, arm)[0])
    for panel in panels[len(drawn) :]:
        panel.set_visible(False)
    panels[0].yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    panels[0].xaxis.set_major_locator(MaxNLocator(integer=True))
    panels[0].set_ylim(0.0, 1.05)
    figure.supxlabel("staleness of a token, versions", fontsize=_TEXT, color=_INK)
    figure.supylabel("share of tokens", fontsize=_TEXT, color=_INK)
    _save(figure, path)


def bars(arms: Sequence[str], panels: Sequence[Bars], path: Path) -> None:
    """Bars side by side: the median, its interval, a dot a seed, and how the arm compares with the reference."""
    height = 0.75 + 0.5 * len(arms)
    figure = Figure(figsize=(_WIDTH_IN, height), layout="constrained")
    grid: Any = figure.subplots(1, len(panels), sharey=True, squeeze=False)
    for axes, panel in zip(grid[0], panels, strict=True):
        _plain(axes, grid="x")
        axes.set_title(panel.title, fontsize=_TEXT, loc="left", color=_INK)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.xaxis.set_major_locator(MaxNLocator(nbins=5))
        for row, arm in enumerate(arms):
            _draw_bar(axes, row, arm, panel, _style(arms, arm)[0])
        top = max((value for seeds in panel.values.values() for value in seeds.values()), default=1.0)
        axes.set_xlim(0.0, 1.62 * top)  # room for what stands beside the bars
    grid[0][0].set_yticks(range(len(arms)), arms, fontsize=_TEXT)
    grid[0][0].invert_yaxis()
    _save(figure, path)


def timelines(arms: Sequence[str], results: Sequence[TrialResult], path: Path) -> None:
    """What every process did, in a window of the same length for every arm: about three steps of the first arm drawn.

    The window lies around the middle version of the first successful seed's run.
    """
    chosen = {arm: runs[0] for arm in arms if (runs := drawable(succeeded(results, arm)))}
    length_s = _WINDOW_STEPS * _step_s(next(iter(chosen.values())))
    rows = {arm: sorted({s.process for s in run.spans}, key=in_ring_order) for arm, run in chosen.items()}
    row_in = min(max(_ROWS_IN / sum(map(len, rows.values())), _ROW_IN[0]), _ROW_IN[1])
    heights = [len(names) * row_in for names in rows.values()]
    config = next(iter(chosen.values())).trial.config
    figure = Figure(figsize=(_WIDTH_IN, sum(heights) + 0.5 * len(chosen) + 1.0), layout="constrained")
    grid: Any = figure.subplots(len(chosen), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights})
    for axes, (arm, run) in zip(grid[:, 0], chosen.items(), strict=True):
        _draw_timeline(axes, run, rows[arm], length_s)
        axes.set_title(f"{arm}, seed {run.trial.seed}", fontsize=_TEXT, loc="left", color=_INK, fontweight="bold")
        step = f"a step takes {_step_s(run):.3g} s (median of its run)"
        axes.set_title(step, fontsize=_SMALL, loc="right", color=_INK)
    unit = "emulated seconds" if config.emulated else "seconds"
    grid[-1][0].set_xlabel(f"{unit}, from the start of each window", fontsize=_TEXT, color=_INK)
    grid[-1][0].set_xlim(0.0, length_s)
    seen = {span.kind for run in chosen.values() for span in run.spans}
    key: list[Any] = [Patch(color=colour, label=name) for kind, (colour, name) in _KINDS.items() if kind in seen]
    key.append(Line2D([], [], color=_INK, marker="v", linewidth=1.0, markersize=5, label="version published"))
    figure.legend(handles=key, loc="outside upper center", ncols=5, frameon=False, fontsize=_SMALL)
    _save(figure, path)


def drawable(results: Sequence[TrialResult]) -> list[TrialResult]:
    """Those whose timeline holds enough to cut a window from."""
    return [result for result in results if rl_window(result) and len(publications(result.spans)) > 1]


# -- curves --------------------------------------------------------------------------------------------------------


def _line(result: TrialResult, key: str, position: str | None) -> Line:
    """A curve over `position`, another one, or over steps. A point whose position is unknown is left out."""
    points = [(step, value) for step, value in result.curves.get(key, []) if math.isfinite(value)]
    if position is None:
        return {step: (float(step), value) for step, value in points}
    places = {0: 0.0, **dict(result.curves.get(position, []))}
    return {step: (places[step], value) for step, value in points if step in places}


def _draw_lines(axes: Axes, lines: Sequence[Line], colour: str, dash: Dash) -> None:
    for line in lines:
        axes.plot(*zip(*line.values(), strict=True), color=colour, linestyle=dash, linewidth=0.8, alpha=0.4)
    if not lines:
        return
    last = min(max(line) for line in lines)
    median: list[tuple[float, float]] = []
    for step in sorted({step for line in lines for step in line if step <= last}):
        xs, ys = zip(*(line[step] for line in lines if step in line), strict=True)
        median.append((statistics.median(xs), statistics.median(ys)))
    axes.plot(*zip(*median, strict=True), color=colour, linestyle=dash, linewidth=2.2, zorder=3)


# -- bars ----------------------------------------------------------------------------------------------------------


def _draw_staleness(axes: Axes, arm: str, seeds: Sequence[Mapping[int, int]], colour: str) -> None:
    total: Counter[int] = Counter()
    for counts in seeds:
        total.update(counts)
    tokens = total.total()
    _plain(axes, grid="y")
    axes.bar(list(total), [count / tokens for count in total.values()], width=0.75, color=colour, alpha=0.75)
    for counts in seeds if len(seeds) > 1 else ():
        own = sum(counts.values())
        axes.plot(
            list(counts), [count / own for count in counts.values()], "o", color="white", markeredgecolor=_INK, ms=3.5
        )
    mean = sum(versions * count for versions, count in total.items()) / tokens
    axes.set_title(arm, fontsize=_TEXT, loc="left", color=_INK, fontweight="bold")
    axes.set_title(f"mean {mean:.2f}, max {max(total)}", fontsize=_SMALL, loc="right", color=_INK)
    axes.tick_params(labelbottom=True)


def _draw_bar(axes: Axes, row: int, arm: str, panel: Bars, colour: str) -> None:
    interval = panel.intervals.get(arm)
    if interval is None:
        axes.text(0.0, row, f" {panel.labels[arm]}", va="center", fontsize=_SMALL, color=_INK)
        return
    axes.barh(row, interval.median, height=0.62, color=colour, alpha=0.75)
    if interval.n > 1:
        axes.plot([interval.low, interval.high], [row, row], color=_INK, linewidth=1.6, marker="|", markersize=9)
    seeds = list(panel.values[arm].values())
    axes.plot(seeds, [row] * len(seeds), "o", color="white", markeredgecolor=_INK, markersize=4.5, zorder=4)
    offset = {"xytext": (9, 0), "textcoords": "offset points"}
    axes.annotate(panel.labels[arm], (interval.high, row), va="center", fontsize=_SMALL, color=_INK, **offset)


# -- timeline ------------------------------------------------------------------------------------------------------


def _step_s(result: TrialResult) -> float:
    """The median time between two publications."""
    ends = [span.end_s for span in publications(result.spans)]
    return time_scale(result.trial.config) * statistics.median(later - earlier for earlier, later in pairwise(ends))


def _draw_timeline(axes: Axes, result: TrialResult, processes: Sequence[str], length_s: float) -> None:
    window = rl_window(result)
    assert window is not None, "asked for by `drawable`"
    published, scale = publications(result.spans), time_scale(result.trial.config)
    middle, length = published[len(published) // 2].end_s, length_s / scale
    start = max(window[0], min(middle - length / 2, window[1] - length))
    spans = [
        dataclasses.replace(span, start_s=scale * (span.start_s - start), end_s=scale * (span.end_s - start))
        for span in result.spans
        if span.end_s > start and span.start_s < start + length
    ]
    for span in spans:
        _draw_span(axes, span, processes.index(span.process), length_s)
    _draw_publications(axes, spans, length_s)
    _plain(axes, grid=None)
    axes.set_yticks(range(len(processes)), processes, fontsize=_SMALL)
    axes.set_ylim(len(processes) - 0.5, -0.85)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def _draw_publications(axes: Axes, spans: Sequence[Span], length_s: float) -> None:
    """A mark for every version; names only where there is room for them."""
    free_from = 0.0
    for span in publications(spans):
        at = span.end_s
        if at > length_s:
            continue
        axes.axvline(at, color=_INK, linewidth=0.7, alpha=0.6, zorder=4)
        axes.plot(at, -0.66, marker="v", color=_INK, markersize=5, clip_on=False, zorder=5)
        if at >= free_from:
            where = {"xytext": (5, 0), "textcoords": "offset points"}
            axes.annotate(f"v{span.step}", (at, -0.7), va="center", fontsize=_SMALL - 1, color=_INK, **where)
            free_from = at + 0.045 * length_s


def _draw_span(axes: Axes, span: Span, row: int, length_s: float) -> None:
    """A bar; times of the span are from the start of the window."""
    left, right = max(0.0, span.start_s), min(length_s, span.end_s)
    height = 0.45 if span.kind == "wait" else 0.82
    axes.barh(row, right - left, left=left, height=height, color=_KINDS[span.kind][0], linewidth=0)
    if span.kind in ("train", "evaluate") and span.step is not None and right - left > 0.05 * length_s:
        what = f"step {span.step}" if span.role == "trainer" else f"v{span.step}"
        middle = (left + right) / 2
        axes.text(middle, row, what, ha="center", va="center", fontsize=_SMALL - 1.5, color="white", zorder=6)


# -- all -----------------------------------------------------------------------------------------------------------


def _style(arms: Sequence[str], arm: str) -> tuple[str, Dash]:
    """Colour and dash of an arm."""
    index = list(arms).index(arm)
    if index == 0:
        return _REFERENCE_COLOUR, "-"
    turn, position = divmod(index - 1, len(_ARM_COLOURS))
    return _ARM_COLOURS[position], _DASHES[turn % len(_DASHES)]


def _key_of_arms(figure: Figure, arms: Sequence[str], results: Sequence[TrialResult]) -> None:
    lines: list[Line2D] = []
    for arm in arms:
        colour, dash = _style(arms, arm)
        seeds = len(succeeded(results, arm))
        name = f"{arm} ({seeds} seed{'s' if seeds != 1 else ''})"
        lines.append(Line2D([], [], color=colour, linestyle=dash, linewidth=2.2, label=name))
    figure.legend(handles=lines, loc="outside upper center", ncols=min(5, len(arms)), frameon=False, fontsize=_TEXT)


def _plain(axes: Axes, *, grid: Any) -> None:
    """Take away what carries no information."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#888888")
    axes.tick_params(labelsize=_SMALL, color="#888888", labelcolor=_INK)
    axes.set_axisbelow(True)
    if grid is not None:
        axes.grid(axis=grid, color=_FAINT, linewidth=0.6)


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=_DPI, facecolor="white")
