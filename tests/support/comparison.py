"""Made-up trials of a comparison: the results of runs, without the runs."""

from __future__ import annotations

from typing import Any

from areal_core.types import RunSummary, TokenLedger
from flows.comparison.design import Trial
from flows.comparison.trials import TrialResult


def made_up(trial: Trial, **known: Any) -> TrialResult:
    """A trial of steps of one second, whose accuracy rises from 0.2 to 0.9; `known` fields of its summary."""
    config = trial.config
    steps = range(1, config.training.steps + 1)
    scored = {step: 0.2 + 0.7 * step / steps[-1] for step in (0, *steps)}
    summary = {
        "run_id": trial.run_id,
        "name": config.label,
        "mode": config.mode,
        "seed": trial.seed,
        "reason": "steps",
        "steps": steps[-1],
        "accuracy_before": None if config.emulated else scored[0],
        "accuracy_after": None if config.emulated else scored[steps[-1]],
        "best_accuracy": None if config.emulated else scored[steps[-1]],
        "rl_wall_s": float(steps[-1]),
        "time_to_score_s": None,
        "tokens": TokenLedger(generated=9, consumed=9, dropped=0, buffered=0, in_flight=0),
        "effective_tokens_per_s": 100.0,
        "generated_tokens_per_s": 102.0,
        "staleness_mean": float(config.max_staleness),
        "staleness_max": config.max_staleness,
        "model_url": "final",
        "incarnation": 0,
        "emulated": config.emulated_cluster,
    }
    curves = {
        "time/elapsed_s": [(step, float(step)) for step in steps],
        "time/step_s": [(step, 1.0) for step in steps],
        "ledger/consumed_tokens": [(step, 1000.0 * step) for step in steps],
        "heldout/accuracy": [] if config.emulated else list(scored.items()),
        "reward/mean": [(step, scored[step]) for step in steps],
        "bubble/trainer_wait": [(step, 0.6 if config.mode == "sync" else 0.3) for step in steps],
    }
    return TrialResult(trial=trial, summary=RunSummary(**summary | known), failure=None, curves=curves)


def failed(trial: Trial, reason: str) -> TrialResult:
    return TrialResult(trial=trial, summary=None, failure=reason, curves={})
