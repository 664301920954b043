"""The protocol of training engines, and the records that they exchange with the trainer.

This module does not use torch. A batch is numpy arrays, so that any engine can implement the protocol.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from areal_core.algorithm.advantages import Credit
from areal_core.config.algorithm import AlgorithmConfig
from areal_core.training.batching.packing import Packed, pack, pack_shared
from areal_core.training.batching.partition import Part, allocate, allocate_groups
from areal_core.types import BoolArray, Float32Array, GroupPayload, Int32Array


def loss_weights(
    mean: str, loss_tokens: NDArray[Any], of_unit: NDArray[Any], limit: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return token weight and denominator term of each of N sequences, for AlgorithmConfig.loss_mean.

    `loss_tokens` and `of_unit` are [N]: loss tokens of the sequence and of its unit. A unit is a rollout or a sequence
    (AlgorithmConfig.loss_unit). Token weights apply to each loss token. Denominator terms sum to the loss denominator,
    and are exactly 0 without loss tokens. `limit` is the largest number of tokens of a sequence.

    - token: the mean over all loss tokens, so a long unit counts more than a short one (AReaL, DAPO).
    - sequence: the mean over units of the mean over their loss tokens, so a token of a long unit counts less (GRPO).
    - constant: the sum over loss tokens, divided by units times `limit`. All tokens count the same (Dr. GRPO).
    """
    share = loss_tokens / np.maximum(of_unit, 1)  # of the sequence in its unit
    if mean == "sequence":
        return 1.0 / np.maximum(of_unit, 1), share
    return np.ones(len(loss_tokens)), limit * share if mean == "constant" else loss_tokens.astype(np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingBatch:
    """One rank's share of a step's batch: N sequences laid end to end in S tokens, in micro-batches.

    Packing happens at construction, which may be long before training. A completion here is everything after a
    sequence's prompt, including the environment's messages.
    """

    step: int  # the step trains on policy version step - 1
    tokens: Int32Array  # [S]
    lengths: Int32Array  # [N] tokens of each sequence, prompt and completion
    prompt_lengths: Int32Array  # [N]
    loss_mask: BoolArray  # [S] sampled tokens that count in the loss; never the prompt's
    behaviour_logprobs: Float32Array  # [S] nats; 0 in prompts
    versions: Int32Array  # [S] policy version that sampled the token; -1 in prompts
    advantages: Float32Array  # [S] of the token's rollout or part of a rollout; 0 in prompts
    weights: Float32Array  # [S] token weights in the loss, see algorithm.losses; 0 in prompts
    denominator_terms: NDArray[np.float64]  # [N] terms of the loss denominator
    regularised: bool = False  # completions without an advantage also have a gradient
    prompts: Int32Array | None = None  # [N] equal numbers share a prompt's computation; None: no sharing
    minibatches: tuple[tuple[int, ...], ...]  # this rank's sequences of each PPO minibatch; may be empty
    capacity: int  # C of Algorithm 1: tokens of a micro-batch
    microbatches: tuple[tuple[Packed, ...], ...] = field(init=False, repr=False, compare=False)
    # For each minibatch: its sequences that have a gradient.
    later: tuple[Packed, ...] = field(init=False, repr=False, compare=False)
    # Those sequences of all minibatches but the first, for passes without an update.

    def __post_init__(self) -> None:
        has_gradient = self.has_gradient
        trained = [[index for index in members if has_gradient[index]] for members in self.minibatches]
        object.__setattr__(self, "microbatches", tuple(map(self.cut, trained)))
        object.__setattr__(self, "later", self.cut([index for members in trained[1:] for index in members]))

    def cut(self, members: Sequence[int]) -> tuple[Packed, ...]:
        """Pack some of the sequences into micro-batches (Algorithm 1).

        Raises ConfigError for a sequence longer than `capacity`.
        """
        laid = self.tokens, self.lengths, self.prompt_lengths
        if self.prompts is None:
            allocated = allocate(self.lengths[list(members)].tolist(), self.capacity)
            return tuple(pack(*laid, [members[index] for index in indices]) for indices in allocated)
        together: dict[int, list[int]] = {}
        for index in members:
            together.setdefault(int(self.prompts[index]), []).append(index)
        groups = list(together.values())
        prompts = [int(self.prompt_lengths[group[0]]) for group in groups]
        completions = [(self.lengths[group] - prompt).tolist() for group, prompt in zip(groups, prompts, strict=True)]
        return tuple(
            pack_shared(*laid, [[groups[group][completion] for group, completion in item] for item in items])
            for items in allocate_groups(prompts, completions, self.capacity)
        )

    @property
    def loss_tokens(self) -> list[int]:
        """Number of loss tokens of this rank's share of each minibatch."""
        counts = self._count(self.loss_mask)
        return [int(counts[list(members)].sum()) for members in self.minibatches]

    @property
    def denominators(self) -> list[float]:
        """This rank's part of each minibatch's loss denominator; 0 without loss tokens."""
        return [float(self.denominator_terms[list(members)].sum()) for members in self.minibatches]

    @property
    def has_gradient(self) -> BoolArray:
        """[N] whether a sequence has a gradient: some loss token has a non-zero advantage or is regularised."""
        return self._count(self.loss_mask & ((self.advantages != 0) | self.regularised)) > 0

    def _count(self, marked: BoolArray) -> NDArray[np.int64]:
        """[N] number of marked tokens of each sequence."""
        ends = np.cumsum(self.lengths)
        total = np.concatenate(([0], np.cumsum(marked)))
        return total[ends] - total[ends - self.lengths]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """Statistics of one training step over all ranks.

    Unless noted, means are over loss tokens of completions that have a gradient. Completions without a gradient are in
    no pass. Defaults are for a step without passes.
    """

    loss: float = 0.0  # mean over minibatches
    grad_norm: float = 0.0  # before clipping, mean over minibatches
    update_norm: float = 0.0  # norm of an update's change of the weights, mean over minibatches
    learning_rate: float  # of the last update
    updates: int  # minibatches that had loss tokens
    loss_tokens: int
    train_inference_kl: float | None = None  # k3, nats a token; None: no token is of the version trained on
    metrics: dict[str, float] = field(default_factory=dict[str, float])  # others, by curve name

    @property
    def curves(self) -> dict[str, float]:
        """The points of the step's curves, by their names in docs/metrics.md."""
        measured = {"policy/train_inference_kl": self.train_inference_kl}
        return {
            **self.metrics,
            "loss/policy": self.loss,
            "optimizer/grad_norm": self.grad_norm,
            "optimizer/update_norm": self.update_norm,
            "optimizer/learning_rate": self.learning_rate,
            **{name: value for name, value in measured.items() if value is not None},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """Everything that an engine's next steps depend on; the same on every rank."""

    arrays: dict[str, NDArray[Any]]  # model weights, optimiser moments, RNG; parts of arrays are flat
    scalars: dict[str, Any]  # values that JSON can hold
    # Shapes of whole arrays, if `arrays` holds only parts.
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])


