"""The model card says what a model was trained from, how, and what came of it."""

import dataclasses

import yaml

from areal_core.config.schema import load
from areal_core.controller.export import model_card
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


def test_card_tells_base_task_scores_and_settings():
    card = model_card(CONFIG, SUMMARY)
    for told in (
        "Trained from hub:someone/small",
        "20 steps of 512 completions of `gcd`, seed 3",
        "0.250 before the training, 0.500 after it",
        "12,345 sampled tokens",
        "messages of the chat template",
    ):
        assert told in card
    assert [line.strip() for line in card.splitlines() if line.startswith("    ")] == [
        'task.name="reasoning_gym"',
        'task.dataset="gcd"',
        "task.chat.enabled=true",
        "task.held_out=64",
        "training.learning_rate=1e-05",
    ]
    head = yaml.safe_load(card.split("---\n", 2)[1])
    assert (head["library_name"], head["pipeline_tag"]) == ("transformers", "text-generation")  # which the hub reads
    unscored = model_card(load({}), dataclasses.replace(SUMMARY, accuracy_before=None, accuracy_after=None))
    for told in ("were not scored", "Trained from the embedded model", "fed as they stand"):
        assert told in unscored
