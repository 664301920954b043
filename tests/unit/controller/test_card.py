"""The model card says what a model was trained from, how, and what came of it."""

import dataclasses

import yaml

from areal_core.config.schema import load
from areal_core.controller.card import model_card
from areal_core.types import RunSummary, TokenLedger

CONFIG = load(
    {
        "mode": "sync",
        "model": {"path": "hub:someone/small", "context": 2048},
        "task": {"name": "reasoning_gym", "dataset": "gcd", "chat": {"enabled": True}, "held_out": 64},
        "training": {"learning_rate": 1e-5},
    }
)
SUMMARY = RunSummary(
    run_id="first",
    name="n",
    mode="sync",
    seed=3,
    reason="steps",
    steps=20,
    accuracy_before=0.25,
    accuracy_after=0.5,
    best_accuracy=0.5,
    rl_wall_s=100.0,
    time_to_score_s=None,
    tokens=TokenLedger(generated=12345, consumed=12345, dropped=0, buffered=0, in_flight=0),
    effective_tokens_per_s=1.0,
    generated_tokens_per_s=1.0,
    staleness_mean=0.5,
    staleness_max=1,
    model_url="x",
    incarnation=0,
)


def test_it_tells_base_task_scores_and_settings():
    card = model_card(CONFIG, SUMMARY)
    assert "Trained from hub:someone/small" in card
    assert "20 steps of 512 completions of `gcd`, seed 3" in card
    assert "0.250 before the training, 0.500 after it" in card
    assert "12,345 sampled tokens" in card
    assert "messages of the chat template" in card
    told = [line.strip() for line in card.splitlines() if line.startswith("    ")]
    assert told == [
        'task.name="reasoning_gym"',
        'task.dataset="gcd"',
        "task.chat.enabled=true",
        "task.held_out=64",
        "training.learning_rate=1e-05",
    ]


def test_its_head_is_one_that_the_hub_reads():
    _, head, _ = model_card(CONFIG, SUMMARY).split("---\n", 2)
    assert yaml.safe_load(head) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["areal", "reinforcement-learning"],
    }


def test_a_run_without_scores_says_so():
    card = model_card(load({}), dataclasses.replace(SUMMARY, accuracy_before=None, accuracy_after=None))
    assert "were not scored" in card
    assert "Trained from the embedded model" in card
    assert "fed as they stand" in card
