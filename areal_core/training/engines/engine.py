"""The protocol of training engines, and the records that they exchange with the trainer.

No torch here: a batch is numpy arrays, so that any engine can implement the protocol.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from areal_core.config.algorithm import AlgorithmConfig
from areal_core.training.batching.packing import Packed, pack, pack_shared
from areal_core.training.batching.partition import Part, allocate, allocate_groups
from areal_core.types import BoolArray, Float32Array, GroupPayload, Int32Array


def loss_weights(
    mean: str, loss_tokens: NDArray[np.int64], limit: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The mean of AlgorithmConfig.loss_mean over completions of so many loss tokens, [N]: the weight of each loss token
    of a completion, and what the completion contributes to the loss denominator, 0 exactly without loss tokens.

    - token: over all loss tokens alike; a long completion counts for more than a short one (AReaL, DAPO).
    - sequence: over completions, of the mean over their loss tokens; a token of a long one counts for less (GRPO).
    - constant: the sum over loss tokens, divided by completions times `limit`, the most tokens that a completion may
      have; a token counts the same whatever the completions' lengths are (Dr. GRPO).
    """
    counted = (loss_tokens > 0).astype(np.float64)
    if mean == "sequence":
        return 1.0 / np.maximum(loss_tokens, 1), counted
    return np.ones(len(loss_tokens)), counted * (limit if mean == "constant" else loss_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingBatch:
    """One rank's share of the batch of one step: N sequences, prompt and completion, laid end to end in S tokens;
    packed into micro-batches as it is made, which may be long before it is trained on."""

    step: int  # trains on policy version step - 1
    tokens: Int32Array  # [S]
    lengths: Int32Array  # [N] tokens of a sequence, prompt and completion
    prompt_lengths: Int32Array  # [N]
    loss_mask: BoolArray  # [S] tokens that the model sampled and that count; never the prompt's
    behaviour_logprobs: Float32Array  # [S] nats; 0 in prompts
    versions: Int32Array  # [S] policy version that sampled the token; -1 in prompts
    advantages: Float32Array  # [S] the completion's at each of its tokens; 0 in prompts
    weights: Float32Array  # [S] of the token's term in the loss, see algorithm.losses; 0 in prompts
    denominator_terms: NDArray[np.float64]  # [N] what each completion contributes to the loss denominator
    regularised: bool = False  # completions without an advantage have a gradient too
    groups: Int32Array | None = None  # [N] group of a sequence: its prompt is computed once; None: for every sequence
    minibatches: tuple[tuple[int, ...], ...]  # this rank's sequences of each PPO minibatch; may be empty
    capacity: int  # C of Algorithm 1: tokens of a micro-batch
    microbatches: tuple[tuple[Packed, ...], ...] = field(init=False, repr=False, compare=False)
    # Of each minibatch: those of its sequences that have a gradient.
    later: tuple[Packed, ...] = field(init=False, repr=False, compare=False)
    # Those of all minibatches but the first, packed together: for passes without an update.

    def __post_init__(self) -> None:
        has_gradient = self.has_gradient
        trained = [[index for index in members if has_gradient[index]] for members in self.minibatches]
        object.__setattr__(self, "microbatches", tuple(map(self.cut, trained)))
        object.__setattr__(self, "later", self.cut([index for members in trained[1:] for index in members]))

    def cut(self, members: Sequence[int]) -> tuple[Packed, ...]:
        """Some of the sequences, packed into micro-batches (Algorithm 1).

        Raises ConfigError for a sequence that is longer than `capacity`.
        """
        laid = self.tokens, self.lengths, self.prompt_lengths
        if self.groups is None:
            allocated = allocate(self.lengths[list(members)].tolist(), self.capacity)
            return tuple(pack(*laid, [members[index] for index in indices]) for indices in allocated)
        together: dict[int, list[int]] = {}
        for index in members:
            together.setdefault(int(self.groups[index]), []).append(index)
        groups = list(together.values())
        prompts = [int(self.prompt_lengths[group[0]]) for group in groups]
        completions = [(self.lengths[group] - prompt).tolist() for group, prompt in zip(groups, prompts, strict=True)]
        return tuple(
            pack_shared(*laid, [[groups[group][completion] for group, completion in item] for item in items])
            for items in allocate_groups(prompts, completions, self.capacity)
        )

    @property
    def loss_tokens(self) -> list[int]:
        """Loss tokens of this rank's share of each minibatch."""
        counts = self._count(self.loss_mask)
        return [int(counts[list(members)].sum()) for members in self.minibatches]

    @property
    def denominators(self) -> list[float]:
        """What this rank's share of each minibatch contributes to its loss denominator; 0 without loss tokens."""
        return [float(self.denominator_terms[list(members)].sum()) for members in self.minibatches]

    @property
    def has_gradient(self) -> BoolArray:
        """[N] whether a sequence has a gradient: some loss token has an advantage other than 0, or is regularised."""
        return self._count(self.loss_mask & ((self.advantages != 0) | self.regularised)) > 0

    def _count(self, marked: BoolArray) -> NDArray[np.int64]:
        """[N] marked tokens of each sequence."""
        ends = np.cumsum(self.lengths)
        total = np.concatenate(([0], np.cumsum(marked)))
        return total[ends] - total[ends - self.lengths]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """One training step over all ranks. Unless the field says otherwise, means are over loss tokens of completions that
    have a gradient: the others, those without an advantage, are in no pass. Defaults are for a step without passes."""

    loss: float = 0.0  # mean over minibatches
    grad_norm: float = 0.0  # before clipping, mean over minibatches
    update_norm: float = 0.0  # of the change of the weights by an optimiser update, mean over minibatches
    learning_rate: float  # of the last update
    updates: int  # minibatches that had loss tokens
    loss_tokens: int
    trained_tokens: int = 0  # of these, the ones of completions that have a gradient
    train_inference_kl: float | None = None  # k3 of trainer against generator; None: no token is of the same version
    metrics: dict[str, float] = field(default_factory=dict[str, float])  # others, by the names of their curves

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
    """All that an engine's next steps depend on; the same on every rank."""

    arrays: dict[str, NDArray[Any]]  # weights, optimiser moments, RNG; parts of them are flat
    scalars: dict[str, Any]  # numbers, text and groups of them, fit for JSON
    # Of whole arrays, where parts of them may be here.
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])


