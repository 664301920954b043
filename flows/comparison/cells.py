"""Numbers of arms as people read them: the cells of the report's tables and of the result's."""

from __future__ import annotations

from collections.abc import Sequence

from flows.comparison.measures import Measure, effect_of, pairs, succeeded, unreached, values_by_seed
from flows.comparison.statistics import Interval, median_interval, verdict
from flows.comparison.trials import TrialResult

NONE = "-"  # a cell without a value


def measured(row: Measure, results: Sequence[TrialResult], arm: str) -> str:
    """Median [low, high]; where not all successful trials have a value, over how many that is."""
    if missed := _unreached(row, results, arm):
        return missed
    values = values_by_seed(row, results, arm)
    if not values:
        return NONE
    text = brackets(median_interval(values.values()), f"z,.{row.digits}f")
    return text + _where_fewer(len(values), len(succeeded(results, arm)), "seed")


def compared(row: Measure, results: Sequence[TrialResult], arm: str, reference: str) -> str:
    """Ratio or difference to the reference arm [low, high], and in words what that says."""
    missed = [(name, text) for name in (arm, reference) if (text := _unreached(row, results, name))]
    if missed:
        return ", ".join(f"{name} {text}" for name, text in missed)
    effect = effect_of(row, results, arm, reference)
    if effect is None:
        return NONE
    words = "(one seed)" if effect.n == 1 else verdict(effect, row.neutral)
    expected = len(pairs(results, arm, reference))
    return f"{effect_text(row, effect)} {words}" + _where_fewer(effect.n, expected, "pair")


def effect_text(row: Measure, effect: Interval) -> str:
    """The ratio or difference [low, high]."""
    return brackets(effect, ".2f", "x") if row.effect == "ratio" else brackets(effect, f"+z.{row.digits}f")


def brackets(interval: Interval, form: str, unit: str = "") -> str:
    """Median [low, high], or the median alone of one value; `form` with a z, so that there is no -0.000."""
    median, low, high = (f"{value:{form}}" for value in (interval.median, interval.low, interval.high))
    return f"{median}{unit}" if interval.n == 1 else f"{median}{unit} [{low}, {high}]"


def coverage(n: int) -> str:
    """The probability with which an interval of n values holds the true median; one value has no interval."""
    return f"{100 * median_interval(range(n)).coverage:.4g} %" if n > 1 else NONE


def of(done: int, planned: int, noun: str) -> str:
    """ "3 seeds", or "2 of 3 seeds" where one is missing."""
    return ("" if done == planned else f"{done} of ") + f"{planned} {noun}{'' if planned == 1 else 's'}"


def _unreached(row: Measure, results: Sequence[TrialResult], arm: str) -> str:
    missed = unreached(row, results, arm)
    return f"not reached by {missed} of {len(succeeded(results, arm))}" if missed else ""


def _where_fewer(n: int, expected: int, noun: str) -> str:
    """The interval of so many values has a coverage of its own."""
    if n == expected:
        return ""
    return f" ({of(n, expected, noun)}{f': {coverage(n)}' if n > 1 else ''})"
