"""The emulated engine: completions take an accelerator's time, and almost none of this machine's.

No model runs. The request's seed determines a completion's length. Its tokens are filler that ends with the stop token,
and its log-probabilities are constant. Only the timing is realistic. One `step` covers several decode steps, as many as
fit into a few milliseconds, but never goes beyond the end of a completion. So between two events all running
completions advance equally.

Time and the KV cache (`Slots.cached`) count real tokens. Requests and completions count wire tokens, each of which
stands for `tokens_per_token` real ones. A wire token carries the version that sampled its last real token.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from areal_core.config.groups import EmulationConfig
from areal_core.generation.engines.engine import Generation
from areal_core.generation.engines.scheduler import Group, SlotEngine, uniforms
from areal_core.models.spec import ModelSpec, check_shapes, stored_tensors, weight_shapes
from areal_core.planning.time_model import Pace, TimeModel, completion_length
from areal_core.types import Int32Array

_SLICE_S = 0.004  # real seconds of a step at most, or one decode step: bounds the delay of commands
_LOGPROB = -0.1  # nats, of every token
_SWAP_S = 5.0  # real seconds that a swap blocks at most: callers don't wait much longer
_ADMIT_BELOW = 0.9  # share of the KV cache; the rest is room for growth


class EmulatedEngine(SlotEngine):
    """A `ServedEngine` with the timing of an accelerator."""

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
        """`slots`, `context` (wire tokens) and the KV cache bound running completions.

        `switches`: the same accelerators train. New model weights then come with the switch back to generation, whose
        time counts for the trainer. Raises ConfigError for a model that does not fit.
        """
        super().__init__(spec, slots=slots, context=context, version=version)
        self._scale = emulation.tokens_per_token
        self._time = TimeModel(emulation)
        self._emulation = emulation
        self._handover_s = 0.0 if switches else emulation.handover_s
        self._pace = pace or Pace(emulation.speed)
        self._left = np.zeros(slots, dtype=np.int64)  # for each slot: real tokens left in its completion
        self._stops = np.zeros(slots, dtype=np.bool_)  # for each slot: whether a stop token ends it, not the limit
        self._preempted: list[int] = []  # slots of completions preempted by a full cache, the newest first
        self._owed_s = 0.0  # emulated seconds that must pass before decoding continues
        self._stale = False  # whether the KV cache was cleared
        self._labelled = version  # version label of tokens to come
        self._interrupted = True  # whether something else took time since the last step

    @property
    def waiting(self) -> int:
        return super().waiting + len(self._preempted)

    def read(self, file: Path) -> None:
        """Check only that the tensors are present and have the right shapes; nothing is computed with them."""
        check_shapes(weight_shapes(self.spec), stored_tensors(file))

    def prepare(self, weights: None) -> None:
        """Take the time of the model weights' transfer, while decoding continues."""
        Pace(self._pace.speed).spend(self._time.transfer_s())

    def swap(self, prepared: None, version: int, /, *, recompute: bool = True) -> None:
        super().swap(prepared, version, recompute=recompute)
        self.stats.swap_ms = 1e3 * self._handover_s / self._pace.speed
        self._stand_still(self._handover_s + self._recompute_s())

    def clear_cache(self) -> None:
        super().clear_cache()
        self._stale = self._interrupted = True

    def step(self) -> list[Generation]:
        """Let a few milliseconds or one decode step pass. Returns finished completions."""
        self._owed_s += self._recompute_s()
        if not self.running:
            self._interrupted = True
        return super().step()

    def _use(self, prepared: None) -> None:
        self._interrupted = True

    def _schedule(self) -> None:
        """Charge for prefill, and give slots to waiting completions, preempted ones first."""
        while self._preempted:
            slot = self._preempted[0]
            tokens = int(self._table.cached[slot])
            if self.running and tokens > self._room():
                return
            self._owed_s += self._time.prefill_s([tokens])
            self._completion_in(slot)[0].reader = slot
            self._running = np.append(self._running, np.int32(self._preempted.pop(0)))
        super()._schedule()

    def _admissible(self, group: Group, count: int) -> int:
        fitting = int(self._room() // (len(group.request.token_ids) * self._scale))
        return min(count, max(fitting, 0 if self.running else 1))

    def _room(self) -> float:
        """Number of real tokens with which new completions may begin."""
        return _ADMIT_BELOW * self._time.kv_tokens - self._cached

    @property
    def _cached(self) -> int:
        """Number of real tokens in the KV cache."""
        return int(self._table.cached[self._running].sum())

    def _begin(self, group: Group, slots: Int32Array) -> None:
        table, request = self._table, group.request
        table.fill(slots, request, group.started)
        prompt = len(request.token_ids)
        if group.reader is None:  # one prefill serves all completions of the prompt
            group.reader = int(slots[0])
            self._owed_s += self._time.prefill_s([prompt * self._scale])
        table.cached[slots] = prompt * self._scale
        table.versions[slots] = self.version
        table.logprobs[slots] = _LOGPROB
        table.tokens[slots, prompt:] = self._filler(group)
        limit = int(table.limit[slots[0]] - prompt) * self._scale
        shares = uniforms(table.seed[slots], np.zeros(len(slots), np.int64)).tolist()
        for slot, share in zip(slots.tolist(), shares, strict=True):
            wanted = completion_length(self._emulation, share)
            self._stops[slot] = stops = bool(request.stop_token_ids) and wanted < limit
            self._left[slot] = length = wanted if stops else limit
            if stops:
                table.tokens[slot, prompt + (length - 1) // self._scale] = request.stop_token_ids[0]

    def _filler(self, group: Group) -> int:
        """Return a token that every tokenizer can decode: one of the prompt, unless it is a stop token."""
        tokens, stops = group.request.token_ids, set(group.request.stop_token_ids)
        return next(token for token in (*reversed(tokens), *range(self.spec.vocab_size)) if token not in stops)

    def _decode(self) -> list[Generation]:
        """Let owed time pass, or as many decode steps as fit into a slice, up to the end of a completion."""
        if self._interrupted:
            self._interrupted = False
            self._pace.restart()
        budget_s = _SLICE_S * self._pace.speed
        if self._owed_s > 0:
            paid_s = min(self._owed_s, budget_s)
            self._owed_s -= paid_s
            self._pace.spend(paid_s)
            return []
        if not self.running:
            return []
        room, time = self._time.kv_tokens, self._time
        while self._cached + self.running > room and self.running > 1:
            self._preempted.insert(0, int(self._running[-1]))  # recomputed when it continues
            self._running = self._running[:-1]
        running, cached = self._running, self._cached
        steps = max(1, int(budget_s / time.decode_s(len(running), cached)))
        steps = min(steps, int(self._left[running].min()))
        if len(running) > 1:
            steps = min(steps, (room - cached) // len(running))
        self._pace.spend(time.decode_s(len(running), cached, steps))
        return self._advance(steps)

    def _advance(self, steps: int) -> list[Generation]:
        """Add `steps` real tokens to every running completion. At its end a partial wire token counts too."""
        table, running = self._table, self._running
        if self._labelled != self.version:
            for slot in (*running.tolist(), *self._preempted):
                table.versions[slot, table.length[slot] :] = self.version
            self._labelled = self.version
        table.cached[running] += steps
        self._left[running] -= steps
        prompt = table.prompt[running]
        sampled = table.cached[running] - prompt * self._scale
        ended = self._left[running] == 0
        length = prompt + np.where(ended, -(-sampled // self._scale), sampled // self._scale)
        grown = length - table.length[running]
        table.length[running] = length
        self.stats.generated_tokens += int(grown.sum())
        self.stats.rollout_tokens += int(grown[table.rollout[running]].sum())
        slots = running[ended].tolist()
        return self._release(slots, ["stop" if self._stops[slot] else "length" for slot in slots]) if slots else []

    def _release(self, slots: Sequence[int], reasons: Sequence[str]) -> list[Generation]:
        self._preempted = [slot for slot in self._preempted if slot not in slots]
        return super()._release(slots, reasons)

    def _stand_still(self, emulated_s: float) -> None:
        """Let time pass without decoding. Time beyond `_SWAP_S` is owed and passes in steps."""
        now_s = min(emulated_s, _SWAP_S * self._pace.speed)
        self._owed_s += emulated_s - now_s
        self._pace.restart()
        self._pace.spend(now_s)

    def _recompute_s(self) -> float:
        """Return the emulated seconds of recomputing the running completions' KV cache, if it was cleared."""
        if not self._stale:
            return 0.0
        self._stale = False
        lengths = self._table.cached[self._running].tolist()
        for slot in self._running.tolist():
            self._completion_in(slot)[0].reader = slot
        recompute_s = self._time.prefill_s(lengths)
        self.stats.recompute_ms = 1e3 * recompute_s / self._pace.speed
        self.stats.recomputed_tokens = sum(lengths) // self._scale
        return recompute_s
