"""The result of a run, as its flow run shows it."""

from __future__ import annotations

from areal_core.rundir import RunInfo
from areal_core.types import RunSummary


def result_rows(summary: RunSummary, info: RunInfo, untracked: str | None = None) -> list[dict[str, str]]:
    """Name and value of everything worth knowing at the end; `untracked` is what MLflow has missed."""
    ledger = summary.tokens
    rows = {
        "mode": summary.mode,
        "seed": str(summary.seed),
        "steps": f"{summary.steps} (ended by {summary.reason})",
        "held-out accuracy": f"{summary.accuracy_before:.3f} -> {summary.accuracy_after:.3f}"
        f" (best {summary.best_accuracy:.3f})",
        "wall time": f"{summary.rl_wall_s:.1f} s",
        "time to score": "-" if summary.time_to_score_s is None else f"{summary.time_to_score_s:.1f} s",
        "effective throughput": f"{summary.effective_tokens_per_s:,.0f} tokens/s",
        "generated throughput": f"{summary.generated_tokens_per_s:,.0f} tokens/s",
        "staleness": f"mean {summary.staleness_mean:.2f}, max {summary.staleness_max}",
        "tokens": f"{ledger.generated:,} generated = {ledger.consumed:,} consumed + {ledger.dropped:,} dropped"
        f" + {ledger.buffered:,} buffered + {ledger.in_flight:,} in flight",
        "model": summary.model_url,
        "checkpoints": info.checkpoint_url,
        "tracking": tracking_page(info) or info.tracking_uri or "off",
    }
    if untracked:
        rows["not yet tracked"] = untracked
    return [{"what": name, "value": value} for name, value in rows.items()]


def result_markdown(run_id: str, rows: list[dict[str, str]]) -> str:
    """The page of a finished run, with the ways to what it left."""
    lines = "\n".join(f"| {row['what']} | {row['value']} |" for row in rows)
    return f"# {run_id}\n\n| | |\n|---|---|\n{lines}\n"


def tracking_page(info: RunInfo) -> str | None:
    """The address of the run's page in MLflow; None without a server to show it."""
    if info.tracking_uri is None or not info.tracking_uri.startswith("http"):
        return None
    return f"{info.tracking_uri.rstrip('/')}/#/runs/{info.tracking_run_id}"
