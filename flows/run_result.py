"""The result of a run, as its flow run shows it."""

from __future__ import annotations

from areal_core.run.progress import number, significant
from areal_core.storage.rundir import RunInfo
from areal_core.tracking.pages import run_page, table_page
from areal_core.types import RunSummary


def result_rows(summary: RunSummary, info: RunInfo, untracked: str | None = None) -> list[dict[str, str]]:
    """Name and value of everything worth knowing at the end; `untracked` is what MLflow has missed."""
    rows = {
        "mode": summary.mode,
        "seed": str(summary.seed),
        "steps": f"{summary.steps} (stop reason: {summary.reason})",
        "held-out accuracy": f"{number(summary.accuracy_before, '.3f')} -> {number(summary.accuracy_after, '.3f')}"
        f" (best {number(summary.best_accuracy, '.3f')})",
        "wall time": f"{summary.rl_wall_s:.1f} s",
        "time to score": number(summary.time_to_score_s, ".1f", " s"),
        "effective throughput": f"{significant(summary.effective_tokens_per_s)} tokens/s",
        "generated throughput": f"{significant(summary.generated_tokens_per_s)} tokens/s",
        "staleness": f"mean {summary.staleness_mean:.2f}, max {summary.staleness_max}",
        "truncated completions": number(summary.truncated, ".1%"),
        "zero-variance groups": number(summary.zero_variance, ".1%"),
        "alerts": "; ".join(summary.alerts) or "-",
        "tokens": str(summary.tokens),
        "bottleneck": summary.bound or "-",
        "model": summary.model_url,
        "checkpoints": info.checkpoint_url,
        "tracking": tracking_page(info) or info.tracking_uri or "off",
    }
    uri, experiment = info.tracking_uri, info.tracking_experiment_id
    if uri and experiment and (table := table_page(uri, experiment)):
        rows["table of runs"] = table
    if summary.emulated is not None:
        rows = {"emulated": summary.emulated, **rows}
    if untracked:
        rows["not yet tracked"] = untracked
    return [{"what": name, "value": value} for name, value in rows.items()]


def result_markdown(run_id: str, rows: list[dict[str, str]]) -> str:
    """The page of a finished run, with the ways to what it left."""
    lines = "\n".join(f"| {row['what']} | {row['value']} |" for row in rows)
    return f"# {run_id}\n\n| | |\n|---|---|\n{lines}\n"


def tracking_page(info: RunInfo) -> str | None:
    """The address of the run's page in MLflow; None without a server to show it."""
    if info.tracking_uri is None or info.tracking_experiment_id is None or info.tracking_run_id is None:
        return None
    return run_page(info.tracking_uri, info.tracking_experiment_id, info.tracking_run_id)
