"""The protocol of training engines, and the records that they exchange with the trainer.

No torch here: a batch is numpy arrays, so that any engine can implement the protocol.
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
    """The mean of AlgorithmConfig.loss_mean over sequences of so many loss tokens, [N], that belong to units of so
    many, [N]: the weight of each loss token of a sequence, and what the sequence contributes to the loss denominator, 0
    exactly without loss tokens. A unit is a rollout, or each of its sequences (AlgorithmConfig.loss_unit).

    - token: over all loss tokens alike; a long unit counts for more than a short one (AReaL, DAPO).
    - sequence: over units, of the mean over their loss tokens; a token of a long one counts for less (GRPO).
    - constant: the sum over loss tokens, divided by units times `limit`, the most tokens that a sequence may have; a
      token counts the same whatever the lengths are (Dr. GRPO).
    """
    share = loss_tokens / np.maximum(of_unit, 1)  # of its unit
    if mean == "sequence":
        return 1.0 / np.maximum(of_unit, 1), share
    return np.ones(len(loss_tokens)), limit * share if mean == "constant" else loss_tokens.astype(np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingBatch:
    """One rank's share of the batch of one step: N sequences, prompt and completion, laid end to end in S tokens;
    packed into micro-batches as it is made, which may be long before it is trained on. A completion here is all that
    follows a sequence's prompt, the environment's messages included."""

    step: int  # trains on policy version step - 1
    tokens: Int32Array  # [S]
    lengths: Int32Array  # [N] tokens of a sequence, prompt and completion
    prompt_lengths: Int32Array  # [N]
    loss_mask: BoolArray  # [S] tokens that the model sampled and that count; never the prompt's
    behaviour_logprobs: Float32Array  # [S] nats; 0 in prompts
    versions: Int32Array  # [S] policy version that sampled the token; -1 in prompts
    advantages: Float32Array  # [S] of the token's rollout, or part of it; 0 in prompts
    weights: Float32Array  # [S] of the token's term in the loss, see algorithm.losses; 0 in prompts
    denominator_terms: NDArray[np.float64]  # [N] what each sequence contributes to the loss denominator
    regularised: bool = False  # completions without an advantage have a gradient too
    prompts: Int32Array | None = None  # [N] those that have the same share its computation; None: none do
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
    credits: Sequence[Credit],
    *,
    capacity: int,
    algorithm: AlgorithmConfig | None = None,
    max_new_tokens: int = 1,
    share_prompts: bool = False,
) -> TrainingBatch:
    """Lay out one rank's sequences for training.

    - shares: this rank's parts of groups, by minibatch, from `partition.shard`.
    - payloads: by group, its sequences that are in such a part.
    - credits: the advantages of each group of the global batch.
    - algorithm: which rollouts count, and how; the default one without it.
    - max_new_tokens: the limit of a completion, which loss_mean=constant divides by.
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
    """The advantage of every token of some of a group's sequences, which ascend, after their prompts."""
    chosen = np.isin(credit.sequences, sequences)
    return np.repeat(credit.advantages[chosen], credit.tokens[chosen])


def _joined(parts: Sequence[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    return np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype, copy=False)
