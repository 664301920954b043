"""What a trainer asks of the engine that optimises the policy, and the records that pass between them.

No torch here: a batch is numpy arrays, so that any engine can stand behind the protocol.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from areal_core.types import BoolArray, Float32Array, GroupPayload, Int32Array


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingBatch:
    """One rank's share of the batch of one step: N sequences, prompt and answer, laid end to end in S tokens."""

    step: int  # trains on policy version step - 1
    tokens: Int32Array  # [S]
    lengths: Int32Array  # [N] tokens of a sequence, prompt and answer
    prompt_lengths: Int32Array  # [N]
    loss_mask: BoolArray  # [S] tokens that the model sampled and that count; never the prompt's
    behaviour_logprobs: Float32Array  # [S] nats; 0 in prompts
    versions: Int32Array  # [S] policy version that sampled the token; -1 in prompts
    advantages: Float32Array  # [S] the answer's at each of its tokens; 0 in prompts
    minibatches: tuple[tuple[int, ...], ...]  # this rank's sequences of each PPO minibatch; may be empty

    @property
    def loss_tokens(self) -> list[int]:
        """Loss tokens of this rank's share of each minibatch."""
        counts = self._count(self.loss_mask)
        return [int(counts[list(members)].sum()) for members in self.minibatches]

    @property
    def has_gradient(self) -> BoolArray:
        """[N] sequences that can move the policy: some loss token has an advantage other than 0."""
        return self._count(self.loss_mask & (self.advantages != 0)) > 0

    def _count(self, marked: BoolArray) -> NDArray[np.int64]:
        """[N] marked tokens of each sequence."""
        ends = np.cumsum(self.lengths)
        total = np.concatenate(([0], np.cumsum(marked)))
        return total[ends] - total[ends - self.lengths]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """One training step over all ranks. Unless the field says otherwise, means are over loss tokens of answers with an
    advantage: the others move nothing, and are neither recomputed nor looked at."""

    loss: float  # mean over minibatches
    grad_norm: float  # before clipping, mean over minibatches
    learning_rate: float  # of the last update
    updates: int  # minibatches that had loss tokens
    loss_tokens: int
    trained_tokens: int  # of these, the ones of answers with an advantage
    clip_fraction: float
    cap_fraction: float  # tokens whose pi_prox / pi_behav was above algorithm.behaviour_cap
    entropy: float  # nats
    approx_kl: float  # k3 of the clipped ratio: pi_theta against pi_prox, or pi_behav in naive PPO
    mismatch_kl: float | None  # k3 of trainer against generator over tokens of the same version; None: there were none
    mismatch_tokens: int  # tokens of the same version
    ess: float  # of pi_prox / pi_behav (naive PPO: pi_theta / pi_behav), as a share of the tokens
    weight_max: float  # largest of those ratios


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """All that decides what an engine does next; the same on every rank."""

    arrays: dict[str, NDArray[Any]]  # weights, optimiser moments, RNG
    scalars: dict[str, int]  # fit for JSON


class TrainingEngine(Protocol):
    """One rank of a data-parallel group. Methods marked collective must be called by every rank, in the same order."""

    def logprobs(self, batch: TrainingBatch) -> Float32Array:
        """pi_prox: log-probability of answer tokens under the weights as they are, nats. [S]; 0 in prompts, and in
        answers that can't move the policy.

        Raises DivergenceError when one is not finite.
        """
        ...

    def train_step(self, batch: TrainingBatch, proximal: Float32Array | None) -> StepStats:
        """Collective. All PPO minibatches of the batch, an optimiser update each.

        `proximal` is what `logprobs` gave for this batch. None where pi_behav stands in for it: with the naive
        objective, and where nothing is stale.
        Raises DivergenceError, on every rank and before the weights change, when a loss or a gradient is not finite.
        """
        ...

    def mismatch(self, batch: TrainingBatch, weights: Mapping[str, NDArray[Any]], version: int) -> tuple[float, int]:
        """How far generator and trainer disagree on the same weights: (sum of k3 in nats, tokens), over loss tokens
        that `version` sampled in the first of this rank's sequences, given that version's `weights`."""
        ...

    def all_sum(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Collective. The sum over ranks, elementwise."""
        ...

    def weights(self) -> dict[str, Float32Array]:
        """A copy of the weights, by their names in transformers."""
        ...

    def state(self) -> EngineState:
        """A copy of the state, to be saved."""
        ...

    def load_state(self, state: EngineState) -> None:
        """Go on from a saved state. Raises ModelError when it is of another model."""
        ...

    def close(self) -> None:
        """Leave the group of ranks."""
        ...


def build_batch(
    step: int,
    shares: Sequence[Sequence[int]],
    payloads: Mapping[int, GroupPayload],
    advantages: NDArray[np.float64],
    *,
    mask_truncated: bool = False,
) -> TrainingBatch:
    """Lay out one rank's groups for training.

    shares: this rank's groups by minibatch, as `batching.shard` gives them. payloads: those groups.
    advantages: [P, G] of the global batch. mask_truncated: leave answers that were cut off out of the loss.
    """
    members = [payloads[group] for share in shares for group in share]
    assert all(len(group.prompt_tokens) and group.lengths.all() for group in members), "empty prompt or answer"
    answers = _joined([group.lengths for group in members], np.int32)  # [N]
    prompts = np.array([len(group.prompt_tokens) for group in members for _ in group.lengths], np.int32)  # [N]
    sampled = np.repeat(np.tile([False, True], len(answers)), np.stack((prompts, answers), axis=1).ravel())  # [S]

    def laid_out(in_answers: NDArray[Any], in_prompts: Any, dtype: type[np.generic]) -> NDArray[Any]:
        values = np.empty(len(sampled), dtype)
        values[sampled], values[~sampled] = in_answers, in_prompts
        return values

    counted = ~_joined([group.truncated & mask_truncated for group in members], np.bool_)
    rewarded = _joined([advantages[group] for share in shares for group in share], np.float32)
    ends = np.cumsum([sum(len(payloads[group].lengths) for group in share) for share in shares]).tolist()
    return TrainingBatch(
        step=step,
        tokens=laid_out(
            _joined([group.tokens for group in members], np.int32),
            _joined([np.tile(group.prompt_tokens, len(group.lengths)) for group in members], np.int32),
            np.int32,
        ),
        lengths=prompts + answers,
        prompt_lengths=prompts,
        loss_mask=laid_out(np.repeat(counted, answers), False, np.bool_),
        behaviour_logprobs=laid_out(_joined([group.logprobs for group in members], np.float32), 0.0, np.float32),
        versions=laid_out(_joined([group.versions for group in members], np.int32), -1, np.int32),
        advantages=laid_out(np.repeat(rewarded, answers), 0.0, np.float32),
        minibatches=tuple(tuple(range(start, end)) for start, end in zip([0, *ends], ends, strict=False)),
    )


def _joined(parts: Sequence[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    return np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype, copy=False)
