"""Scores of an evaluation on one benchmark, from its records, and the comparison of two.

A completion without a result, whose verifier timed out or failed, says nothing of the model: it is left out and
counted. One that was cut off, or gives no answer that can be read, is wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from areal_core.errors import ConfigError
from areal_core.evaluation.records import Record, Sample
from areal_core.evaluation.statistics import Difference, Estimate, difference, estimate, majority_at_k, pass_at_k
from areal_core.types import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Means over problems. A problem without any result counts in none of them."""

    problems: int
    samples: int  # of a problem, beside the greedy completion
    greedy: Estimate | None  # None: no greedy completion has a result
    pass_at: Mapping[int, Estimate]  # by k: 1, 2, 4, ...; of problems with so many results
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
            **({"greedy": self.greedy} if self.greedy else {}),
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
            *([("greedy", _shown(self.greedy))] if self.greedy else []),
            *((f"pass@{k}, {self.samples} samples", _shown(value)) for k, value in self.pass_at.items()),
            *((f"maj@{k}, {self.samples} samples", _shown(value)) for k, value in self.majority_at.items()),
            ("completions", f"{found}; {self.truncated} cut off; {self.mean_tokens:,.0f} tokens on average"),
        ]


def scored(records: Sequence[Record]) -> Scores:
    """The scores of at least one record, all of which have as many samples."""
    samples = len(records[0].samples)
    everything = [sample for record in records for sample in (record.greedy, *record.samples)]
    results = [[sample for sample in record.samples if sample.score is not None] for record in records]
    greedy = np.array([float(record.greedy.right) for record in records if record.greedy.score is not None])
    powers = [2**exponent for exponent in range(samples.bit_length())]  # 1, 2, 4, ... up to the samples
    return Scores(
        problems=len(records),
        samples=samples,
        greedy=estimate(greedy) if len(greedy) else None,
        pass_at={k: value for k in powers if (value := _pass_at(results, k))},
        majority_at={k: value for k in powers if k > 2 and (value := _majority_at(results, k))},
        outcomes={
            outcome: count
            for outcome in Outcome
            if (count := Counter(sample.outcome for sample in everything)[outcome])
        },
        truncated=sum(sample.truncated for sample in everything),
        mean_tokens=sum(sample.tokens for sample in everything) / len(everything),
    )


def compared(records: Sequence[Record], reference: Sequence[Record]) -> dict[str, Difference]:
    """What one model scores above another on the same problems: `greedy`, and `pass_at_1` where both were sampled. Of
    problems with a result on both sides. Raises ConfigError for records of other problems."""
    if [record.prompt_id for record in records] != [record.prompt_id for record in reference]:
        raise ConfigError("benchmarks: two models are compared on the same problems, these are others")
    pairs = list(zip(records, reference, strict=True))
    greedy = [(one.greedy, other.greedy) for one, other in pairs]
    judged = [(one, other) for one, other in greedy if one.score is not None and other.score is not None]
    found: dict[str, Difference] = {}
    if judged:
        found["greedy"] = difference(*(np.array([float(pair[side].right) for pair in judged]) for side in (0, 1)))
    shares = [(_share(one.samples), _share(other.samples)) for one, other in pairs]
    both = [pair for pair in shares if None not in pair]
    if both:
        found["pass_at_1"] = difference(*(np.array([pair[side] for pair in both], np.float64) for side in (0, 1)))
    return found


def rates(records: Sequence[Record]) -> dict[str, float]:
    """The share of a problem's completions that are right, by the hash of its text; of samples where there are some."""
    found = {record.prompt_id: _share(record.samples or (record.greedy,)) for record in records}
    return {prompt_id: rate for prompt_id, rate in found.items() if rate is not None}


def agreement(records: Sequence[Record], reference: Sequence[Record]) -> float:
    """The share of problems whose greedy completions have the same verdict; both are of the same problems."""
    return sum(one.greedy.outcome == other.greedy.outcome for one, other in zip(records, reference, strict=True)) / len(
        records
    )


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
        "samples right": sum(sample.right for sample in record.samples),
    }


def _pass_at(results: Sequence[Sequence[Sample]], k: int) -> Estimate | None:
    enough = [samples for samples in results if len(samples) >= k]
    if not enough:
        return None
    correct = np.array([sum(sample.right for sample in samples) for samples in enough])
    return estimate(pass_at_k(correct, np.array([len(samples) for samples in enough]), k))


def _majority_at(results: Sequence[Sequence[Sample]], k: int) -> Estimate | None:
    """Answers vote together that were read as the same text."""
    enough = [samples for samples in results if len(samples) >= k]
    if not enough or not any(sample.answer for samples in enough for sample in samples):
        return None
    return estimate(
        np.array(
            [
                majority_at_k([s.answer for s in samples], {s.answer for s in samples if s.right and s.answer}, k)
                for samples in enough
            ]
        )
    )


def _share(samples: Sequence[Sample]) -> float | None:
    judged = [sample.right for sample in samples if sample.score is not None]
    return sum(judged) / len(judged) if judged else None


def _shown(value: Estimate) -> str:
    return f"{value.value:.3f} [{value.low:.3f}, {value.high:.3f}]"
