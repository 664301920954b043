"""The two-turn environment trains the embedded model: real servers, workers and ranks, chosen by import path."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from areal_core.api.scored_groups import read_group_file
from areal_core.controller.core.ledger import TrajectoryLedger
from areal_core.run.launcher import execute, run_folder
from areal_core.types import GroupPayload
from tests.support.policies import TOKENIZER
from tests.support.runs import tiny

pytestmark = pytest.mark.slow
STEPS = 3


@pytest.mark.end_to_end
def test_two_turns_are_sampled_masked_and_trained_on(tmp_path: Path) -> None:
    config = tiny(
        tmp_path,
        environment={"name": "areal_core.environments.environment:TwoTurn"},
        task={"max_operations": 2, "held_out": 16, "max_new_tokens": 40},
        warmup={"worked_steps": 200, "worked_batch": 8},
        rollout={"retain": "all"},
        training={"steps": STEPS, "learning_rate": 1e-3},
    )
    summary = execute(config, run_id="two", log=lambda line: None)
    assert summary.steps == STEPS
    run = run_folder(config, "two")
    ledger = TrajectoryLedger(run.ledger, group_size=config.algorithm.group_size)
    batches = [ledger.batch(step) for step in range(1, STEPS + 1)]
    groups = [
        read_group_file(run.payloads, group, range(len(group.lengths))) for batch in batches for group in batch.groups
    ]
    hashes = {ledger.versions.get(step).digest for step in range(STEPS + 1)}
    ledger.close()
    assert len(hashes) > 1, "no step changed anything"  # one without an advantage does not
    said = np.concatenate([group.tokens[~group.loss_mask] for group in groups])
    assert len(said) > 0
    assert set(said.tolist()) == set(TOKENIZER.encode("=")), "only tokens of the environment are left out of the loss"
    assert sum(int(group.loss_mask.sum()) for group in groups) == summary.tokens.consumed
    model = AutoModelForCausalLM.from_pretrained(run.info().model_path).double().eval()
    early = [group for group in groups if set(group.versions[group.loss_mask].tolist()) == {0}]
    assert any((~group.loss_mask).any() for group in early)
    for group in early:
        check_logprobs(model, group)
    with sqlite3.connect(run.outbox) as outbox:
        losses = outbox.execute("SELECT value FROM metrics WHERE key = 'loss/policy'").fetchall()
    assert len(losses) == STEPS
    assert any(value != 0 for (value,) in losses), "no trajectory had an advantage: nothing was trained on"


@torch.inference_mode()
def check_logprobs(model: torch.nn.Module, group: GroupPayload) -> None:
    """Sampled tokens have the log-probabilities that transformers computes over all tokens before them."""
    start = 0
    for length in group.lengths.tolist():
        part = slice(start, start + length)
        text = torch.from_numpy(np.concatenate([group.prompt_tokens, group.tokens[part]]).astype(np.int64))
        logits = model(text[None]).logits[0, len(group.prompt_tokens) - 1 : -1]
        expected = logits.log_softmax(-1).gather(-1, text[len(group.prompt_tokens) :, None])[:, 0].numpy()
        mask = group.loss_mask[part]
        np.testing.assert_allclose(group.logprobs[part][mask], expected[mask], atol=1e-4)
        assert not group.logprobs[part][~mask].any()
        start += length
