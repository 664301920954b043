"""The report of a comparison: what was compared, what failed, medians with intervals, and the learning curves.

`result_table`, `result_title` and `metrics` are its main figures, for a terminal and for MLflow.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from areal_core.errors import printable
from areal_core.run.progress import decimals
from flows.comparison.design import differences
from flows.comparison.intervals import CONFIDENCE, Interval, coverage, median_interval, verdict
from flows.comparison.measures import Measure, common_target, effect_of, measures, succeeded, unreached, values_by_seed
from flows.comparison.trials import TrialResult

EMULATED = "EMULATED accelerators: times are those of the time model, no model was trained"

Arms = Mapping[str, Sequence[str]]  # name -> overrides; the first is the reference
Results = Sequence[TrialResult]  # of every trial that was planned, failed ones too


def write_report(comparison: str, arms: Arms, results: Results, folder: Path) -> list[Path]:
    """Write report.md and its picture into `folder`, made if absent; returns what was written, report.md first."""
    folder.mkdir(parents=True, exist_ok=True)
    page, picture = folder / "report.md", folder / "learning-curves.png"
    parts = [f"# Comparison {comparison}", *_header(arms, results), *_notes(results)]
    files = [page]
    if any(result.summary for result in results):
        rows = [[row.label, *(cell(row, arms, results, arm) for arm in arms)] for row in measures(results)]
        parts += ["## Results", _table(["", *arms], rows), _legend(arms, results)]
        if not results[0].trial.config.emulated:
            draw_learning_curves(list(arms), results, common_target(results), picture)
            caption = "A thin line is a seed, the thick one their median."
            parts += ["## Learning curves", f"![Learning curves of {', '.join(arms)}]({picture.name})", caption]
            files.append(picture)
    page.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return files


def result_table(arms: Arms, results: Results) -> list[dict[str, str]]:
    """A row an arm: the headline measures, and how many trials they rest on."""
    rows = [row for row in measures(results) if row.headline]
    return [
        {"arm": arm, **{row.label: cell(row, arms, results, arm) for row in rows}, "succeeded": _count(arm, results)}
        for arm in arms
    ]


def result_title(comparison: str, arms: Arms, results: Results) -> str:
    """The title of the table: how to read it."""
    title = f"{EMULATED}\n" if results[0].trial.config.emulated else ""
    return f"{title}Result of {comparison}. {_reading(arms, results)}"


def metrics(arms: Arms, results: Results) -> dict[str, float]:
    """`comparison/<arm>.<measure>.<ratio or difference>` to the reference, the median, with `.low` and `.high` of its
    interval, of the headline measures; without what no pair of trials has.

    The prefix is one for all: MLflow makes a section of charts of each.
    """
    reference, *others = arms
    found: dict[str, float] = {}
    for row in measures(results):
        for arm in others if row.headline else ():
            if effect := effect_of(row, results, arm, reference):
                name = re.sub(r"\W+", "_", row.name.replace("/", " per "))
                key = f"comparison/{arm}.{name}.{row.effect}"
                found |= {key: effect.median, f"{key}.low": effect.low, f"{key}.high": effect.high}
    return found


def cell(row: Measure, arms: Arms, results: Results, arm: str) -> str:
    """Median [interval] of an arm; for another than the reference, also its ratio or difference to that, in numbers and
    in words."""
    reference = next(iter(arms))
    values, trials = values_by_seed(row, results, arm), len(succeeded(results, arm))
    if missed := unreached(row, results, arm):
        return f"not reached by {missed} of {trials}"
    if not values:
        return "-"
    interval = median_interval(values.values())
    digits = decimals(interval.median) if row.digits is None else row.digits
    text = _shown(interval, f"z,.{digits}f", "", results)
    effect = effect_of(row, results, arm, reference) if arm != reference else None
    if effect is None:
        return text
    form, unit = (".2f", "x") if row.effect == "ratio" else (f"+z.{row.digits}f", "")
    words = "" if effect.n == 1 else f" {verdict(effect, row.neutral)}"
    return f"{text}; {_shown(effect, form, unit, results)}{words}"


def _shown(interval: Interval, form: str, unit: str, results: Results) -> str:
    """One value has no interval; `form` with a z, so that there is no -0.000."""
    median, low, high = (f"{value:{form}}" for value in (interval.median, interval.low, interval.high))
    text = f"{median}{unit}" if interval.n == 1 else f"{median}{unit} [{low}, {high}]"
    if interval.n == len(_seeds(results)):
        return text
    return f"{text} (n={interval.n}{f': {100 * interval.coverage:.4g} %' if interval.n > 1 else ''})"


def _header(arms: Arms, results: Results) -> list[str]:
    config, reference = results[0].trial.config, next(iter(arms))
    model = f"model {config.model.path}" if config.model.path else "the embedded model"
    facts = [
        f"Experiment {config.name}: {config.emulated_cluster or f'{config.task.name}, {model}'}; "
        f"devices: {config.launch.devices}.",
        f"Seeds {', '.join(map(str, _seeds(results)))}, the same in every arm; {len(results)} trials.",
        f"Planned: {config.rollout.batch_size * config.training.steps:,} trajectories a trial, in groups of "
        f"{config.algorithm.group_size}.",
        f"{reference} is the reference.",
    ]
    configs = {result.trial.arm: result.trial.config for result in reversed(results)}
    rows = [
        [
            arm,
            " ".join(overrides),
            ", ".join(name for name, _, _ in differences(configs[arm], configs[reference]) if name != "seed"),
            f"{configs[arm].generation_servers} + {configs[arm].training_ranks}",
            _count(arm, results),
        ]
        for arm, overrides in arms.items()
    ]
    header = ["arm", "settings", f"fields that differ from {reference}", "servers + ranks", "succeeded"]
    banner = [f"> **{EMULATED}**"] if config.emulated else []
    return [*banner, _items(facts), _table(header, rows)]


def _notes(results: Results) -> list[str]:
    """Failed and resumed trials, which come before the results."""
    said = [f"{r.trial.arm}, seed {r.trial.seed}: {_escaped(r.failure)}" for r in results if r.failure is not None]
    said += [
        f"{r.trial.arm}, seed {r.trial.seed}: resumed: its times include work done twice"
        for r in results
        if r.summary is not None and r.summary.starts > 1
    ]
    return ["## Failed and resumed trials", "Figures are without those that failed.", _items(said)] if said else []


def _legend(arms: Arms, results: Results) -> str:
    config, target = results[0].trial.config, common_target(results)
    scored = f" Versions are scored every {config.evaluation.every} steps." if config.evaluated else ""
    if config.evaluated and target is None:
        scored += " No score is timed: there is no common one that training reached in every trial."
    return (
        f"{_reading(arms, results)} Not reached: an arm is timed only if every successful trial of it got there. Wall "
        f"time runs from the first server that takes work to the last version.{scored}"
    )


def _reading(arms: Arms, results: Results) -> str:
    """What a cell holds, and the coverage of its interval."""
    seeds, reference = len(_seeds(results)), next(iter(arms))
    what = f"Medians [intervals] over seeds; then the ratio or difference to {reference}, seed by seed."
    if seeds == 1:
        return f"{what} One seed has no interval and gives no verdict; six give intervals of 95 % or more."
    held = f"{100 * median_interval(range(seeds)).coverage:.4g} %"
    advice = "" if coverage(seeds) >= CONFIDENCE else "; 95 % need six seeds"
    return (
        f"{what} An interval of {seeds} values holds the true median with {held}, whatever the distribution{advice}. "
        "No difference: 1 for ratios, or 0 for differences, lies in it."
    )


def _count(arm: str, results: Results) -> str:
    return f"{len(succeeded(results, arm))} of {len(_seeds(results))}"


def _seeds(results: Results) -> list[int]:
    return list(dict.fromkeys(result.trial.seed for result in results))


def _items(items: Iterable[str]) -> str:
    return "\n".join(f"- {item}" for item in items)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *([_escaped(text) for text in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _escaped(text: str | None) -> str:
    """`text` so that Markdown shows it as it is, in one line."""
    return re.sub(r"([\\|*<`_]|\](?=\())", r"\\\1", printable(text or ""))


# ---- the picture ----


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
