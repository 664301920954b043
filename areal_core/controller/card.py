"""The model card of a run's final model: what it was trained from, with what and how, and its scores."""

from __future__ import annotations

import json

from areal_core.config.fields import leaves
from areal_core.config.schema import RunConfig
from areal_core.types import Evaluation, RunSummary

_SHOWN = ("task.", "environment.", "algorithm.", "rollout.", "training.", "generation.temperature", "warmup.")


def model_card(config: RunConfig, summary: RunSummary, best: Evaluation | None = None) -> str:
    """Markdown, with the head that the Hub reads; of the final version, or of the `best` one."""
    base = config.model.path or "the embedded model, made by a supervised warm-up"
    its, defaults = summary, dict(leaves(RunConfig().to_dict()))
    differing = [
        (name, value) for name, value in leaves(config.to_dict()) if name.startswith(_SHOWN) and value != defaults[name]
    ]
    scores = (
        f"Accuracy on {config.task.held_out:,} held-out prompts at most, one greedy completion each: "
        f"{its.accuracy_before:.3f} before the training, {its.accuracy_after:.3f} after it.\n"
        if its.accuracy_before is not None and its.accuracy_after is not None
        else "Its versions were not scored.\n"
    )
    if best is not None:
        scores += f"\nThis is version {best.version}, its best one: {best.accuracy:.3f}.\n"
    lines = [
        "---",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        "tags: [areal, reinforcement-learning]",
        "---",
        f"# {its.run_id}",
        "",
        f"Trained from {base} by reinforcement learning with AReaL, mode {its.mode}: {its.steps} steps of "
        f"{config.rollout.batch_size} completions of `{_task(config)}`, seed {its.seed}.",
        "",
        "## Scores",
        "",
        scores,
        "## Training",
        "",
        f"{its.tokens.consumed:,} sampled tokens were trained on in {its.rl_wall_s:,.0f} s; they were "
        f"{its.staleness_mean:.2f} policy versions old on average, {its.staleness_max} at most "
        f"(max_staleness {config.max_staleness}).",
        "",
        "Prompts are "
        + ("messages of the chat template in this folder" if config.task.chat.enabled else "fed as they stand")
        + ". Settings that differ from the defaults:",
        "",
        *(f"    {name}={json.dumps(value)}" for name, value in differing),
        "",
    ]
    return "\n".join(lines)


def _task(config: RunConfig) -> str:
    return config.task.path or config.task.dataset or config.task.name