class TrainingEngine(Protocol):
    """One rank of a data-parallel group. Every rank must call collective methods, in the same order."""

    def proximal_logprobs(self, batch: TrainingBatch) -> Float32Array:
        """Collective. Recompute pi_prox: log-probabilities of completion tokens under the current weights, nats. [S].

        The result is 0 in prompts, in completions without a gradient, and in the first minibatch. For the first
        minibatch the pass in `train_step` gives pi_prox, under the same weights. Raises DivergenceError on every rank
        if any value is not finite.
        """
        ...

    def train_step(self, batch: TrainingBatch, proximal: Float32Array | None) -> StepStats:
        """Collective. Train on all PPO minibatches of the batch, with one optimiser update each.

        `proximal` is the result of `proximal_logprobs` for this batch. The first minibatch ignores it, because there
        pi_prox is pi_theta before the update. `proximal` is None if the objective uses none, or if no token is stale
        and pi_behav replaces it. Raises DivergenceError on every rank, before the model weights change, if a gradient
        is not finite.
        """
        ...

    def train_inference_kl(
        self, batch: TrainingBatch, weights: Mapping[str, NDArray[Any]], version: int
    ) -> tuple[float, int]:
        """Measure the train/inference KL on the same model weights: (sum of k3 in nats, number of tokens).

        It covers loss tokens sampled by `version`, in the first of this rank's sequences that have any. `weights` are
        that version's model weights.
        """
        ...

    def compute_s(self) -> float:
        """Return the seconds that this rank spent in model passes and in the optimiser since the last call."""
        ...

    def weights(self) -> dict[str, Float32Array]:
        """Collective. Copy the trained weights, named as in transformers; ranks above 0 may return none."""
        ...

    def served(self) -> dict[str, NDArray[Any]]:
        """Collective. Return `weights` in the dtype that servers load, with bfloat16 as uint16.

        The arrays do not change until the next call but one.
        """
        ...

    def state(self) -> EngineState:
        """Collective. Return a copy of the state for a checkpoint; on ranks other than 0 it may be empty."""
        ...

    def parts(self) -> Mapping[str, tuple[int, int]]:
        """Return this rank's flat element range [first, second) of each saved array that it has only in part."""
        ...

    def load_state(self, state: EngineState) -> None:
        """Continue from a saved state of whole arrays or this rank's parts. Raises ModelError for another model."""
        ...


