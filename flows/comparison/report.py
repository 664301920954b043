"""The report of a comparison: tables, what they are worth, pictures, and traces to open.

Failed trials come first and are never left out silently: an arm that has one says over how many seeds it speaks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from areal_core.config.schema import RunConfig
from flows.comparison import cells, figures
from flows.comparison.measures import (
    SCORES,
    Measure,
    common_target,
    effect_of,
    measures,
    pairs,
    resumed,
    succeeded,
    time_scale,
    unreached,
    values_by_seed,
)
from flows.comparison.page import Banner, Block, Heading, Items, Picture, Table, Text, html, markdown
from flows.comparison.plan import Arm
from flows.comparison.statistics import CONFIDENCE, median_interval, values_needed
from flows.comparison.trace import write_trace
from flows.comparison.trials import TrialResult
from flows.comparison.turns import apart

EMULATED = "EMULATED accelerators: times are those of the time model, no model was trained"


@dataclass(frozen=True, kw_only=True)
class Report:
    """What `write_report` wrote."""

    markdown: str
    files: list[Path]  # report.md, report.html, pictures, traces


def write_report(comparison: str, arms: Sequence[Arm], results: Sequence[TrialResult], folder: Path) -> Report:
    """Write the report of a comparison into `folder`, made if absent. The first arm is the reference.

    `results` holds every trial that was planned, failed ones too.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = [arm.name for arm in arms]
    blocks = findings(arms, results)
    pictures = _pictures(names, results, folder)
    traces = _traces(names, results, folder)
    if pictures:
        blocks += [Heading("Pictures"), *pictures]
    if traces:
        files = ", ".join(path.name for path in traces)
        blocks += [Heading("Traces"), Text(f"What every process did when, to open in ui.perfetto.dev: {files}.")]
    page, title = folder / "report.md", f"Comparison {comparison}"
    page.write_text(text := markdown(title, blocks))
    (folder / "report.html").write_text(html(title, blocks))
    return Report(markdown=text, files=[page, folder / "report.html", *(picture.path for picture in pictures), *traces])


def findings(arms: Sequence[Arm], results: Sequence[TrialResult]) -> list[Block]:
    """All that the report says in words and numbers."""
    blocks = [*_header(arms, results), *_failures(results), *_resumed(results)]
    if succeeded(results):
        blocks += _tables([arm.name for arm in arms], results)
    return blocks


# -- what was compared ---------------------------------------------------------------------------------------------


def _header(arms: Sequence[Arm], results: Sequence[TrialResult]) -> list[Block]:
    config = results[0].trial.config
    blocks: list[Block] = [Banner(EMULATED)] if config.emulated else []
    seeds = list(dict.fromkeys(result.trial.seed for result in results))
    turns = _turns(arms[0].name, results)
    facts = [
        f"Experiment {config.name}: {_subject(config)}; devices: {config.launch.devices}.",
        f"Seeds {', '.join(map(str, seeds))}, the same in every arm; {len(results)} trials{turns}.",
        f"Planned: {_planned(config):,} trajectories a trial, in groups of {config.algorithm.group_size}.",
        _consumed(results),
        f"{arms[0].name} is the reference.",
    ]
    table = Table(["arm", "overrides", "servers", "ranks", "trials"], [_arm(arm, results) for arm in arms])
    return [*blocks, Items([fact for fact in facts if fact]), table]


def _arm(arm: Arm, results: Sequence[TrialResult]) -> list[str]:
    config = next(result.trial.config for result in results if result.trial.arm == arm.name)
    processes = (str(config.generation_servers), str(config.training_ranks))
    return [arm.name, " ".join(arm.overrides), *processes, _seeds_of(arm.name, results)]


def _turns(reference: str, results: Sequence[TrialResult]) -> str:
    """How they followed each other, as far as their spans tell."""
    if not any(result.spans for result in results):
        return ""
    late = [f"{arm} (seeds {', '.join(map(str, seeds))})" for arm, seeds in apart(results, reference).items()]
    if not late:
        return ", taken in turns"
    return (
        f", not all taken in turns: at another time than {reference} of the same seed ran {', '.join(late)}, so that "
        "what else the machine did may be part of a difference in speed"
    )


