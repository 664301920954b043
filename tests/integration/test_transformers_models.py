"""A model that this package's own passes lack, through a run: vLLM samples, transformers' module is trained."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from areal_core.run.launcher import execute, run_folder
from areal_core.tracking.outbox import Outbox
from tests.support.live_servers import VLLM_PYTHON, require_vllm
from tests.support.runs import tiny
from tests.support.transformers_models import write_transformers_model


@pytest.mark.vllm
@pytest.mark.cpu_seconds(180)
def test_a_gemma_2_model_is_trained_and_what_samples_it_agrees(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    base = write_transformers_model(tmp_path / "base", "gemma2")
    require_vllm()
    vllm = {"python": str(VLLM_PYTHON), "dtype": "float32"}
    config = tiny(
        tmp_path,
        warm=False,
        model={"path": str(base)},
        environment={"verifier": "tests.support.verifiers:ends"},
        generation={"engine": "vllm", "servers": 1, "slots": 32, "vllm": vllm},
        evaluation={"engine": "vllm", "slots": 32},
        algorithm={"kl_coef": 0.01},
        launch={"start_timeout_s": 300.0},
    )
    summary = execute(config, run_id="r", log=print)  # raises where tokens are not in balance
    assert summary.steps == 4
    run = run_folder(config, "r")
    with contextlib.closing(Outbox(run.outbox, "r")) as outbox:
        curves = outbox.history()
    assert {step for step, _ in curves["heldout/accuracy"]} >= {0, 4}
    train_inference_kl = [value for _, value in curves["policy/train_inference_kl"]]
    assert train_inference_kl
    assert max(train_inference_kl) < 1e-6  # nats a token, between vLLM and transformers on the same weights
    final = run.root / "final"
    model, report = AutoModelForCausalLM.from_pretrained(final, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert type(model).__name__ == "Gemma2ForCausalLM"
    before, after = (load_file(folder / "model.safetensors") for folder in (base, final))
    assert before.keys() == after.keys()
    assert not any(torch.equal(before[name], after[name]) for name in before)
