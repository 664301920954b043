"""The shared part of engines: groups in slots, admission, interruption, random numbers.

This module uses neither torch nor compiled code.

Completions stay in their slots. At most one group is partly started, and it has the first claim on every free slot. So
its prompt's keys and values stay in the slot that computed them.

Random numbers are counter-based: they depend only on (seed, completion, position). So a request gives the same
completions in every batch, however often decoding is interrupted. No generator state has to be kept or moved.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from areal_core.api.wire import ROLLOUT
from areal_core.errors import GenerationError
from areal_core.generation.engines.engine import EngineStats, Generation
from areal_core.models.spec import ModelSpec
from areal_core.types import Completion, GenerationRequest, Int32Array

_MASK = (1 << 64) - 1
# SplitMix64 (Steele et al. 2014): its increment, 2^64 / golden ratio, and the factors of its finaliser.
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.integer]) -> NDArray[np.float64]:
    """Return one number in [0, 1) for each stream and position, both [N].

    It is output number `position` of a SplitMix64 generator that starts at `seed`. numba compiles this function too.

    Results are multiples of 2^-52. On a finer grid u * total could round up to total, which inversion would not find.
    """
    x = seeds + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_FIRST)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_SECOND)
    return ((x ^ (x >> np.uint64(31))) >> np.uint64(12)).astype(np.float64) * 2.0**-52


def stream_seed(seed: int, completion_index: int) -> int:
    """Return the seed of one completion's random stream, in [0, 2^64).

    Completion 0 of n has the seed of a single completion. Mixed twice, so that neighbouring seeds and completions are
    independent.
    """
    return _mix(_mix(seed) + completion_index * _GOLDEN)


def _mix(x: int) -> int:
    x &= _MASK
    x = (x ^ (x >> 30)) * _FIRST & _MASK
    x = (x ^ (x >> 27)) * _SECOND & _MASK
    return x ^ (x >> 31)


class Slots:
    """The sequences in the slots: a prompt and its completion so far. Every array has one row per slot."""

    def __init__(self, slots: int, context: int) -> None:
        self.tokens = np.zeros((slots, context), dtype=np.int32)  # prompt and completion
        self.logprobs = np.zeros((slots, context), dtype=np.float32)  # of the token in the same column, nats
        self.versions = np.zeros((slots, context), dtype=np.int32)
        self.length = np.zeros(slots, dtype=np.int32)  # tokens so far, prompt included
        self.prompt = np.zeros(slots, dtype=np.int32)
        self.limit = np.zeros(slots, dtype=np.int32)  # length at which the completion is cut off
        self.cached = np.zeros(slots, dtype=np.int32)  # tokens that have keys and values
        self.reader = np.full(slots, -1, dtype=np.int32)  # slot that computes this one's prompt; -1: none
        self.seed = np.zeros(slots, dtype=np.uint64)
        self.temperature = np.zeros(slots, dtype=np.float32)  # 0: greedy
        self.rollout = np.zeros(slots, dtype=np.bool_)  # whether the rollout requested it
        self.stops = np.full((slots, 1), -1, dtype=np.int32)  # end tokens, padded with -1

    def fill(self, slots: Int32Array, request: GenerationRequest, first: int) -> None:
        """Start the completions `first` and up of a request, with nothing cached."""
        prompt, stops = len(request.token_ids), request.stop_token_ids
        self.tokens[slots, :prompt] = request.token_ids
        self.length[slots] = self.prompt[slots] = prompt
        self.limit[slots] = min(prompt + request.max_tokens, self.tokens.shape[1])
        self.cached[slots], self.reader[slots] = 0, -1
        self.rollout[slots] = request.request_id.startswith(ROLLOUT)
        self.seed[slots] = [stream_seed(request.seed, index) for index in range(first, first + len(slots))]
        self.temperature[slots] = 0.0 if request.greedy else request.temperature
        missing = len(stops) - self.stops.shape[1]
        if missing > 0:
            self.stops = np.pad(self.stops, ((0, 0), (0, missing)), constant_values=-1)
        self.stops[slots] = (*stops, *[-1] * (self.stops.shape[1] - len(stops)))

    def completion(self, slot: int, finish_reason: str) -> Completion:
        span = slice(self.prompt[slot], self.length[slot])
        return Completion(
            token_ids=self.tokens[slot, span].copy(),
            logprobs=self.logprobs[slot, span].copy(),
            versions=self.versions[slot, span].copy(),
            finish_reason=finish_reason,
        )


@dataclass(slots=True)
class Group:
    """A running request. Its completions start in order, as slots become free."""

    request: GenerationRequest
    missing: int  # completions not finished
    started: int = 0
    reader: int | None = None  # slot that has the prompt's keys and values, or will prefill them

    @property
    def unstarted(self) -> int:
        return self.request.n - self.started


class SlotEngine(ABC):
    """A `ServedEngine` without a model. Not thread-safe: one thread calls it, between steps."""

    def __init__(self, spec: ModelSpec, *, slots: int, context: int | None, version: int) -> None:
        self.spec = spec
        self.slots = slots
        self.context = context or spec.context
        self.version = version
        self.admitting = True  # False: running completions continue, waiting ones keep waiting
        self.stats = EngineStats()
        self._groups: dict[str, Group] = {}  # by request id
        self._waiting: deque[Group] = deque()  # groups with completions that have not started
        self._running = np.empty(0, dtype=np.int32)  # slots, in the order in which their completions started
        self._free = list(range(slots))[::-1]
        self._completions: list[tuple[Group, int] | None] = [None] * slots  # for each slot: group and index
        self._table = Slots(slots, self.context)

    # -- to be implemented -------------------------------------------------------------------------------------

    @abstractmethod
    def _use(self, prepared: Any) -> None:
        """Decode with these weights from now on."""

    @abstractmethod
    def _begin(self, group: Group, slots: Int32Array) -> None:
        """Fill slots with the next completions of a group."""

    @abstractmethod
    def _decode(self) -> list[Generation]:
        """Run the rest of a step. Returns the completions that finished."""

    def _admissible(self, group: Group, count: int) -> int:
        """Return how many of the next `count` completions of a group may start now."""
        return count

    # -- shared by all engines ---------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """Number of completions being decoded."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Number of completions without a slot."""
        return sum(group.unstarted for group in self._waiting)

    def check(self, request: GenerationRequest) -> None:
        """Raise GenerationError, its message starting with the field's name, if the request can't be served.

        Any thread may call it.
        """
        if not request.token_ids:
            raise GenerationError("token_ids: must hold at least one token")
        last = self.spec.vocab_size - 1
        for name in ("token_ids", "stop_token_ids"):
            for token in getattr(request, name):
                if not 0 <= token <= last:
                    raise GenerationError(f"{name}: must be token ids from 0 to {last}, got {token}")
        if len(request.token_ids) >= self.context:
            raise GenerationError(
                f"token_ids: a prompt may have {self.context - 1} tokens, as the context has {self.context}; "
                f"this one has {len(request.token_ids)}"
            )

    def add(self, request: GenerationRequest) -> None:
        """Queue a request. Raises GenerationError as `check` does, and for a request id already being served."""
        self.check(request)
        if request.request_id in self._groups:
            raise GenerationError(f"request_id: {request.request_id} is already being served")
        group = self._groups[request.request_id] = Group(request, missing=request.n)
        self._waiting.append(group)

    def step(self) -> list[Generation]:
        """Give free slots to waiting completions and decode for a while. Returns the completions that finished."""
        if self.admitting:
            self._schedule()
        return self._decode()

    def abort(self, request_ids: Collection[str] | None = None) -> list[Generation]:
        """End requests (None: all) now, with their tokens so far; unknown ids are ignored."""
        ids = set(self._groups) if request_ids is None else self._groups.keys() & set(request_ids)
        doomed = [self._groups[request_id] for request_id in ids]
        self._waiting = deque(group for group in self._waiting if group.request.request_id not in ids)
        never_started: list[Generation] = []
        for group in doomed:
            unstarted = range(group.started, group.request.n)
            group.started, group.missing = group.request.n, group.missing - len(unstarted)
            if unstarted:
                never_started.append(self._ended(group, {index: _nothing() for index in unstarted}))
        slots = [slot for slot, held in enumerate(self._completions) if held and held[0].request.request_id in ids]
        return never_started + self._release(slots, ["abort"] * len(slots))

    def swap(self, prepared: Any, version: int, /, *, recompute: bool = True) -> None:
        """Swap the model weights. With `recompute`, running completions continue with a KV cache of the new weights.

        Without, they keep their old keys and values.
        """
        start = time.perf_counter()
        self._use(prepared)
        self.version = version
        if recompute:
            self.clear_cache()
        self.stats.swap_ms = 1e3 * (time.perf_counter() - start)

    def clear_cache(self) -> None:
        """Clear the KV cache. The next steps recompute that of running completions."""
        for group in self._groups.values():
            group.reader = None

    def _schedule(self) -> None:
        """Give free slots to waiting completions, groups in order of arrival."""
        while self._free and self._waiting:
            group = self._waiting[0]
            count = self._admissible(group, min(len(self._free), group.unstarted))
            if not count:
                return
            slots = np.array(self._free[-count:], dtype=np.int32)
            del self._free[-count:]
            self._begin(group, slots)
            for slot in slots.tolist():
                self._completions[slot] = group, group.started
                group.started += 1
            self._running = np.concatenate((self._running, slots))
            if not group.unstarted:
                self._waiting.popleft()

    def _release(self, slots: Sequence[int], reasons: Sequence[str]) -> list[Generation]:
        """Remove the completions from these slots and return them."""
        ended: dict[str, tuple[Group, dict[int, Completion]]] = {}
        for slot, reason in zip(slots, reasons, strict=True):
            group, index = self._completion_in(slot)
            its = ended.setdefault(group.request.request_id, (group, {}))[1]
            its[index] = self._table.completion(slot, reason)
            group.missing -= 1
            self._completions[slot] = None
        stays = np.ones(self.slots, dtype=np.bool_)
        stays[slots] = False
        self._running = self._running[stays[self._running]]
        self._free += slots
        return [self._ended(group, completions) for group, completions in ended.values()]

    def _completion_in(self, slot: int) -> tuple[Group, int]:
        completion = self._completions[slot]
        assert completion is not None
        return completion

    def _ended(self, group: Group, completions: dict[int, Completion]) -> Generation:
        if not group.missing:
            del self._groups[group.request.request_id]
        return Generation(request=group.request, completions=completions, last=not group.missing)


def _nothing() -> Completion:
    empty = np.zeros(0, dtype=np.int32)
    return Completion(token_ids=empty, logprobs=np.zeros(0, dtype=np.float32), versions=empty, finish_reason="abort")