def _subject(config: RunConfig) -> str:
    """What learns what, or what is emulated."""
    model = f"model {config.model.path}" if config.model.path else "the embedded model"
    return config.emulated_cluster or f"{config.task.name}, {model}"


def _planned(config: RunConfig) -> int:
    return config.rollout.batch_size * config.training.steps


def _consumed(results: Sequence[TrialResult]) -> str:
    """What the trials really trained on, which is less than planned where `stop` ended them."""
    counts = [r.summary.steps * r.trial.config.rollout.batch_size for r in results if r.summary]
    if not counts:
        return ""
    if set(counts) == {_planned(results[0].trial.config)}:
        return "Every successful trial trained on all of them."
    return f"Trained on: {min(counts):,} to {max(counts):,} trajectories a trial."


def _seeds_of(arm: str, results: Sequence[TrialResult]) -> str:
    return cells.of(len(succeeded(results, arm)), _planned_seeds(arm, results), "seed")


def _planned_seeds(arm: str, results: Sequence[TrialResult]) -> int:
    return sum(result.trial.arm == arm for result in results)


def _failures(results: Sequence[TrialResult]) -> list[Block]:
    failed = [result for result in results if result.failure is not None]
    if not failed:
        return []
    said = f"{len(failed)} of {len(results)} trials failed; what follows is without them."
    return [
        Heading("Failed trials"),
        Text(said),
        Items([f"{result.trial.arm}, seed {result.trial.seed}: {result.failure}" for result in failed]),
    ]


def _resumed(results: Sequence[TrialResult]) -> list[Block]:
    trials = [result.trial for result in results if resumed(result)]
    if not trials:
        return []
    said = [f"{trial.arm}, seed {trial.seed}: resumed: its times include work done twice" for trial in trials]
    return [Heading("Resumed trials"), Items(said)]


# -- tables --------------------------------------------------------------------------------------------------------


def _tables(arms: list[str], results: Sequence[TrialResult]) -> list[Block]:
    reference, *others = arms
    target = common_target(results)
    rows = measures(results[0].trial.config, target)
    header = [f"{arm}, {_seeds_of(arm, results)}{_covered(len(succeeded(results, arm)))}" for arm in arms]
    measured = [[row.label, *(cells.measured(row, results, arm) for arm in arms)] for row in rows]
    compared = [[row.name, *(cells.compared(row, results, arm, reference) for arm in others)] for row in rows]
    paired = [f"{arm}, {_pairs_of(arm, reference, results)}" for arm in others]
    return [
        Heading("In short"),
        Items([_in_short(arm, reference, results, rows) for arm in others]),
        Heading("What was measured"),
        Table(["", *header], measured),
        Text(_notes(results, target)),
        Heading(f"Against {reference}, seed by seed"),
        Table(["", *paired], compared),
        Text(_coverage(arms, results)),
    ]


def _in_short(arm: str, reference: str, results: Sequence[TrialResult], rows: list[Measure]) -> str:
    """What most readers came for: speed, and what it cost or not."""
    if not pairs(results, arm, reference):
        return f"{arm}: no seed of it and of {reference} succeeded, so that there is nothing to compare."
    wanted = [row for row in rows if row.name in ("effective tokens/s", "final score") or row.is_time]
    said = "; ".join(f"{row.name}: {cells.compared(row, results, arm, reference)}" for row in wanted)
    return f"{arm} against {reference}, {_pairs_of(arm, reference, results)}: {said}."


def _pairs_of(arm: str, reference: str, results: Sequence[TrialResult]) -> str:
    count = len(pairs(results, arm, reference))
    return cells.of(count, _planned_seeds(arm, results), "pair") + _covered(count)


def _covered(n: int) -> str:
    return f": {cells.coverage(n)}" if n > 1 else ""


def _notes(results: Sequence[TrialResult], target: float | None) -> str:
    return (
        f"Each cell: median [interval] over seeds. {_scoring(results[0].trial.config, target)} Wall time runs from the "
        "first server that takes work to the last version. Devices idle: the share of devices times wall time in which "
        "no server and no rank was busy; waiting and being paused for an update are not busy."
    )


