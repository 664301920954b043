"""The recipe of the embedded model's supervised warm-up: its data, learning rate and cache key.

This module does not import torch, so loading a cached model stays fast.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from areal_core.config.schema import RunConfig
from areal_core.environments import arithmetic
from areal_core.models.tokenizer import EOS, char_tokenizer

RECIPE = 2  # raise it when the recipe or its code changes the model weights
_RAMP = 0.05  # share of a stage in which the learning rate rises

# all sequences' tokens end to end; [N] lengths of sequences; [N] lengths of their prompts
Batch = tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]


def cache_key(config: RunConfig) -> str:
    """Hash all settings that determine the embedded model's weights."""
    parts = {
        "recipe": RECIPE,
        "model": dataclasses.asdict(config.model) | {"path": None},
        "task": [config.task.max_operations, config.task.length_decay],
        "warmup": dataclasses.asdict(config.warmup),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def batches(config: RunConfig, *, steps: int, batch: int, direct_share: float, stream: str) -> Iterator[Batch]:
    """Draw batches of solved training chains, a `direct_share` of them without worked steps.

    `stream` names the random stream of a stage.
    """
    tokenizer = char_tokenizer()
    end = tokenizer.token_id(EOS)
    rng = random.Random(f"warmup/{config.warmup.seed}/{stream}")
    for _ in range(steps):
        sequences: list[tuple[int, ...]] = []
        prompt_lengths: list[int] = []
        while len(sequences) < batch:
            chain = arithmetic.draw(rng, config.task.max_operations, config.task.length_decay)
            if not arithmetic.is_held_out(chain.prompt):
                completion = chain.direct if rng.random() < direct_share else chain.worked
                sequences.append((*tokenizer.encode(chain.prompt + completion), end))
                prompt_lengths.append(len(chain.prompt))
        tokens = np.concatenate([np.array(sequence, np.int32) for sequence in sequences])
        yield tokens, np.array([len(sequence) for sequence in sequences]), np.array(prompt_lengths)


def learning_rate(peak: float, step: int, steps: int) -> float:
    """Linear rise to the peak, then linear fall towards 0 at the end of the stage."""
    done = (step + 1) / (steps + 1)
    return peak * min(done / _RAMP, (1 - done) / (1 - _RAMP))
