"""The GPU benchmark, on a small model and a core."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from benchmarks.gpu_training import report
from tests.support.training import SPEC


def test_report_has_speed_of_both_arms() -> None:
    spec = dataclasses.replace(SPEC, vocab_size=64, context=1024)
    result = report({"small": spec}, 1500, 700, 1, torch.device("cpu"))
    assert result["tokens"] >= 1500
    plain, checkpointed = result["small"]["plain"], result["small"]["checkpointed"]
    assert plain["grad_norm"] == checkpointed["grad_norm"] > 0
    for arm in (plain, checkpointed):
        assert len(arm["train_s"]) == len(arm["proximal_s"]) == 2
        assert 0 < arm["mfu"] < 1
        assert arm["train_tokens_per_s"] == pytest.approx(result["tokens"] / arm["train_s"][1], rel=0.02)
        assert arm["tokens_per_s"] < arm["train_tokens_per_s"]
