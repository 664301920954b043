"""Report of a comparison: settings, failed trials, and medians with intervals. MLflow has the curves.

`result_table`, `result_title` and `metrics` are its main numbers, for the terminal and for MLflow.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from areal_core.errors import printable
from areal_core.run.progress import decimals
from flows.comparison.design import differences
from flows.comparison.intervals import CONFIDENCE, Interval, coverage, median_interval, verdict
from flows.comparison.measures import Measure, common_target, effect_of, measures, succeeded, unreached, values_by_seed
from flows.comparison.trials import TrialResult

EMULATED = "EMULATED accelerators: a time model gives all times; no model was trained"

Arms = Mapping[str, Sequence[str]]  # name -> overrides; the first is the reference
Results = Sequence[TrialResult]  # one per planned trial, including failed ones


def report_page(comparison: str, arms: Arms, results: Results) -> str:
    """The report as Markdown."""
    parts = [f"# Comparison {comparison}", *_header(arms, results), *_notes(results)]
    if any(result.summary for result in results):
        rows = [[row.label, *(cell(row, arms, results, arm) for arm in arms)] for row in measures(results)]
        parts += ["## Results", _table(["", *arms], rows), _legend(arms, results)]
    return "\n\n".join(parts) + "\n"


def result_table(arms: Arms, results: Results) -> list[dict[str, str]]:
    """One row per arm: the headline measures, and how many trials succeeded."""
    rows = [row for row in measures(results) if row.headline]
    return [
        {"arm": arm, **{row.label: cell(row, arms, results, arm) for row in rows}, "succeeded": _count(arm, results)}
        for arm in arms
    ]


def trial_table(results: Results) -> list[dict[str, str]]:
    """One row per trial: arm and seed, the headline measures, and whether it succeeded."""
    rows = [row for row in measures(results) if row.headline]
    return [
        {
            "run": f"{arm} seed {result.trial.seed}",
            **{row.label: cell(row, {arm: ()}, [result], arm) for row in rows},
            "succeeded": "no" if result.summary is None else "yes",
        }
        for result in results
        for arm in [result.trial.arm]
    ]


def result_title(comparison: str, arms: Arms, results: Results) -> str:
    """Title of the table; it explains how to read the table."""
    title = f"{EMULATED}\n" if results[0].trial.config.emulated else ""
    return f"{title}Result of {comparison}. {_reading(arms, results)}"


def metrics(arms: Arms, results: Results) -> dict[str, float]:
    """MLflow metrics of the headline measures: the median effect of each arm, and its interval.

    Keys are `comparison/<arm>.<measure>.<ratio or difference>`, with `.low` and `.high` for the interval. Measures
    without a pair of trials are left out. All keys share a prefix, because MLflow makes a section of charts of each
    prefix."""
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
    """Median [interval] of an arm, and its effect relative to the reference, in numbers and in words."""
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
    """Format an interval; a single value has none. `form` contains a z, which avoids -0.000."""
    median, low, high = (f"{value:{form}}" for value in (interval.median, interval.low, interval.high))
    text = f"{median}{unit}" if interval.n == 1 else f"{median}{unit} [{low}, {high}]"
    if interval.n == len(_seeds(results)):
        return text
    return f"{text} (n={interval.n}{f': {100 * interval.coverage:.4g} %' if interval.n > 1 else ''})"


def _header(arms: Arms, results: Results) -> list[str]:
    config, reference = results[0].trial.config, next(iter(arms))
    model = f"model {config.model.path}" if config.model.path else "the embedded model"
    facts = [
        f"Experiment {config.name}: {config.emulated_cluster or f'{config.task_label}, {model}'}; "
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
    """Section on failed and resumed trials, placed before the results."""
    said = [f"{r.trial.arm}, seed {r.trial.seed}: {_escaped(r.failure)}" for r in results if r.failure is not None]
    said += [
        f"{r.trial.arm}, seed {r.trial.seed}: resumed: its times include repeated work"
        for r in results
        if r.summary is not None and r.summary.starts > 1
    ]
    return ["## Failed and resumed trials", "The figures leave failed trials out.", _items(said)] if said else []


def _legend(arms: Arms, results: Results) -> str:
    scored = ""
    if results[0].trial.config.evaluated and common_target(results) is None:
        scored = " Time to score is missing: the trials reached no common score in training."
    return (
        f"{_reading(arms, results)} Not reached: some trial of the arm did not reach the score. "
        f"Wall time runs from the first ready server to the last published version.{scored}"
    )


def _reading(arms: Arms, results: Results) -> str:
    """Explain the content of a cell and the coverage of its interval."""
    seeds, reference = len(_seeds(results)), next(iter(arms))
    what = f"Medians [intervals] over seeds; then the ratio or difference to {reference}, paired by seed."
    if seeds == 1:
        return f"{what} One seed gives no interval and no verdict; six seeds give intervals of at least 95 %."
    held = f"{100 * median_interval(range(seeds)).coverage:.4g} %"
    advice = "" if coverage(seeds) >= CONFIDENCE else "; six seeds give at least 95 %"
    return (
        f"{what} An interval of {seeds} values contains the true median with {held}, for any distribution{advice}. "
        "No difference: the interval contains 1 (ratios) or 0 (differences)."
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
    """`text` as one line, escaped so that Markdown shows it literally."""
    return re.sub(r"([\\|*<`_]|\](?=\())", r"\\\1", printable(text or ""))
