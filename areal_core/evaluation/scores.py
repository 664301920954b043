"""Scores of an evaluation on one benchmark, from its records, and the comparison of two.

Every completion counts: one that was cut off, gives no answer that can be read, or has no result, is wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from areal_core.errors import ConfigError
from areal_core.evaluation.records import Record, Sample
from areal_core.evaluation.statistics import Difference, Estimate, difference, estimate, majority_at_k, pass_at_k
from areal_core.types import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Means over problems."""

    problems: int
    samples: int  # of a problem, beside the greedy completion
    greedy: Estimate
    pass_at: Mapping[int, Estimate]  # by k: 1, 2, 4, ...
    majority_at: Mapping[int, Estimate]  # by k > 2
    outcomes: Mapping[Outcome, int]  # of all completions
    truncated: int  # completions that ran into the length limit, of all
    mean_tokens: float  # of all completions

    @property
    def completions(self) -> int:
        return sum(self.outcomes.values())

    def metrics(self) -> dict[str, float]:
        """Names and values, for curves."""
        estimates = {
            "greedy": self.greedy,
            **{f"pass_at_{k}": value for k, value in self.pass_at.items()},
            **{f"majority_at_{k}": value for k, value in self.majority_at.items()},
        }
        return {
            **{name: value.value for name, value in estimates.items()},
            **{f"{name}_low": value.low for name, value in estimates.items()},
            **{f"{name}_high": value.high for name, value in estimates.items()},
            **{f"outcome_{outcome}": self.outcomes.get(outcome, 0) / self.completions for outcome in Outcome},
            "truncated": self.truncated / self.completions,
            "mean_tokens": self.mean_tokens,
        }

    def rows(self) -> list[tuple[str, str]]:
        """Names and values, for people."""
        found = ", ".join(f"{count} {outcome.replace('_', ' ')}" for outcome, count in self.outcomes.items())
        return [
            ("problems", f"{self.problems:,}"),
            ("greedy", _shown(self.greedy)),
            *((f"pass@{k}, {self.samples} samples", _shown(value)) for k, value in self.pass_at.items()),
            *((f"maj@{k}, {self.samples} samples", _shown(value)) for k, value in self.majority_at.items()),
            ("completions", f"{found}; {self.truncated} cut off; {self.mean_tokens:,.0f} tokens on average"),
        ]


def scored(records: Sequence[Record]) -> Scores:
    """The scores of at least one record, all of which have as many samples."""
    samples = len(records[0].samples)
    everything = [sample for record in records for sample in (record.greedy, *record.samples)]
    outcomes = Counter(sample.outcome for sample in everything)
    powers = [2**exponent for exponent in range(samples.bit_length())]  # 1, 2, 4, ... up to the samples
    return Scores(
        problems=len(records),
        samples=samples,
        greedy=estimate(_right(records)),
        pass_at={k: _pass_at(records, k) for k in powers},
        majority_at={k: value for k in powers if k > 2 and (value := _majority_at(records, k))},
        outcomes={outcome: outcomes[outcome] for outcome in Outcome if outcomes[outcome]},
        truncated=sum(sample.truncated for sample in everything),
        mean_tokens=sum(sample.tokens for sample in everything) / len(everything),
    )


def compared(records: Sequence[Record], reference: Sequence[Record]) -> dict[str, Difference]:
    """What one model scores above another on the same problems: `greedy`, and `pass_at_1` where both were sampled.
    Raises ConfigError for records of other problems."""
    if [record.prompt_id for record in records] != [record.prompt_id for record in reference]:
        raise ConfigError("benchmarks: two models are compared on the same problems, these are others")
    found = {"greedy": difference(_right(records), _right(reference))}
    if all(record.samples for record in (*records, *reference)):
        ours, theirs = (np.array([_share(record.samples) for record in each]) for each in (records, reference))
        found["pass_at_1"] = difference(ours, theirs)
    return found


def rates(records: Sequence[Record]) -> dict[str, float]:
    """The share of a problem's completions that are right, by the hash of its text; of samples where there are some."""
    return {record.prompt_id: _share(record.samples or (record.greedy,)) for record in records}


def agreement(records: Sequence[Record], reference: Sequence[Record]) -> float:
    """The share of problems whose greedy completions have the same verdict; both are of the same problems."""
    same = [one.greedy.outcome == other.greedy.outcome for one, other in zip(records, reference, strict=True)]
    return sum(same) / len(same)


def problem_row(record: Record) -> dict[str, Any]:
    """A problem as a row of a table for people."""
    return {
        "problem": record.problem,
        "prompt": record.prompt,
        "gold": record.gold,
        "greedy": record.greedy.text,
        "verdict": record.greedy.outcome,
        "answer": record.greedy.answer,
        "tokens": record.greedy.tokens,
        "cut off": record.greedy.truncated,
        "samples": len(record.samples),
        "samples correct": sum(sample.correct for sample in record.samples),
    }


def _right(records: Sequence[Record]) -> NDArray[np.float64]:
    """Of each problem whether its greedy completion is right, 1 or 0."""
    return np.array([float(record.greedy.correct) for record in records])


def _pass_at(records: Sequence[Record], k: int) -> Estimate:
    correct = np.array([sum(sample.correct for sample in record.samples) for record in records])
    return estimate(pass_at_k(correct, np.array([len(record.samples) for record in records]), k))


def _majority_at(records: Sequence[Record], k: int) -> Estimate | None:
    """Answers vote together that were read as the same text; None where no answer was read."""
    if not any(sample.answer for record in records for sample in record.samples):
        return None
    votes = [
        ([s.answer for s in record.samples], {s.answer for s in record.samples if s.correct and s.answer})
        for record in records
    ]
    return estimate(np.array([majority_at_k(answers, right, k) for answers, right in votes]))


def _share(samples: Sequence[Sample]) -> float:
    return sum(sample.correct for sample in samples) / len(samples)


def _shown(value: Estimate) -> str:
    return f"{value.value:.3f} [{value.low:.3f}, {value.high:.3f}]"
