"""A training step of every kind: the partition of a batch never matters, the reference policy stays version 0, and a
batch without loss tokens is no update."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from areal_core.algorithm.losses import policy_loss
from areal_core.algorithm.objectives import Tokens
from areal_core.config.algorithm import OBJECTIVES
from areal_core.config.groups import TrainingConfig
from areal_core.config.schema import AlgorithmConfig
from areal_core.training.batching.packing import Packed, pack
from areal_core.training.batching.partition import shard
from areal_core.training.distributed.ranks import RankGroup
from areal_core.training.engines.engine import StepStats, TrainingBatch, build_batch
from areal_core.training.engines.torch_engine import TorchEngine
from areal_core.training.model.forward import completion_logprobs
from tests.support.records import credits_of
from tests.support.training import (
    BRANCHES,
    GROUPS,
    SPEC,
    TRAINING,
    branched,
    costs_of,
    numbers,
    payload,
    shares_of,
    weights,
    whole,
)

LIMIT = 12  # tokens of a completion
# SGD-like: with a large epsilon, Adam's step is as smooth in the gradient as a comparison needs.
SMOOTH = replace(TRAINING, adam_eps=1.0, grad_clip=1e9)
MEANS = ["token", "sequence", "constant"]
EVERYTHING = AlgorithmConfig(kl_coef=0.1, entropy_coef=0.05, clip_eps_high=0.3, behaviour_cap=0.5)


def share(
    algorithm: AlgorithmConfig, *, step: int = 3, rank: int = 0, ranks: int = 1, minibatches: int = 1, **cut: Any
) -> TrainingBatch:
    """Groups of which one is masked out in part, one has no advantage, and whose tokens are 0 to 2 versions old."""
    payloads = {group: payload(100 * step + group) for group in range(GROUPS)}
    payloads = {
        group: replace(one, versions=(step - 1 - np.arange(len(one.tokens)) % 3).astype(np.int32))
        for group, one in payloads.items()
    }
    shares = shard(costs_of(payloads), minibatches, ranks, seed=0, step=step)[rank]
    advantages = np.array([[1.0, -0.5, 0.0, 2.0]] * GROUPS)
    advantages[1] = 0.0
    return build_batch(
        step,
        shares,
        shares_of(payloads, shares),
        credits_of(advantages, list(payloads.values())),
        capacity=cut.get("capacity", 64),
        algorithm=replace(algorithm, truncated="mask"),
        max_new_tokens=LIMIT,
        share_prompts=cut.get("share_prompts", False),
    )


def engine(
    algorithm: AlgorithmConfig, ranks: RankGroup | None = None, training: TrainingConfig = SMOOTH
) -> TorchEngine:
    return TorchEngine(SPEC, weights(), training, algorithm, ranks=ranks)


def step(one: TorchEngine, batch: TrainingBatch) -> StepStats:
    return one.train_step(batch, one.proximal_logprobs(batch) if one.algorithm.takes_proximal else None)


def gradient(one: TorchEngine) -> dict[str, np.ndarray]:
    """Of the last update of an engine whose only update it was."""
    arrays = one.state().arrays
    return {
        name.removeprefix("exp_avg/"): values / (1 - TRAINING.beta1)
        for name, values in arrays.items()
        if name.startswith("exp_avg/")
    }


def assert_close(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], tolerance: float) -> None:
    """Relative to the largest entry of all."""
    largest = max(np.abs(values).max() for values in expected.values())
    assert largest > 0
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=0, atol=tolerance * largest, err_msg=name)


class ThreadRanks(RankGroup):
    """A rank that is a thread."""

    def __init__(self, rank: int, size: int, rows: list[Any], barrier: threading.Barrier) -> None:
        super().__init__()
        self.rank, self.size, self._rows, self._barrier = rank, size, rows, barrier

    def _all(self, value: Any) -> list[Any]:
        self._rows[self.rank] = value
        self._barrier.wait()
        rows = list(self._rows)
        self._barrier.wait()
        return rows

    def gathered(self, value: Any) -> list[Any]:
        return self._all(value)

    def _reduce(self, tensor: Tensor, operation: dist.ReduceOp.RedOpType) -> None:
        rows = torch.stack(self._all(tensor.clone()))
        tensor.copy_(rows.amax(0) if operation == dist.ReduceOp.MAX else rows.sum(0))


def on_ranks(size: int, work: Callable[[RankGroup], Any]) -> list[Any]:
    rows: list[Any] = [None] * size
    barrier = threading.Barrier(size, timeout=60)
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(lambda rank: work(ThreadRanks(rank, size, rows, barrier)), range(size)))


# -- partitions ------------------------------------------------------------------------------------------------


@settings(max_examples=20)
@given(
    objective=st.sampled_from(list(OBJECTIVES)),
    mean=st.sampled_from(MEANS),
    estimator=st.sampled_from(["k1", "k2", "k3"]),
    regularised=st.booleans(),
    ranks=st.integers(1, 4),
    capacity=st.integers(17, 80),
    minibatches=st.integers(1, 5),
    lockstep=st.booleans(),
    share_prompts=st.booleans(),
)
def test_any_partition_gives_the_same_step(
    objective, mean, estimator, regularised, ranks, capacity, minibatches, lockstep, share_prompts
):
    """Whatever the objective, the mean and the terms: micro-batches, prompts that are shared, ranks and ranks without
    work don't matter."""
    algorithm = AlgorithmConfig(objective=objective, loss_mean=mean, kl_estimator=estimator)
    if regularised:
        algorithm = replace(algorithm, kl_coef=0.1, entropy_coef=0.05)
    whole = engine(algorithm)
    expected = step(whole, share(algorithm, minibatches=minibatches))

    def work(group: RankGroup) -> tuple[StepStats, dict[str, np.ndarray]]:
        one = engine(algorithm, group)
        one.lockstep = lockstep
        part = share(
            algorithm,
            rank=group.rank,
            ranks=group.size,
            minibatches=minibatches,
            capacity=capacity,
            share_prompts=share_prompts,
        )
        return step(one, part), gradient(one)

    for stats, moments in on_ranks(ranks, work):
        found, wanted = numbers(stats), numbers(expected)
        for name in [name for name in found if "weight_p" in name]:  # rounding may take a token over the edge of a bin
            assert found.pop(name) == pytest.approx(wanted.pop(name), rel=0.1)
        assert found == pytest.approx(wanted, rel=2e-4, abs=1e-6)
        assert_close(moments, gradient(whole), 1e-4)


