"""Runs train with what users bring: the examples of docs/extending.md as they stand there, an environment by its import
path, and a model that only vLLM and transformers can run."""

import contextlib
import dataclasses
import itertools
import re
import sqlite3
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from areal_core.api.scored_groups import read_group_file
from areal_core.controller.core.ledger import TrajectoryLedger
from areal_core.models.folders import init_weights, write_model
from areal_core.models.tokenizer import Tokenizer
from areal_core.run.launcher import execute, run_folder
from areal_core.tracking.outbox import Outbox
from tests.support.chat import chat_folder
from tests.support.generation import LLAMA_GQA
from tests.support.live_servers import VLLM_PYTHON, require_vllm
from tests.support.policies import TOKENIZER
from tests.support.runs import tiny
from tests.support.trajectories import completions, logprobs_of
from tests.support.transformers_models import write_transformers_model

PAGE = Path(__file__).resolve().parents[2] / "docs" / "extending.md"
STEPS = 2


@pytest.mark.slow
def test_the_examples_of_the_page_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = PAGE.read_text()
    examples = re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```$", text, re.S | re.M)
    names = dict(re.findall(r"(\w+\.\w+)=(my_\w+:\w+)", text))
    assert len(examples) == len(names) == 8
    for name, code in examples:
        (tmp_path / name).write_text(code)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{PAGE.parents[1]}")
    monkeypatch.syspath_prepend(str(tmp_path))
    groups: dict[str, dict[str, str]] = {}
    for field, path in names.items():
        group, _, field = field.partition(".")
        groups.setdefault(group, {})[field] = path
    limits = {"held_out": 8, "max_prompt_tokens": 256, "max_new_tokens": 24, "chat": {"enabled": True}}
    changed = {
        "model": {"path": str(_talking_model(tmp_path / "model")), "context": 512},
        "task": groups["task"] | limits,
        "algorithm": groups["algorithm"] | {"entropy_coef": 0.01},
        "training": groups["training"] | {"steps": STEPS},
    }
    config = tiny(tmp_path / "state", warm=False, **groups | changed)
    assert execute(config, run_id="mine", log=lambda line: None).steps == STEPS
    run = run_folder(config, "mine")
    requests = run.log_file("generation", 0).read_text()
    assert len(re.findall(r"^group-\d+-0: \d+ tokens, 4 completions$", requests, re.M)) >= STEPS * 8
    with sqlite3.connect(run.outbox) as outbox:
        points = outbox.execute("SELECT key, step FROM metrics WHERE key GLOB 'mine/*' OR key GLOB 'control/*'")
        curves = {"mine/share_of_long", "mine/price_of_length", "mine/price", "mine/far"}
        curves |= {"control/learning_rate", "control/entropy_coef"}
        assert set(points) == {(curve, step) for curve in curves for step in range(1, STEPS + 1)}


def _talking_model(folder: Path) -> Path:
    """A small model that has learnt nothing, with a tokenizer of bytes and a chat template."""
    tokenizer = Tokenizer.from_folder(chat_folder(folder))
    spec = dataclasses.replace(
        LLAMA_GQA, vocab_size=tokenizer.vocab_size, context=512, eos_token_ids=(tokenizer.token_id("<|im_end|>"),)
    )
    write_model(folder, spec, init_weights(spec, seed=0), folder / "tokenizer.json")
    return folder


TURN_STEPS = 3


@pytest.mark.slow
def test_two_turns_are_sampled_masked_and_trained_on(tmp_path: Path) -> None:
    config = tiny(
        tmp_path,
        environment={"name": "areal_core.environments.environment:TwoTurn"},
        task={"max_operations": 2, "held_out": 16, "max_new_tokens": 40},
        warmup={"worked_steps": 200, "worked_batch": 8},
        rollout={"retain": "all"},
        training={"steps": TURN_STEPS, "learning_rate": 1e-3},
    )
    summary = execute(config, run_id="two", log=lambda line: None)
    assert summary.steps == TURN_STEPS
    run = run_folder(config, "two")
    ledger = TrajectoryLedger(run.ledger, group_size=config.algorithm.group_size)
    batches = [ledger.batch(step) for step in range(1, TURN_STEPS + 1)]
    groups = [
        read_group_file(run.payloads, group, range(len(group.lengths))) for batch in batches for group in batch.groups
    ]
    hashes = {ledger.versions.get(step).digest for step in range(TURN_STEPS + 1)}
    ledger.close()
    assert len(hashes) > 1, "no step changed anything"  # one without an advantage does not
    said = np.concatenate([group.tokens[~group.loss_mask] for group in groups])
    assert len(said) > 0
    assert set(said.tolist()) == set(TOKENIZER.encode("=")), "only tokens of the environment are left out of the loss"
    assert sum(int(group.loss_mask.sum()) for group in groups) == summary.tokens.consumed
    assert not any(group.logprobs[~group.loss_mask].any() for group in groups)
    texts = [(group.prompts[0], *completion) for group in groups for completion in completions(group)]
    texts = [text for text in texts if 0 in text[2]]
    assert any(-1 in versions for _, _, versions, _ in texts)
    model, base = AutoModelForCausalLM.from_pretrained(run.info().model_path).eval(), Path(run.info().model_path)
    exact = logprobs_of(model, base / "model.safetensors", texts, 0, torch.float64)
    recorded = np.concatenate([logprobs[versions == 0] for _, _, versions, logprobs in texts])
    np.testing.assert_allclose(recorded, exact, atol=1e-4)
    with sqlite3.connect(run.outbox) as outbox:
        losses = outbox.execute("SELECT value FROM metrics WHERE key = 'loss/policy'").fetchall()
    assert len(losses) == TURN_STEPS
    assert any(value != 0 for (value,) in losses), "no trajectory had an advantage: nothing was trained on"


@pytest.mark.slow
def test_mixture_of_three_environments_trains_and_has_curves_by_task(tmp_path: Path) -> None:
    limits = {"held_out": 8, "max_operations": 2, "max_new_tokens": 24}
    environments = {"once": "single_turn", "twice": "two_turn", "tools": "calculator"}
    tasks = {name: {"task": limits, "environment": {"name": its}} for name, its in environments.items()}
    tasks["once"]["ratio"] = 2
    config = tiny(tmp_path, tasks=tasks, training={"steps": STEPS}, rollout={"max_staleness": 0})
    assert execute(config, run_id="mixed", log=lambda line: None).steps == STEPS
    with contextlib.closing(Outbox(run_folder(config, "mixed").outbox, "mixed")) as outbox:
        curves = outbox.history()
    for key, task in itertools.product(("reward/mean", "reward/correct", "completion/tokens_mean"), environments):
        assert [step for step, _ in curves[f"{key}/{task}"]] == [1, 2]
    once, twice, tools, all_ = (dict(curves["completion/tokens_mean" + of]) for of in ("/once", "/twice", "/tools", ""))
    assert all_[1] == pytest.approx(once[1] / 2 + twice[1] / 4 + tools[1] / 4)  # a batch of all groups has the ratios


@pytest.mark.nightly
@pytest.mark.vllm
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
