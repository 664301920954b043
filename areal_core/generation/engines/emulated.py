"""The emulated engine: completions that take the time of an accelerator, and hardly any of this machine's.

No model runs. A completion's length follows from its request's seed, its tokens are filler with the stop token at their
end, its log-probabilities a constant; what is true to life is when they come. Several decode steps pass in one `step`,
as many as fit into a few milliseconds, and never beyond the end of a completion, so that between two events every
running completion advances alike: a counter of decode steps says how far each of them is.

Time is counted in real tokens, requests and completions in tokens of the wire, each of which stands for
`tokens_per_token` real ones. A token of the wire carries the version under which its last real token was sampled.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from areal_core.api.wire import ROLLOUT
from areal_core.config.schema import EmulationConfig
from areal_core.errors import GenerationError
from areal_core.generation.engines.engine import EngineStats, Generation, check_request
from areal_core.generation.engines.sampling import stream_seed, uniforms
from areal_core.models.spec import ModelSpec, check_shapes, header_shapes
from areal_core.planning.time_model import Pace, TimeModel, completion_length
from areal_core.types import Completion, GenerationRequest

_SLICE_S = 0.004  # real seconds that a step takes at most, or one decode step: how soon commands are obeyed
_LOGPROB = -0.1  # nats, of every token
_SWAP_S = 5.0  # real seconds that a swap stands still at most: callers don't wait much longer for it
_ADMIT_BELOW = 0.9  # of the KV cache: the rest is for completions to grow into


@dataclass(slots=True)
class _Group:
    """A request under way."""

    request: GenerationRequest
    missing: int
    prefilled: bool = False  # its prompt's keys and values are in the cache, for all of its completions

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.token_ids)

    @property
    def is_rollout(self) -> bool:
        return self.request.request_id.startswith(ROLLOUT)


@dataclass(slots=True, eq=False)
class _Sequence:
    """A prompt and one completion of it that is not finished. Lengths in real tokens."""

    group: _Group
    index: int  # place in the group
    prompt: int
    target: int  # length at which it ends
    stops: bool  # by itself, rather than at the limit
    sampled: int = 0  # when it last took a slot
    since: int | None = None  # decode steps of the engine by then; None: it has no slot
    versions: list[tuple[int, int]] = field(default_factory=list)  # (wire tokens by then, version that ended there)


class EmulatedEngine:
    """A `ServedEngine` in the time of an accelerator. Not thread-safe, as the real one."""

    def __init__(
        self,
        spec: ModelSpec,
        emulation: EmulationConfig,
        *,
        slots: int,
        context: int | None = None,
        version: int = 0,
        switches: bool = False,
        pace: Pace | None = None,
    ) -> None:
        """`slots` and `context` (tokens of the wire) bound running completions; so does the KV cache. `switches`: the
        same accelerators train, so that new weights come with the change back to generation, which the trainer pays
        for. Raises ConfigError for a model that does not fit."""
        self.spec = spec
        self.version = version
        self.admitting = True
        self._slots = slots
        self._context = context or spec.context
        self._scale = emulation.tokens_per_token
        self._time = TimeModel(emulation)
        self._emulation = emulation
        self._handover_s = 0.0 if switches else emulation.handover_s
        self._pace = pace or Pace(emulation.speed)
        self._groups: dict[str, _Group] = {}  # by request id
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []  # in the order in which they took their slots
        self._ends: list[tuple[int, int, _Sequence]] = []  # heap: decode step of the end, a tie-breaker, sequence
        self._started = 0
        self._steps = 0  # decode steps so far
        self._cached = 0  # tokens in the KV cache
        self._owed_s = 0.0  # emulated seconds to pass before decoding goes on
        self._stale = False  # the KV cache was cleared
        self._interrupted = False  # by something that took its own time
        self._closed_tokens: Counter[bool] = Counter()  # of the wire, in ended completions: the rollout's, or not
        self._stats = EngineStats()

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def stats(self) -> EngineStats:
        sampled = self._closed_tokens.copy()
        for sequence in (*self._running, *self._waiting):
            sampled[sequence.group.is_rollout] += self._wire_tokens(sequence)
        self._stats.generated_tokens, self._stats.rollout_tokens = sampled.total(), sampled[True]
        return self._stats

    def check(self, request: GenerationRequest) -> None:
        check_request(request, self.spec, self._context)

    def add(self, request: GenerationRequest) -> None:
        self.check(request)
        if request.request_id in self._groups:
            raise GenerationError(f"request_id: {request.request_id} is already being served")
        group = _Group(request, missing=request.n)
        self._groups[request.request_id] = group
        self._waiting.extend(self._sequence(group, index) for index in range(request.n))

    def step(self) -> list[Generation]:
        """Let a few milliseconds pass, or one decode step; what this finished."""
        idle = not self._running
        self._schedule()
        if idle or self._interrupted:
            self._interrupted = False
            self._pace.restart()
        budget_s = _SLICE_S * self._pace.speed
        if self._owed_s > 0:
            paid_s = min(self._owed_s, budget_s)
            self._owed_s -= paid_s
            self._pace.spend(paid_s)
            return []
        if not self._running:
            return []
        self._decode(budget_s)
        return self._finish()

    def abort(self, request_ids: Collection[str] | None = None) -> list[Generation]:
        ids = self._groups.keys() if request_ids is None else self._groups.keys() & set(request_ids)
        doomed = {request_id: self._groups[request_id] for request_id in ids}
        waiting = [each for each in self._waiting if each.group.request.request_id in doomed]
        running = [each for each in self._running if each.group.request.request_id in doomed]
        self._waiting = deque(each for each in self._waiting if each.group.request.request_id not in doomed)
        self._leave(running)
        return [self._close(sequence, "abort") for sequence in (*running, *waiting)]

    def read(self, file: Path) -> None:
        """Nothing is computed with the weights: that they are there and of the right shapes is all that is asked."""
        check_shapes(self.spec, header_shapes(file))

    def prepare(self, weights: None) -> None:
        """Takes the time that the weights need to arrive, while decoding goes on."""
        Pace(self._pace.speed).spend(self._time.transfer_s())

    def swap(self, prepared: None, version: int, *, recompute: bool = True) -> None:
        for sequence in (*self._running, *self._waiting):
            if tokens := self._wire_tokens(sequence):
                sequence.versions.append((tokens, self.version))
        self.version = version
        self._stats.swap_ms = 1e3 * self._handover_s / self._pace.speed
        if recompute:
            self.clear_cache()
        self._interrupted = True
        self._stand_still(self._handover_s + self._recompute_s())

    def clear_cache(self) -> None:
        self._stale = self._interrupted = True
        for group in self._groups.values():
            group.prefilled = False

    def _schedule(self) -> None:
        """Charge for recomputation and prefill, and give free slots to waiting completions."""
        self._owed_s += self._recompute_s()
        while self.admitting and self._waiting and len(self._running) < self._slots:
            sequence = self._waiting[0]
            tokens = sequence.prompt + sequence.sampled
            if self._running and self._cached + tokens > _ADMIT_BELOW * self._time.kv_tokens:
                return
            self._start(self._waiting.popleft())

    def _stand_still(self, emulated_s: float) -> None:
        """Let time pass in which nothing is decoded; what is more than `_SWAP_S` is owed, and passes in steps."""
        now_s = min(emulated_s, _SWAP_S * self._pace.speed)
        self._owed_s += emulated_s - now_s
        self._pace.restart()
        self._pace.spend(now_s)

    def _recompute_s(self) -> float:
        """Emulated seconds of recomputing the KV cache of running completions, if it was cleared."""
        if not self._stale:
            return 0.0
        self._stale = False
        lengths = [sequence.prompt + self._sampled(sequence) for sequence in self._running]
        for sequence in self._running:
            sequence.group.prefilled = True
        recompute_s = self._time.prefill_s(lengths)
        self._stats.recompute_ms = 1e3 * recompute_s / self._pace.speed
        self._stats.recomputed_tokens = sum(lengths) // self._scale
        return recompute_s

    def _start(self, sequence: _Sequence) -> None:
        group, tokens = sequence.group, sequence.prompt + sequence.sampled
        if sequence.sampled or not group.prefilled:
            self._owed_s += self._time.prefill_s([tokens])
            group.prefilled = True
        sequence.since = self._steps
        self._cached += tokens
        self._started += 1
        self._running.append(sequence)
        heapq.heappush(self._ends, (self._steps + sequence.target - sequence.sampled, self._started, sequence))

    def _decode(self, budget_s: float) -> None:
        """Let as many decode steps pass as fit into the budget, at least one, up to the end of the next completion."""
        while self._cached + len(self._running) > self._time.kv_tokens and len(self._running) > 1:
            self._preempt()
        completions = len(self._running)
        steps = max(1, int(budget_s / self._time.decode_s(completions, self._cached)))
        steps = min(steps, self._ends[0][0] - self._steps)
        if completions > 1:
            steps = min(steps, (self._time.kv_tokens - self._cached) // completions)
        duration_s = self._time.decode_s(completions, self._cached, steps)
        self._steps += steps
        self._cached += steps * completions
        self._pace.spend(duration_s)

    def _preempt(self) -> None:
        """Preempt the newest completion, as the KV cache is full; it is recomputed when it has a slot again."""
        sequence = self._running[-1]
        self._leave([sequence])
        self._waiting.appendleft(sequence)

    def _finish(self) -> list[Generation]:
        ended: list[_Sequence] = []
        while self._ends and self._ends[0][0] == self._steps:
            ended.append(heapq.heappop(self._ends)[2])
        self._leave(ended)
        return [self._close(sequence, "stop" if sequence.stops else "length") for sequence in ended]

    def _leave(self, sequences: Iterable[_Sequence]) -> None:
        """Take running completions out of their slots; they keep what they have sampled."""
        leaving = set(sequences)
        for sequence in leaving:
            sampled = self._sampled(sequence)
            sequence.sampled, sequence.since = sampled, None
            self._cached -= sequence.prompt + sampled
        self._running = [sequence for sequence in self._running if sequence not in leaving]
        if any(end[2] in leaving for end in self._ends):
            self._ends = [end for end in self._ends if end[2] not in leaving]
            heapq.heapify(self._ends)

    def _close(self, sequence: _Sequence, finish_reason: str) -> Generation:
        """Record a completion's end."""
        group, completion = sequence.group, self._completion(sequence, finish_reason)
        group.missing -= 1
        self._closed_tokens[group.is_rollout] += len(completion.token_ids)
        if not group.missing:
            del self._groups[group.request.request_id]
        return Generation(request=group.request, completions={sequence.index: completion}, last=not group.missing)

    def _completion(self, sequence: _Sequence, finish_reason: str) -> Completion:
        request = sequence.group.request
        count = self._wire_tokens(sequence)
        tokens = np.full(count, self._filler(request), dtype=np.int32)
        if finish_reason == "stop":
            tokens[-1] = request.stop_token_ids[0]
        versions = np.full(count, self.version, dtype=np.int32)
        for end, version in reversed(sequence.versions):
            versions[:end] = version
        return Completion(
            token_ids=tokens,
            logprobs=np.full(count, _LOGPROB, dtype=np.float32),
            versions=versions,
            finish_reason=finish_reason,
        )

    def _filler(self, request: GenerationRequest) -> int:
        """A token that every tokenizer can decode: one of the prompt, unless it is a stop token."""
        stops = set(request.stop_token_ids)
        usable = (token for token in (*reversed(request.token_ids), *range(self.spec.vocab_size)) if token not in stops)
        return next(usable)

    def _sequence(self, group: _Group, index: int) -> _Sequence:
        request = group.request
        seed = np.array([stream_seed(request.seed, index)], dtype=np.uint64)
        wanted = completion_length(self._emulation, float(uniforms(seed, np.zeros(1, dtype=np.int64))[0]))
        limit = min(request.max_tokens, self._context - group.prompt_tokens) * self._scale
        stops = bool(request.stop_token_ids) and wanted < limit
        return _Sequence(
            group=group,
            index=index,
            prompt=group.prompt_tokens * self._scale,
            target=wanted if stops else limit,
            stops=stops,
        )

    def _sampled(self, sequence: _Sequence) -> int:
        """Real tokens so far."""
        return sequence.sampled + (0 if sequence.since is None else self._steps - sequence.since)

    def _wire_tokens(self, sequence: _Sequence) -> int:
        """Whole tokens of the wire so far; at the end of a completion a partial one counts as well."""
        sampled = self._sampled(sequence)
        return -(-sampled // self._scale) if sampled == sequence.target else sampled // self._scale
