"""Made-up trials of a comparison: what runs leave behind, without the runs."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from areal_core.tracking.timeline import Span
from areal_core.types import RunSummary, TokenLedger
from flows.comparison.plan import Trial
from flows.comparison.trials import TrialResult

_TOKENS = 16_000  # a step


def made_up(trial: Trial, *, step_s: float = 1.0, learns: float = 6.0, start_s: float = 1e9) -> TrialResult:
    """A trial of steps of about `step_s` seconds, whose held-out accuracy rises within about `learns` steps."""
    config, rng = trial.config, random.Random(trial.run_id)
    spans, ends = _spans(trial, step_s, start_s, rng)
    steps = range(1, config.training.steps + 1)
    elapsed = [end - start_s for end in ends]
    scored = [step for step in (0, *steps) if step % config.evaluation.every == 0 or step == steps[-1]]
    accuracy = {step: 0.16 + 0.81 * (1 - math.exp(-step / learns)) + rng.gauss(0, 0.004) for step in scored}
    lag = config.max_staleness
    curves = {
        "time/elapsed_s": list(zip(steps, elapsed, strict=True)),
        "time/step_s": [(k, b - a) for k, a, b in zip(steps, [0.0, *elapsed], elapsed, strict=False)],
        "ledger/consumed_tokens": [(step, float(step * _TOKENS)) for step in steps],
        "heldout/accuracy": [] if config.emulated else list(accuracy.items()),
        "reward/mean": [(k, 0.2 + 0.75 * (1 - math.exp(-k / learns)) + rng.gauss(0, 0.02)) for k in steps],
        "bubble/trainer_wait": [(step, (0.6 if lag == 0 else 0.3 / lag) + rng.gauss(0, 0.01)) for step in steps],
        "bubble/generation_idle": [(step, 0.45 if lag == 0 else 0.05) for step in steps[1:]],
        "bubble/generation_paused": [(step, 0.0 if lag == 0 else 0.02) for step in steps[1:]],
    }
    total = _TOKENS * steps[-1]
    staleness = {k: round(total * share) for k, share in enumerate(_shares(lag, rng))}
    summary = RunSummary(
        run_id=trial.run_id,
        name=config.label,
        mode=config.mode,
        seed=trial.seed,
        reason="steps",
        steps=steps[-1],
        accuracy_before=None if config.emulated else accuracy[0],
        accuracy_after=None if config.emulated else accuracy[steps[-1]],
        best_accuracy=None if config.emulated else max(accuracy.values()),
        rl_wall_s=elapsed[-1],
        time_to_score_s=None,
        tokens=TokenLedger(generated=total, consumed=total, dropped=0, buffered=0, in_flight=0),
        effective_tokens_per_s=config.token_rate * total / elapsed[-1],
        generated_tokens_per_s=config.token_rate * 1.02 * total / elapsed[-1],
        staleness_mean=sum(k * tokens for k, tokens in staleness.items()) / sum(staleness.values()),
        staleness_max=max(staleness),
        model_url="final",
        epochs=0,
        emulated=config.emulated_cluster,
        staleness_tokens={str(k): tokens for k, tokens in staleness.items()},
    )
    return TrialResult(trial=trial, summary=summary, failure=None, curves=curves, staleness=staleness, spans=spans)


def failed(trial: Trial, reason: str) -> TrialResult:
    return TrialResult(trial=trial, summary=None, failure=reason, curves={}, staleness={}, spans=[])


def _shares(lag: int, rng: random.Random) -> Sequence[float]:
    weights = [math.exp(-((k - 0.8 * lag) ** 2) / 2) * rng.uniform(0.9, 1.1) for k in range(lag + 1)]
    return [weight / sum(weights) for weight in weights]


def _spans(trial: Trial, step_s: float, start_s: float, rng: random.Random) -> tuple[list[Span], list[float]]:
    """Spans of all processes, and when each version was published."""
    config = trial.config
    servers = [f"generation-{i}" for i in range(config.generation_servers)]
    ranks = [f"trainer-{i}" for i in range(config.trainer_processes)]
    spans: list[Span] = []
    ends: list[float] = []

    def add(process: str, kind: str, start: float, share: float, step: int | None = None) -> float:
        end = start + share * step_s * (1.0 + rng.gauss(0, 0.05))
        spans.append(Span(process=process, kind=kind, start_s=start, end_s=end, step=step))
        return end

    now = start_s
    for step in range(1, config.training.steps + 1):
        began = now
        if config.mode == "sync":
            now = max(add(server, "generate", now, 0.55 + 0.1 * i) for i, server in enumerate(servers))
        else:
            now = add(ranks[0], "wait", now, 0.08, step)
        for rank in ranks:
            middle = add(rank, "recompute", now, 0.1, step)
            done = add(rank, "train", middle, 0.7 if config.mode == "async" else 0.22, step)
        now = add(ranks[0], "publish", done, 0.03, step)
        ends.append(now)
        for server in servers:
            if config.mode == "async":
                spans.append(Span(process=server, kind="generate", start_s=began, end_s=now - 0.05 * step_s))
                spans.append(Span(process=server, kind="update", start_s=now - 0.05 * step_s, end_s=now))
            else:
                begun = max(s.end_s for s in spans if s.process == server and s.kind == "generate")
                spans.append(Span(process=server, kind="wait", start_s=begun, end_s=now))
        if config.mode == "sync":
            for rank in ranks:
                begun = min(s.start_s for s in spans if s.process == rank and s.step == step)
                spans.append(Span(process=rank, kind="wait", start_s=began, end_s=begun, step=step))
        if step % config.training.checkpoint_every == 0:
            now = add(ranks[0], "checkpoint", now, 0.1, step)
        if step % config.evaluation.every == 0:
            add("evaluator-0", "evaluate", now, 1.4, step)
    return sorted(spans, key=lambda span: span.start_s), ends