def _scoring(config: RunConfig, target: float | None) -> str:
    if config.emulated:
        return "Nothing was learnt: there are no scores. Times and tokens are those of the emulated cluster."
    if not config.evaluated:
        return "Versions were not scored."
    often = f"Versions are scored every {config.evaluation.every} steps"
    if target is None:
        return f"{often}; no score is timed, since there is no common one that training reached in every trial."
    if config.stop.score is not None:
        return f"{often}; the score that is timed is stop.score."
    *most, last = (f"{score:g}" for score in SCORES)
    return f"{often}; {target:g} is the highest of {', '.join(most)} and {last} that every trial reached."


def _coverage(arms: Sequence[str], results: Sequence[TrialResult]) -> str:
    """How far the intervals can be trusted; the probabilities themselves stand at the columns."""
    reference, *others = arms
    counts = [len(succeeded(results, arm)) for arm in arms] + [len(pairs(results, arm, reference)) for arm in others]
    if max(counts) == 1:
        return f"One seed has no interval and gives no verdict. {_advice(1)}"
    return (
        "The percentage at a column, or in a cell that has fewer values, is the probability with which an interval of "
        "so many holds the true median, whatever the distribution; each counts for itself. "
        f"No difference: 1 for ratios, or 0 for differences, lies in the interval. {_advice(min(counts))}"
    )


def _advice(seeds: int) -> str:
    needed = values_needed()
    return f"Intervals of {100 * CONFIDENCE:.0f} % need {needed} seeds or more." if seeds < needed else ""


# -- pictures ------------------------------------------------------------------------------------------------------


def _pictures(arms: list[str], results: Sequence[TrialResult], folder: Path) -> list[Picture]:
    """Every picture that there is something to draw for."""
    done, pictures = succeeded(results), []
    target = common_target(results)

    def picture(name: str, caption: str) -> Path:
        pictures.append(Picture(folder / f"{name}.png", caption))
        return pictures[-1].path

    if not done:
        return []
    caption = "Speed: median, interval and a dot a seed; beside it the ratio to the reference, paired by seed."
    rows = measures(done[0].trial.config, target)
    figures.bars(arms, _bars(arms, results, rows), picture("throughput", caption))
    if not done[0].trial.config.emulated:
        caption = "Learning curves over steps, wall time and tokens: a thin line a seed, the thick one their median."
        figures.learning_curves(arms, results, target, picture("learning-curves", caption))
    if any(result.staleness for result in done):
        caption = "How stale the tokens were that a step trained on: bars over all seeds, a dot a seed."
        figures.staleness_shares(arms, results, picture("staleness", caption))
    if figures.drawable(done):
        caption = "What every process did: the same length of time of every arm, from the middle of its run."
        figures.timelines(arms, results, picture("timeline", caption))
    return pictures


def _bars(arms: list[str], results: Sequence[TrialResult], rows: list[Measure]) -> list[figures.Bars]:
    return [_panel(row, arms, results) for row in (rows[0], *[row for row in rows if row.is_time][-1:])]


def _panel(row: Measure, arms: list[str], results: Sequence[TrialResult]) -> figures.Bars:
    values: Mapping[str, Mapping[int, float]] = {
        arm: {} if unreached(row, results, arm) else values_by_seed(row, results, arm) for arm in arms
    }
    labels = {arm: _beside_bar(row, results, arm, arms[0]) for arm in arms if values[arm]}
    return figures.Bars(
        title=row.label,
        values=values,
        intervals={arm: median_interval(seeds.values()) for arm, seeds in values.items() if seeds},
        labels={arm: cells.measured(row, results, arm) for arm in arms} | labels,
    )


def _beside_bar(row: Measure, results: Sequence[TrialResult], arm: str, reference: str) -> str:
    if arm == reference:
        return "reference"
    effect = effect_of(row, results, arm, reference)
    return cells.effect_text(row, effect) if effect else ""


def _traces(arms: list[str], results: Sequence[TrialResult], folder: Path) -> list[Path]:
    """A trace an arm, of all its trials, failed ones too."""
    paths: list[Path] = []
    for arm in arms:
        runs = {r.trial.run_id: r.spans for r in results if r.trial.arm == arm and r.spans}
        if runs:
            paths.append(folder / f"trace-{arm}.json")
            write_trace(runs, paths[-1], time_scale=time_scale(results[0].trial.config))
    return paths
