"""Format the progress of a run: one line per step, and a result of a few lines."""

from __future__ import annotations

import math
import sys
import textwrap

from areal_core.errors import printable, printable_lines
from areal_core.types import RunStatus, RunSummary

_WIDTH = 100  # characters per line of a paragraph


class RunProgress:
    """Prints log lines, and the status of each step, on stderr."""

    def __init__(self) -> None:
        self._step = -1

    def log(self, line: str) -> None:
        print(printable_lines(line), file=sys.stderr, flush=True)

    def update(self, status: RunStatus) -> None:
        if status.step > self._step:
            self.log(describe(status))
            self._step = status.step


def describe(status: RunStatus) -> str:
    """Format a status as one line, with a dash for each value that isn't known yet."""
    parts = (
        f"step {status.step}/{status.steps}",
        f"reward {number(status.reward, '.3f')}",
        f"accuracy {number(status.accuracy, '.3f')}",
        f"staleness {number(status.staleness, '.2f')}",
        f"truncated {number(status.truncated, '.0%')}",
        f"zero-variance {number(status.zero_variance, '.0%')}",
        f"{_rate(status.effective_tokens_per_s)} {'emulated ' if status.emulated else ''}tokens/s",
        f"finishing: {status.finished}" if status.finished else f"{_duration(status.eta_s)} left",
        *(f"alert: {alert.kind}" for alert in status.alerts),
    )
    return printable("  ".join(parts))


def conclude(summary: RunSummary) -> str:
    """Format the result of a run in a few lines."""
    lines = [
        f"run {summary.run_id} finished: {summary.steps} steps in {_duration(summary.rl_wall_s)} "
        f"(stop reason: {summary.reason})",
        f"  held-out accuracy {number(summary.accuracy_before, '.3f')} -> {number(summary.accuracy_after, '.3f')}, "
        f"best {number(summary.best_accuracy, '.3f')}",
        f"  tokens/s: {significant(summary.effective_tokens_per_s)} trained, "
        f"{significant(summary.generated_tokens_per_s)} generated",
        f"  staleness: mean {summary.staleness_mean:.2f}, max {summary.staleness_max}",
        f"  truncated completions: {number(summary.truncated, '.1%')}, zero-variance groups: "
        f"{number(summary.zero_variance, '.1%')}",
        *(f"  alert: {alert}" for alert in summary.alerts),
        f"  model {summary.model_url}",
    ]
    if summary.time_to_score_s is not None:
        lines.insert(2, f"  score reached after {_duration(summary.time_to_score_s)}")
    if summary.emulated is not None:
        lines.insert(1, f"  emulated: {summary.emulated}")
    if summary.bound is not None:
        lines += textwrap.wrap(summary.bound, _WIDTH, initial_indent="  ", subsequent_indent="  ")
    return "\n".join(lines)


def significant(value: float) -> str:
    """Format a number with three significant digits or more: 0.0123, 1.20, 346, 21,904."""
    return f"{value:,.{decimals(value)}f}"


def decimals(value: float) -> int:
    """Number of digits after the point for three significant digits."""
    return max(0, 2 - math.floor(math.log10(abs(value)))) if value else 0


def _rate(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{significant(value / 1000)}k" if value >= 1000 else significant(value)


def number(value: float | None, form: str, unit: str = "") -> str:
    """Format a number, or return a dash for None."""
    return "-" if value is None else f"{value:{form}}{unit}"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
