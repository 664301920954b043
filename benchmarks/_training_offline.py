"""Measurements of `benchmarks.training` without a run, in processes of one thread: batches, arms and their cost.

Each function runs in a process of its own and returns its result to the benchmark.
"""

from __future__ import annotations

import dataclasses
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import psutil
from numpy.typing import NDArray
from torch import Tensor

from areal_core.__main__ import configuration
from areal_core.config.schema import RunConfig
from areal_core.environments.arithmetic import training_chain
from areal_core.models.folders import ModelSpec, init_weights
from areal_core.training.batching.packing import Packed, pack
from areal_core.training.batching.partition import Part
from areal_core.training.engines.engine import TrainingBatch, build_batch
from areal_core.training.engines.torch_engine import TorchEngine
from areal_core.training.warmup import embedded_spec
from areal_core.types import Float32Array
from benchmarks._harness import in_turns
from benchmarks._padded_training import PaddedTraining
from tests.support.records import credits_of, group_payload

BATCH_TOKENS = 8192  # real ones, prompts included; the group that goes beyond is the last one
SORTED_CAPACITIES = (512, 1024, 2048, 4096)  # tokens of a padded micro-batch; the fastest counts
PACKED_CAPACITIES = (1024, 2048, 4096)  # of a packed one, beside the whole batch as one; again the fastest counts
LONGEST = 448  # tokens of a sequence of the long-tailed setting; the paper's are up to 28672
CAPACITIES = (512, 1024, 2048, 4096, 8192)
_PROMPT, _MEDIAN, _SIGMA = 16, 64, 0.8  # tokens of a prompt; log-normal tokens of a completion
_LONG_PROMPT, _SHORT_COMPLETIONS = 200, (50,) * 8
_TOLERANCE = 1e-4  # of two gradients, relative to the largest entry of a tensor
_MIB = 1 << 20

Groups = Iterator[tuple[int, NDArray[np.int32]]]  # tokens of a prompt, [G] of its completions


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A model and the lengths of its sequences."""

    overrides: tuple[str, ...]  # of the default configuration
    groups: Callable[[RunConfig, int], Groups]  # endless, by seed

    @property
    def config(self) -> RunConfig:
        return configuration({}, ["training.minibatches=1", *self.overrides])


def long_tailed(config: RunConfig, seed: int) -> Groups:
    rng = np.random.default_rng(seed)
    while True:
        completions = np.exp(np.log(_MEDIAN) + _SIGMA * rng.normal(size=4)).round()
        yield _PROMPT, completions.clip(1, LONGEST - _PROMPT).astype(np.int32)


def worked_chains(config: RunConfig, seed: int) -> Groups:
    """Prompts of the default task's length, each with a group of worked solutions and their end tokens."""
    index = 0
    while True:
        chain = training_chain(seed, index, config.task.max_operations, config.task.length_decay)
        yield len(chain.prompt), np.full(config.algorithm.group_size, len(chain.worked) + 1, np.int32)
        index += 1


def long_prompts(config: RunConfig, seed: int) -> Groups:
    while True:
        yield _LONG_PROMPT, np.array(_SHORT_COMPLETIONS, np.int32)


