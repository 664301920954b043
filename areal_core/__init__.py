"""Asynchronous reinforcement learning of language models: the core, and its Python API.

The names below are the API; everything else may change. See docs/python.md.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from areal_core.algorithm.objectives import ObjectiveFunction as Objective
    from areal_core.config.schema import RunConfig
    from areal_core.controller.recorder import BatchMetrics as Metric
    from areal_core.environments.environment import Environment, Policy
    from areal_core.environments.verdicts import Verdict, Verifier
    from areal_core.library import Report, Results, base_model, compare, evaluate, load, results, train, try_out
    from areal_core.types import Outcome, Rollout, RunSummary
    from areal_core.types import Prompt as Task

# Name -> module and name there. They are imported at first use: processes of a run need few of them.
_API = {
    "load": "areal_core.library:load",
    "train": "areal_core.library:train",
    "base_model": "areal_core.library:base_model",
    "try_out": "areal_core.library:try_out",
    "evaluate": "areal_core.library:evaluate",
    "compare": "areal_core.library:compare",
    "results": "areal_core.library:results",
    "Report": "areal_core.library:Report",
    "Results": "areal_core.library:Results",
    "RunConfig": "areal_core.config.schema:RunConfig",
    "RunSummary": "areal_core.types:RunSummary",
    "Task": "areal_core.types:Prompt",
    "Rollout": "areal_core.types:Rollout",
    "Outcome": "areal_core.types:Outcome",
    "Environment": "areal_core.environments.environment:Environment",
    "Policy": "areal_core.environments.environment:Policy",
    "Verifier": "areal_core.environments.verdicts:Verifier",
    "Verdict": "areal_core.environments.verdicts:Verdict",
    "Objective": "areal_core.algorithm.objectives:ObjectiveFunction",
    "Metric": "areal_core.controller.recorder:BatchMetrics",
}

__all__ = ["Environment", "Metric", "Objective", "Outcome", "Policy", "Report", "Results", "Rollout", "RunConfig"]
__all__ += ["RunSummary", "Task", "Verdict", "Verifier"]
__all__ += ["base_model", "compare", "evaluate", "load", "results", "train", "try_out"]


def __getattr__(name: str) -> Any:
    if name not in _API:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, there = _API[name].partition(":")
    return getattr(import_module(module), there)


def __dir__() -> list[str]:
    return __all__