@pytest.mark.parametrize("objective", ["decoupled", "gspo"])
@pytest.mark.parametrize(("mean", "estimator"), list(zip(MEANS, ["k1", "k2", "k3"], strict=True)))
def test_gradient_is_that_of_the_whole_minibatch(objective: str, mean: str, estimator: str):
    """Against plain autograd over all sequences at once, those without an advantage included; version 0 is another."""
    algorithm = replace(EVERYTHING, objective=objective, loss_mean=mean, kl_estimator=estimator)
    batch = share(algorithm)
    assert batch.has_gradient.sum() > share(replace(algorithm, kl_coef=0.0, entropy_coef=0.0)).has_gradient.sum()
    one = engine(algorithm)
    later = TorchEngine(SPEC, weights(seed=1), SMOOTH, algorithm)
    one.load_state(later.state())
    stats = step(one, batch)

    leaves = {name: tensor.requires_grad_() for name, tensor in weights(seed=1).items()}
    everything = pack(batch.tokens, batch.lengths, batch.prompt_lengths, range(len(batch.lengths)))
    current, entropy = completion_logprobs(SPEC, leaves, everything)
    known = {
        "behaviour": batch.behaviour_logprobs,
        "advantages": batch.advantages,
        "mask": batch.loss_mask,
        "weights": batch.weights,
        "staleness": batch.step - 1 - batch.versions,
        "sequence": np.repeat(np.arange(len(batch.lengths)), batch.lengths),
    }
    tokens = Tokens(
        current=current,
        entropy=entropy,
        sequences=len(batch.lengths),
        proximal=current.detach(),
        reference=completion_logprobs(SPEC, weights(), everything)[0].detach(),
        **{name: torch.from_numpy(values[everything.source]) for name, values in known.items()},
    )
    loss, expected = policy_loss(tokens, algorithm, denominator=float(batch.denominator_terms.sum()))
    loss.backward()
    assert stats.loss == pytest.approx(loss.item(), rel=1e-4)
    reference_kl = expected.metrics()["loss/reference_kl"]
    assert stats.metrics["loss/reference_kl"] == pytest.approx(reference_kl, rel=1e-4)
    assert stats.loss_tokens == batch.loss_mask.sum()
    assert stats.metrics["loss/cap_fraction"] > 0
    assert_close(
        gradient(one), {name: leaf.grad.numpy() for name, leaf in leaves.items() if leaf.grad is not None}, 1e-4
    )


