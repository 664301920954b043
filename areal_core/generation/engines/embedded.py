"""The embedded engine: continuous batching, interruptible between any two decode steps.

A step has three parts: *schedule* gives free slots to waiting completions, *run* passes the tokens that lack keys and
values through the model (one token of every running completion, the prompts of new ones, whole sequences after an
update), *postprocess* records the sampled tokens and frees the slots of finished completions.

Completions stay in their slots; a pass runs the slots that are running, densely. Only one group at a time can be partly
started, and it has the first claim on every slot that becomes free: so its prompt's keys and values stay in the slot
where they were computed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from areal_core.errors import DivergenceError, GenerationError, ModelError
from areal_core.generation.engines.engine import EngineStats, Generation, check_request
from areal_core.generation.engines.slots import STOPPED, Batch, Decoder, Slots
from areal_core.models.adapters import merged, read_adapter, read_lora
from areal_core.models.arrays import read_arrays
from areal_core.models.spec import ModelSpec
from areal_core.types import Completion, Float32Array, GenerationRequest, Int32Array, Lora

if TYPE_CHECKING:
    from areal_core.generation.engines.decoder import CpuDecoder

# In one pass, beside one token of every completion. The first bounds the memory of activations; on a core the second
# bounds the time of a pass, 2 s on a slow one, between two of which a server does what it is asked to.
_PREFILL_TOKENS, _PREFILL_FLOPS = 2048, 1e11


@dataclass(slots=True)
class _Group:
    """A request under way. Its completions start in order, as slots become free."""

    request: GenerationRequest
    missing: int  # completions not finished
    started: int = 0
    reader: int | None = None  # slot that holds the prompt's keys and values, or is to prefill it

    @property
    def unstarted(self) -> int:
        return self.request.n - self.started


class Engine:
    """Decodes requests, each at its temperature or greedily. Not thread-safe: one thread calls it, between steps.

    On a CPU, tokens and log-probabilities are batch-invariant, to the bit. `deterministic` makes them so on other
    devices: see `TorchDecoder`. Both hold between updates of weights, for one build on one kind of machine.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[str, Any],
        *,
        slots: int,
        context: int | None = None,
        version: int = 0,
        deterministic: bool = False,
        device: str = "cpu",
        base: Path | None = None,
    ) -> None:
        """`base`: folder of the base model, for versions that are adapters to it."""
        self.spec = spec
        self._base = base
        self.slots = slots
        self.context = context or spec.context
        self.version = version
        self.admitting = True  # False: running completions go on, waiting ones stay where they are
        self.stats = EngineStats()
        self._deterministic = deterministic
        self._device = device
        self._retired: CpuDecoder | None = None  # the decoder before, whose memory the next one takes
        self._decoder = self.prepare(weights)
        self._groups: dict[str, _Group] = {}  # by request id
        self._waiting: deque[_Group] = deque()  # groups with completions that have not started
        self._running = np.empty(0, dtype=np.int32)  # slots, in the order in which their completions started
        self._free = list(range(slots))[::-1]
        self._completions: list[tuple[_Group, int] | None] = [None] * slots  # in each slot: a group and an index in it
        self._table = Slots(slots, self.context)
        affordable = int(_PREFILL_FLOPS / (2 * spec.parameters)) if device == "cpu" else _PREFILL_TOKENS
        self._batch = Batch(self._table, slots + max(1, min(_PREFILL_TOKENS, affordable)))
        self._cache = self._decoder.cache(slots, self._batch.rows)
        self._recomputing = 0  # tokens

    @property
    def running(self) -> int:
        """Completions in slots."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Completions without a slot."""
        return sum(group.unstarted for group in self._waiting)

    def check(self, request: GenerationRequest) -> None:
        """Raise GenerationError, its message starting with the field's name, if the request can't be served. Any thread
        may call it."""
        check_request(request, self.spec, self.context)

    def add(self, request: GenerationRequest) -> None:
        """Queue a request. Raises GenerationError as `check` does, and for an id that is being served."""
        self.check(request)
        if request.request_id in self._groups:
            raise GenerationError(f"request_id: {request.request_id} is already being served")
        group = _Group(request, missing=request.n)
        self._groups[request.request_id] = group
        self._waiting.append(group)

    def step(self) -> list[Generation]:
        """Sample one token for every running completion that is prefilled; returns what this finished."""
        if self.admitting and self._free and self._waiting:
            self._schedule()
        if not len(self._running):
            return []
        return self._postprocess(*self._run())

    def abort(self, request_ids: Collection[str] | None = None) -> list[Generation]:
        """End requests (None: all of them) now, with what they have; unknown ids are passed over."""
        ids = self._groups.keys() if request_ids is None else self._groups.keys() & set(request_ids)
        doomed = {request_id: self._groups[request_id] for request_id in ids}
        self._waiting = deque(group for group in self._waiting if group.request.request_id not in doomed)
        never_started: list[Generation] = []
        for group in doomed.values():
            unstarted = range(group.started, group.request.n)
            group.started, group.missing = group.request.n, group.missing - len(unstarted)
            if unstarted:
                never_started.append(self._ended(group, {index: _nothing() for index in unstarted}))
        slots = [slot for slot in self._running.tolist() if self._completion_in(slot)[0].request.request_id in doomed]
        return never_started + self._release(slots, ["abort"] * len(slots))

    def read(self, file: Path) -> dict[str, Float32Array]:
        """The weights of a safetensors file, those of an adapter added to the base model's. Raises ModelError for
        others than the engine can run."""
        lora = None if file.is_dir() else read_lora(file)
        return read_arrays(file, self.spec) if lora is None else self._adapted(file, lora)

    def _adapted(self, file: Path, lora: Lora) -> dict[str, Float32Array]:
        """The base model is read anew: it costs what reading whole weights does, and no memory in between."""
        if self._base is None:
            raise ModelError(f"{file}: holds an adapter, and this engine was made without the folder of its base model")
        adapter = read_adapter(file, self.spec, lora)
        return merged(read_arrays(self._base, self.spec), adapter, lora)

    def prepare(self, weights: Mapping[str, Any]) -> Decoder:
        """Weights, arrays or torch's tensors, made ready for `swap`; touches nothing that runs, so that another thread
        may do it. A decoder that was swapped out is not used again."""
        if self._device == "cpu":
            from areal_core.generation.engines.decoder import CpuDecoder  # kernels that a GPU does without

            retired, self._retired = self._retired, None
            return CpuDecoder(self.spec, weights, self.context, retired)
        from areal_core.generation.engines.torch_decoder import TorchDecoder  # seconds that a CPU does without

        return TorchDecoder(self.spec, weights, self.context, self._device, deterministic=self._deterministic)

    def swap(self, decoder: Decoder, version: int, *, recompute: bool = True) -> None:
        """Swap the weights. With `recompute` running completions go on with a KV cache of the new weights; without,
        their keys and values stay those of the weights that computed them."""
        start = time.perf_counter()
        if self._device == "cpu" and decoder is not self._decoder:
            self._retired = cast(
                "CpuDecoder", self._decoder
            )  # to free a large model's memory takes longer than a decode step
        self._decoder = decoder
        self.version = version
        if recompute:
            self.clear_cache()
        self.stats.swap_ms = 1e3 * (time.perf_counter() - start)

    def clear_cache(self) -> None:
        """Clear the KV cache: the next steps recompute that of running completions, a group's prompt once."""
        table = self._table
        for group in self._groups.values():
            group.reader = None
        for slot in self._running.tolist():
            group, _ = self._completion_in(slot)
            table.reader[slot] = -1 if group.reader is None else group.reader
            group.reader = slot if group.reader is None else group.reader
        table.cached[self._running] = 0
        running = self._running
        shared = np.where(table.reader[running] >= 0, table.prompt[running], 0)  # prefilled once, in another slot
        self._recomputing = int(np.maximum(table.length[running] - 1 - shared, 0).sum())
        self.stats.recomputed_tokens = self._recomputing
        self.stats.recompute_ms = 0.0

    def _schedule(self) -> None:
        """Give free slots to waiting completions, groups in the order of their arrival."""
        table, started = self._table, [self._running]
        while self._free and self._waiting:
            group = self._waiting[0]
            count, reader = min(len(self._free), group.unstarted), group.reader
            slots = np.array(self._free[-count:], dtype=np.int32)
            del self._free[-count:]
            shared = len(group.request.token_ids) - 1  # the last token is run: its logits give the first sampled one
            is_prefilled = reader is not None and table.cached[reader] >= shared
            table.fill(slots, group.request, group.started)
            if reader is None:
                group.reader = int(slots[0])
                table.reader[slots[1:]] = group.reader
            elif is_prefilled:
                self._cache.copy(reader, slots, shared)
                table.cached[slots] = shared
            else:
                table.reader[slots] = reader
            for slot in slots.tolist():
                self._completions[slot] = group, group.started
                group.started += 1
            started.append(slots)
            if not group.unstarted:
                self._waiting.popleft()
        self._running = np.concatenate(started)

    def _run(self) -> tuple[Int32Array, Int32Array, Float32Array]:
        """Slots that sample a token, their tokens and log-probabilities, each [A]."""
        start = time.perf_counter()
        rows, sampling, copying = self._batch.gather(self._running)
        sampled = self._decoder.run(self._cache, rows)
        if sampled is None:
            raise DivergenceError(f"logits of version {self.version} are not finite")
        readers = self._table.reader[copying]
        for reader in np.unique(readers).tolist():
            self._cache.copy(reader, copying[readers == reader], int(self._table.prompt[reader]))
        self._table.reader[copying] = -1
        if self._recomputing:
            recomputed = min(self._recomputing, len(rows.tokens) - len(rows.ends))
            self._recomputing = self._recomputing - recomputed if recomputed else 0  # else the rest was aborted
            self.stats.recompute_ms += 1e3 * (time.perf_counter() - start) * recomputed / len(rows.tokens)
        return sampling, *sampled

    def _postprocess(self, sampling: Int32Array, tokens: Int32Array, logprobs: Float32Array) -> list[Generation]:
        finished = self._batch.record(sampling, tokens, logprobs, self.version)
        self.stats.generated_tokens += len(sampling)
        self.stats.rollout_tokens += int(np.count_nonzero(self._table.rollout[sampling]))
        ended = np.flatnonzero(finished)
        if not len(ended):
            return []
        return self._release(
            sampling[ended].tolist(), ["stop" if finished[at] == STOPPED else "length" for at in ended.tolist()]
        )

    def _release(self, slots: Sequence[int], reasons: Sequence[str]) -> list[Generation]:
        """Take the completions out of these slots."""
        ended: dict[str, tuple[_Group, dict[int, Completion]]] = {}
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

    def _completion_in(self, slot: int) -> tuple[_Group, int]:
        completion = self._completions[slot]
        assert completion is not None
        return completion

    def _ended(self, group: _Group, completions: dict[int, Completion]) -> Generation:
        if not group.missing:
            del self._groups[group.request.request_id]
        return Generation(request=group.request, completions=completions, last=not group.missing)


def _nothing() -> Completion:
    empty = np.zeros(0, dtype=np.int32)
    return Completion(token_ids=empty, logprobs=np.zeros(0, dtype=np.float32), versions=empty, finish_reason="abort")
