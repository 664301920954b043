"""The GPU benchmark without a GPU: what it trains on, what it makes of it, and that it says what it needs."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_training import MODELS, long_tailed, report
from tests.support.training import SPEC

ROOT = Path(__file__).parents[3]


def test_shapes_are_those_of_the_models() -> None:
    assert {name: round(spec.parameters / 1e6) for name, spec in MODELS.items()} == {"0.5b": 494, "1.5b": 1544}


def test_lengths_are_long_tailed() -> None:
    batch = long_tailed(131072, 1000, 8192)
    completions = (batch.lengths - batch.prompt_lengths).tolist()
    assert 131072 <= batch.lengths.sum() < 131072 + 8192
    assert batch.lengths.max() <= 8192
    assert max(completions) > 3 * sorted(completions)[len(completions) // 2]
    assert batch.has_gradient.all()
    assert batch.loss_mask.sum() == sum(completions)
    assert len(batch.later) > 131072 // 8192 - 1


def test_a_report_of_a_small_model_on_a_core() -> None:
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_ends_with_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_training"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    assert done.stderr == "areal: error: this benchmark needs a CUDA device, and torch sees none\n"
    assert not done.stdout


def test_benchmarks_that_need_a_gpu_run_when_they_are_asked_for() -> None:
    def planned(*arguments: str) -> str:
        command = ["make", "--dry-run", "--old-file=.venv/.complete", "bench", *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60).stdout

    assert "gpu_training" not in planned()
    assert "sync_vs_async" in planned()
    assert "for name in gpu_training;" in planned("NAME=gpu_training")