class TrainingEngine(Protocol):
    """One rank of a data-parallel group. Methods marked collective must be called by every rank, in the same order."""

    def proximal_logprobs(self, batch: TrainingBatch) -> Float32Array:
        """Collective. pi_prox of all minibatches but the first: log-probability of completion tokens under the
        current weights, nats. [S]; 0 in prompts, in completions without a gradient, and in the first minibatch, whose
        own pass in `train_step` is under the same weights.

        Raises DivergenceError, on every rank, when one is not finite.
        """
        ...

    def train_step(self, batch: TrainingBatch, proximal: Float32Array | None) -> StepStats:
        """Collective. All PPO minibatches of the batch, an optimiser update each.

        `proximal` is what `proximal_logprobs` gave for this batch; it is ignored for the first minibatch, where
        pi_prox is pi_theta before the update. None where the objective takes none, and where pi_behav stands in for it,
        as nothing is stale.
        Raises DivergenceError, on every rank and before the weights change, when a gradient is not finite.
        """
        ...

    def train_inference_kl(
        self, batch: TrainingBatch, weights: Mapping[str, NDArray[Any]], version: int
    ) -> tuple[float, int]:
        """How far generator and trainer disagree on the same weights: (sum of k3 in nats, tokens), over loss tokens
        that `version` sampled in the first of this rank's sequences that hold any, given that version's `weights`."""
        ...

    def compute_s(self) -> float:
        """Seconds that this rank spent in passes over the model and in the optimiser since the last call."""
        ...

    def weights(self) -> dict[str, Float32Array]:
        """Collective. A copy of the weights, by their names in transformers; on ranks other than 0 it may be empty."""
        ...

    def served(self) -> dict[str, NDArray[Any]]:
        """As `weights`, in the dtype that servers load, bfloat16 as uint16. It stays as it is until the next call but
        one."""
        ...

    def state(self) -> EngineState:
        """Collective. A copy of the state, to be saved; on ranks other than 0 it may be empty."""
        ...

    def parts(self) -> Mapping[str, tuple[int, int]]:
        """Of arrays of a saved state that this rank holds no more than a part of: the elements, flat, from the first up
        to the second number."""
        ...

    def load_state(self, state: EngineState) -> None:
        """Go on from a saved state, whose arrays are whole or such parts. Raises ModelError when it is of another
        model."""
        ...


def build_batch(
    step: int,
    shares: Sequence[Sequence[Part]],
    payloads: Mapping[int, GroupPayload],
    advantages: NDArray[np.float64],
    *,
    capacity: int,
    algorithm: AlgorithmConfig | None = None,
    max_new_tokens: int = 1,
    share_prompts: bool = False,
) -> TrainingBatch:
    """Lay out one rank's completions for training.

    - shares: this rank's parts of groups, by minibatch, from `partition.shard`.
    - payloads: by group, its completions that are in such a part.
    - advantages: [P, G], of the global batch.
    - algorithm: which completions count, and how; the default one without it.
    - max_new_tokens: the limit of a completion, which loss_mean=constant divides by.
    - share_prompts: compute a group's prompt once for all of its completions.
    """
    algorithm = algorithm or AlgorithmConfig()
    members = [payloads[part.group] for share in shares for part in share]
    assert all(len(group.prompt_tokens) and group.lengths.all() for group in members), "empty prompt or completion"
    completions = _joined([group.lengths for group in members], np.int32)  # [N]
    prompts = np.array([len(group.prompt_tokens) for group in members for _ in group.lengths], np.int32)  # [N]
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
    rewarded = _joined([advantages[part.group, part.completions] for share in shares for part in share], np.float32)
    loss_tokens = (
        np.add.reduceat(counted, np.cumsum(completions) - completions, dtype=np.int64)
        if len(completions)
        else completions
    )
    weights, denominator_terms = loss_weights(algorithm.loss_mean, loss_tokens, max_new_tokens)
    ends = np.cumsum([sum(len(part.completions) for part in share) for share in shares]).tolist()
    return TrainingBatch(
        step=step,
        tokens=laid_out(
            _joined([group.tokens for group in members], np.int32),
            _joined([np.tile(group.prompt_tokens, len(group.lengths)) for group in members], np.int32),
            np.int32,
        ),
        lengths=prompts + completions,
        prompt_lengths=prompts,
        loss_mask=laid_out(counted, False, np.bool_),
        behaviour_logprobs=laid_out(_joined([group.logprobs for group in members], np.float32), 0.0, np.float32),
        versions=laid_out(_joined([group.versions for group in members], np.int32), -1, np.int32),
        advantages=laid_out(np.repeat(rewarded, completions), 0.0, np.float32),
        weights=laid_out(np.repeat(weights, completions), 0.0, np.float32),
        denominator_terms=denominator_terms,
        regularised=algorithm.regularised,
        groups=np.repeat(np.arange(len(members)), [len(group.lengths) for group in members]).astype(np.int32)
        if share_prompts
        else None,
        minibatches=tuple(tuple(range(start, end)) for start, end in zip([0, *ends], ends, strict=False)),
        capacity=capacity,
    )


def _joined(parts: Sequence[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    return np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype, copy=False)