def build_batch(
    step: int,
    shares: Sequence[Sequence[Part]],
    payloads: Mapping[int, GroupPayload],
    credits: Sequence[Credit],
    *,
    capacity: int,
    algorithm: AlgorithmConfig | None = None,
    max_new_tokens: int = 1,
    share_prompts: bool = False,
) -> TrainingBatch:
    """Lay out one rank's sequences for training.

    - shares: this rank's parts of groups, by minibatch, from `partition.shard`.
    - payloads: by group, the sequences in these parts.
    - credits: the advantages of each group of the global batch.
    - algorithm: configures masks and the mean of the loss; None means the defaults.
    - max_new_tokens: the limit of a completion, a divisor in loss_mean=constant.
    - share_prompts: compute a prompt once for all sequences of a group that begin with it.
    """
    algorithm = algorithm or AlgorithmConfig()
    members = [payloads[part.group] for share in shares for part in share]
    beginnings = [group.prompts[prompt] for group in members for prompt in group.prompt_of]  # [N]
    completions = _joined([group.lengths for group in members], np.int32)  # [N]
    assert all(map(len, beginnings)), "empty prompt"
    assert completions.all(), "empty completion"
    prompts = np.array(list(map(len, beginnings)), np.int32)  # [N]
    sampled = np.repeat(
        np.tile([False, True], len(completions)), np.stack((prompts, completions), axis=1).ravel()
    )  # [S]

    def laid_out(in_completions: NDArray[Any], in_prompts: Any, dtype: type[np.generic]) -> NDArray[Any]:
        values = np.empty(len(sampled), dtype)
        values[sampled], values[~sampled] = in_completions, in_prompts
        return values

    masks = algorithm.truncated == "mask"
    cut_off = np.repeat(_joined([group.truncated & masks for group in members], np.bool_), completions)
    counted = _joined([group.loss_mask for group in members], np.bool_) & ~cut_off  # [T]
    valued = [_of_tokens(credits[part.group], part.sequences) for share in shares for part in share]
    loss_tokens = (
        np.add.reduceat(counted, np.cumsum(completions) - completions, dtype=np.int64)
        if len(completions)
        else completions
    )
    of_rollout = _joined([group.loss_tokens for group in members], np.int64)
    of_unit = of_rollout if algorithm.loss_unit == "rollout" else loss_tokens
    weights, denominator_terms = loss_weights(algorithm.loss_mean, loss_tokens, of_unit, max_new_tokens)
    ends = np.cumsum([sum(len(part.sequences) for part in share) for share in shares]).tolist()
    first = np.cumsum([0, *(len(group.prompts) for group in members)])
    return TrainingBatch(
        step=step,
        tokens=laid_out(
            _joined([group.tokens for group in members], np.int32),
            _joined(beginnings, np.int32),
            np.int32,
        ),
        lengths=prompts + completions,
        prompt_lengths=prompts,
        loss_mask=laid_out(counted, False, np.bool_),
        behaviour_logprobs=laid_out(_joined([group.logprobs for group in members], np.float32), 0.0, np.float32),
        versions=laid_out(_joined([group.versions for group in members], np.int32), -1, np.int32),
        advantages=laid_out(_joined(valued, np.float32), 0.0, np.float32),
        weights=laid_out(np.repeat(weights, completions), 0.0, np.float32),
        denominator_terms=denominator_terms,
        regularised=algorithm.regularised,
        prompts=_joined([start + group.prompt_of for start, group in zip(first, members, strict=False)], np.int32)
        if share_prompts
        else None,
        minibatches=tuple(tuple(range(start, end)) for start, end in zip([0, *ends], ends, strict=False)),
        capacity=capacity,
    )


def _of_tokens(credit: Credit, sequences: Sequence[int]) -> NDArray[np.float64]:
    """Return the advantage of every completion token of the given sequences of a group, which ascend."""
    chosen = np.isin(credit.sequences, sequences)
    return np.repeat(credit.advantages[chosen], credit.tokens[chosen])


def _joined(parts: Sequence[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    return np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype, copy=False)