SETTINGS = {
    "long_tail": Setting(
        overrides=(
            *("model.hidden_size=128", "model.layers=4", "model.intermediate_size=384"),
            f"model.context={LONGEST}",
        ),
        groups=long_tailed,
    ),
    "default": Setting(overrides=(), groups=worked_chains),
}
SHARING = {
    "default": SETTINGS["default"],
    "prompt200": Setting(overrides=("model.context=256",), groups=long_prompts),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedBatch(TrainingBatch):
    """A batch cut in order into packed micro-batches of a constant number of sequences.
    The number is the most that fit `capacity` if all sequences had the greatest length."""

    longest: int  # tokens

    def cut(self, members: Sequence[int]) -> tuple[Packed, ...]:
        size = self.capacity // self.longest
        return tuple(
            pack(self.tokens, self.lengths, self.prompt_lengths, members[start : start + size])
            for start in range(0, len(members), size)
        )


class Arm(Protocol):
    """An arm: one way to train."""

    def update(self, batch: TrainingBatch, proximal: Float32Array) -> float:
        """Cut the batch, run forward and backward passes, and step the optimiser. Return the loss."""
        ...

    def gradient(self) -> Mapping[str, Float32Array]:
        """Clipped gradient of the first update, times 1 - beta1."""
        ...


class PackedArm:
    """The engine of a run, on complete sequences, or with shared prompts that are computed once."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[str, Tensor],
        config: RunConfig,
        capacity: int | None = None,
        *,
        shared: bool = False,
    ) -> None:
        """`capacity` is C; None: that of the batch."""
        self._engine = TorchEngine(spec, weights, config.training, config.algorithm)
        self._capacity = capacity
        self._shared = shared

    def logprobs(self, batch: TrainingBatch) -> Float32Array:
        return self._engine.logprobs(batch)

    def update(self, batch: TrainingBatch, proximal: Float32Array) -> float:
        if not self._shared:
            batch = dataclasses.replace(batch, prompts=None)  # packs of whole sequences
        if self._capacity:
            batch = dataclasses.replace(batch, capacity=self._capacity)
        return self._engine.train_step(batch, proximal).loss

    def gradient(self) -> Mapping[str, Float32Array]:
        arrays = self._engine.state().arrays
        return {name.removeprefix("exp_avg/"): array for name, array in arrays.items() if name.startswith("exp_avg/")}


def arms(setting: Setting) -> dict[str, Arm]:
    """All arms, with the same model weights."""
    config = setting.config
    spec = embedded_spec(config)
    weights = init_weights(spec, 0)
    padded = partial(PaddedTraining, spec, weights, config.training, config.algorithm)
    return {
        **packed_arms(setting, shared=False),
        "padded": padded(None),
        **{f"sorted_{capacity}": padded(capacity) for capacity in SORTED_CAPACITIES},
    }


def packed_arms(setting: Setting, *, shared: bool) -> dict[str, Arm]:
    config = setting.config
    spec = embedded_spec(config)
    packed = partial(PackedArm, spec, init_weights(spec, 0), config, shared=shared)
    name = "shared" if shared else "packed"
    return {name: packed(), **{f"{name}_{capacity}": packed(capacity) for capacity in PACKED_CAPACITIES}}


def make_batch(setting: Setting, seed: int) -> TrainingBatch:
    """Make a batch of BATCH_TOKENS tokens in one minibatch, after an empty one.

    So the minibatch needs no pi_prox, like the first of a step. Every completion has an advantage, so that no arm
    leaves any out. Tokens are random."""
    config, rng = setting.config, np.random.default_rng(seed)
    vocabulary, payloads, total = embedded_spec(config).vocab_size, {}, 0
    for index, (prompt, completions) in enumerate(setting.groups(config, seed)):
        tokens = int(completions.sum())
        payloads[index] = group_payload(
            rng.integers(0, vocabulary, prompt).astype(np.int32),
            completions,
            tokens=rng.integers(0, vocabulary, tokens).astype(np.int32),
            logprobs=(rng.normal(size=tokens) / 10 - np.log(vocabulary)).astype(np.float32),
        )
        total += tokens + prompt * len(completions)
        if total >= BATCH_TOKENS:
            break
    groups = list(payloads.values())
    advantages = credits_of([2.0 * (np.arange(len(group.lengths)) % 2) - 1.0 for group in groups], groups)
    capacity = config.training.microbatch_tokens
    share = [Part(index, tuple(range(len(group.lengths)))) for index, group in payloads.items()]
    return build_batch(1, [[], share], payloads, advantages, capacity=capacity, share_prompts=True)


def recut(batch: TrainingBatch, how: str, capacity: int) -> TrainingBatch:
    """Cut the batch into micro-batches of complete sequences within `capacity`: "dynamic" or "fixed"."""
    if how == "dynamic":
        return dataclasses.replace(batch, capacity=capacity, prompts=None)
    values = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch) if field.init}
    return FixedBatch(**values | {"capacity": capacity, "groups": None, "longest": LONGEST})


# -- what a process does ----------------------------------------------------------------------------------------


def check(name: str) -> None:
    """Raise AssertionError unless all arms have the same loss and gradient on the same batch."""
    if name in SETTINGS:
        same_update(arms(SETTINGS[name]), make_batch(SETTINGS[name], 0))
    if name in SHARING:
        same_update(sharing_arms(SHARING[name]), make_batch(SHARING[name], 0))


def same_update(fresh: Mapping[str, Arm], batch: TrainingBatch) -> None:
    """Raise AssertionError unless these arms, before any update, have the same loss and gradient."""
    packed = fresh["packed"]
    assert isinstance(packed, PackedArm)
    # Somewhat off, so that ratios are not 1 and some are clipped.
    proximal = packed.logprobs(batch) + np.float32(0.25) * np.sin(np.arange(len(batch.tokens), dtype=np.float32))
    losses = {name: arm.update(batch, proximal) for name, arm in fresh.items()}
    expected = packed.gradient()
    for name, arm in fresh.items():
        assert np.isclose(losses[name], losses["packed"], rtol=1e-4, atol=1e-6), f"{name}: the losses differ: {losses}"
        for tensor, values in arm.gradient().items():
            off = np.abs(values - expected[tensor]).max() / np.abs(expected[tensor]).max()
            assert off < _TOLERANCE, f"{name}: the gradients differ: {tensor} by {off:.1e} of its largest entry"


def speeds(name: str, rounds: int) -> list[dict[str, float]]:
    """Real tokens per CPU second of each arm in each round, after one warm-up round.
    Every round has another batch and begins with another arm."""
    return _rounds(SETTINGS[name], arms(SETTINGS[name]), rounds)


def sharing(name: str, rounds: int) -> list[dict[str, float]]:
    """Speeds as in `speeds`, for packs of complete sequences and packs with shared prompts."""
    return _rounds(SHARING[name], sharing_arms(SHARING[name]), rounds)


def sharing_arms(setting: Setting) -> dict[str, Arm]:
    return packed_arms(setting, shared=False) | packed_arms(setting, shared=True)


def saved(name: str) -> float:
    """Tokens of a batch's trajectories over its tokens with one prompt per group."""
    batch = make_batch(SHARING[name], 0)
    assert batch.prompts is not None
    _, first = np.unique(batch.prompts, return_index=True)
    return len(batch.tokens) / (len(batch.tokens) - batch.prompt_lengths.sum() + batch.prompt_lengths[first].sum())


def _rounds(setting: Setting, contenders: Mapping[str, Arm], rounds: int) -> list[dict[str, float]]:
    proximal = PackedArm(embedded_spec(setting.config), init_weights(embedded_spec(setting.config), 0), setting.config)
    measured: list[dict[str, float]] = []
    for seed in range(rounds + 1):
        batch = make_batch(setting, seed)
        given = proximal.logprobs(batch)
        updates = {arm: partial(contenders[arm].update, batch, given) for arm in contenders}
        measured.append(_in_turns(updates, len(batch.tokens), seed))
    return measured[1:]


def cuts(rounds: int) -> list[dict[str, float]]:
    """Speeds as in `speeds` of the packed arm with both ways to cut long-tailed lengths ("dynamic_512" and so on)."""
    setting = SETTINGS["long_tail"]
    spec = embedded_spec(setting.config)
    packed = PackedArm(spec, init_weights(spec, 0), setting.config)
    measured: list[dict[str, float]] = []
    for seed in range(rounds + 1):
        batch = make_batch(setting, seed)
        given = packed.logprobs(batch)
        updates = {
            f"{how}_{capacity}": partial(packed.update, recut(batch, how, capacity), given)
            for capacity in CAPACITIES
            for how in ("dynamic", "fixed")
        }
        measured.append(_in_turns(updates, len(batch.tokens), seed))
    return measured[1:]


def peak_mib(how: str, capacity: int) -> float:
    """Peak memory of one update in MiB, above the memory of the process before it.
    Needs a fresh process, as an earlier peak would hide it."""
    setting = SETTINGS["long_tail"]
    spec = embedded_spec(setting.config)
    packed = PackedArm(spec, init_weights(spec, 0), setting.config)
    batch = recut(make_batch(setting, 0), how, capacity)
    given = np.zeros(len(batch.tokens), np.float32)
    packed.update(dataclasses.replace(batch, minibatches=((int(batch.lengths.argmin()),),)), given)  # libraries' own
    before = psutil.Process().memory_info().rss
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    packed.update(batch, given)
    highest = re.search(r"VmHWM:\s*(\d+) kB", Path(f"/proc/{os.getpid()}/status").read_text())
    assert highest is not None
    return (int(highest[1]) * 1024 - before) / _MIB


def _in_turns(updates: Mapping[str, Callable[[], float]], tokens: int, turn: int) -> dict[str, float]:
    taken: dict[str, float] = {}
    for name in in_turns(list(updates), turn):
        start = time.process_time()
        updates[name]()
        taken[name] = tokens / (time.process_time() - start)
    return taken
