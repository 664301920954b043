"""Runs of seconds that learn: were all rewards the same, so would be all weights, and no mistaken one would be seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from areal_core.config.schema import RunConfig
from tests.support.runs import tiny

_GROUPS: dict[str, dict[str, Any]] = {
    "model": {"hidden_size": 32, "layers": 2, "heads": 2, "kv_heads": 2, "intermediate_size": 64},
    "warmup": {"worked_steps": 300, "worked_batch": 32, "direct_steps": 60},
    "task": {"held_out": 32, "max_operations": 2, "max_new_tokens": 96},
    "rollout": {"batch_size": 16},
    "training": {"minibatches": 2, "ranks": 1, "learning_rate": 3e-3},
    "evaluation": {"enabled": False},
}


def learning(state: Path, *, mode: str = "async", **groups: dict[str, Any]) -> RunConfig:
    """A tiny run, with one server and one rank, in whose groups of an eighth some completions are right."""
    merged = {name: _GROUPS.get(name, {}) | groups.get(name, {}) for name in {*_GROUPS, *groups}}
    return tiny(state, mode=mode, warm=True, **merged)