@pytest.mark.parametrize("mean", MEANS)
@pytest.mark.parametrize("unit", ["rollout", "sequence"])
def test_rollouts_of_several_sequences_have_the_loss_of_separate_ones(mean: str, unit: str):
    """In float64: sequences packed as they are trained on, and one after the other with the weights that
    docs/algorithm.md gives. One of five groups is masked out in part."""
    algorithm = AlgorithmConfig(loss_mean=mean, loss_unit=unit, clip_eps_high=0.3, truncated="mask")
    payloads = {group: branched(7 * group) for group in range(3)}
    credits = credits_of(np.random.default_rng(0).normal(size=(3, 4))[:, BRANCHES], list(payloads.values()))
    batch = build_batch(
        1, whole(payloads, range(3)), payloads, credits,
        capacity=24, algorithm=algorithm, max_new_tokens=LIMIT, share_prompts=True,
    )  # fmt: skip
    leaves = {name: tensor.double().requires_grad_() for name, tensor in weights().items()}

    def terms(packed: Packed, weight: np.ndarray) -> Tensor:
        current, _ = completion_logprobs(SPEC, leaves, packed)
        known = {
            "behaviour": batch.behaviour_logprobs,
            "advantages": batch.advantages,
            "mask": batch.loss_mask,
            "weights": weight,
            "staleness": batch.step - 1 - batch.versions,
        }
        shown = {name: torch.from_numpy(values[packed.source]) for name, values in known.items()}
        nowhere = torch.zeros(len(current), dtype=torch.int64)
        tokens = Tokens(current=current, proximal=current.detach(), sequence=nowhere, sequences=1, **shown)
        return policy_loss(tokens, algorithm, denominator=1.0).loss

    def gradient_of(loss: Tensor) -> list[np.ndarray]:
        found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        return [each.numpy() for each in found if each is not None]

    together = sum(terms(packed, batch.weights.astype(np.float64)) for packed in batch.microbatches[0])
    together = together / float(batch.denominator_terms.sum())

    ends = np.cumsum(batch.lengths)
    spans = zip(ends - batch.lengths, ends, strict=True)
    counted = np.array([batch.loss_mask[start:end].sum() for start, end in spans])
    rollouts = np.concatenate([BRANCHES + 4 * group for group in range(3)])
    units = rollouts if unit == "rollout" else np.arange(len(rollouts))
    of_unit = np.bincount(units, counted)
    apart = torch.zeros((), dtype=torch.float64)
    for index, number in enumerate(units):
        weight = np.float32(1.0 / max(of_unit[number], 1.0)) if mean == "sequence" else 1.0  # as batches hold it
        laid = batch.tokens, batch.lengths, batch.prompt_lengths
        apart = apart + terms(pack(*laid, [index]), np.full(len(batch.tokens), weight))
    there = float((of_unit > 0).sum())
    apart = apart / {"token": float(counted.sum()), "sequence": there, "constant": there * LIMIT}[mean]

    assert together.item() == pytest.approx(apart.item(), rel=1e-9)
    for one, other in zip(gradient_of(together), gradient_of(apart), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-9 * np.abs(other).max())


# -- version 0 -------------------------------------------------------------------------------------------------


def test_the_reference_is_version_0_also_after_a_resume():
    algorithm = AlgorithmConfig(kl_coef=0.1)
    batch = share(algorithm)
    one = engine(algorithm)
    base = one.logprobs(batch)
    np.testing.assert_array_equal(one.reference_logprobs(batch), base)
    step(one, batch)
    np.testing.assert_array_equal(one.reference_logprobs(batch), base)
    assert np.abs(one.logprobs(batch) - base).max() > 1e-3
    resumed = engine(algorithm)  # made of the base model's folder, as a restarted trainer is
    resumed.load_state(one.state())
    np.testing.assert_array_equal(resumed.logprobs(batch), one.logprobs(batch))
    np.testing.assert_array_equal(resumed.reference_logprobs(batch), base)
    assert step(resumed, batch) == step(one, batch)


# -- nothing to learn ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", [AlgorithmConfig(), EVERYTHING], ids=["plain", "regularised"])
@pytest.mark.parametrize("lockstep", [False, True])
def test_a_batch_without_loss_tokens_is_no_update(algorithm: AlgorithmConfig, lockstep: bool):
    """Every completion is truncated, and those are masked: the step leaves everything as it was."""
    batch = share(algorithm, minibatches=2)
    nothing = replace(
        batch, loss_mask=np.zeros_like(batch.loss_mask), denominator_terms=np.zeros_like(batch.denominator_terms)
    )
    one = engine(algorithm, training=TRAINING)
    one.lockstep = lockstep
    before = one.state()
    stats = step(one, nothing)
    assert (stats.updates, stats.loss_tokens) == (0, 0)
    assert (stats.loss, stats.grad_norm, stats.update_norm) == (0, 0, 0)
    assert (stats.metrics, stats.train_inference_kl) == ({}, None)
    assert all(np.isfinite(value) for value in numbers(stats).values() if value is not None)
    after = one.state()
    assert after.scalars == before.scalars
    for name, values in before.arrays.items():
        np.testing.assert_array_equal(after.arrays[name], values)
