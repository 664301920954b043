"""The embedded engine: continuous batching, interruptible between any two decode steps.

A step has three parts. *Schedule* gives free slots to waiting completions. *Run* passes all tokens without keys and
values through the model: one token of every running completion, new prompts, whole sequences after an update.
*Postprocess* records the sampled tokens and frees the slots of finished completions. A pass covers only the running
slots.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from areal_core.errors import DivergenceError, ModelError
from areal_core.generation.engines.engine import Generation
from areal_core.generation.engines.scheduler import Group, SlotEngine
from areal_core.generation.engines.slots import STOPPED, Batch, Decoder
from areal_core.models.adapters import merged, read_adapter, read_lora
from areal_core.models.spec import ModelSpec, read_arrays
from areal_core.types import Float32Array, Int32Array

if TYPE_CHECKING:
    from areal_core.generation.engines.decoder import CpuDecoder

# Bounds of a pass, beside one token of every completion. The first bounds the memory of activations. On a core the
# second bounds the time of a pass, 2 s on a slow core, because the server runs commands between two passes.
_PREFILL_TOKENS, _PREFILL_FLOPS = 2048, 1e11


class Engine(SlotEngine):
    """Decodes requests, each at its temperature or greedily.

    On a CPU, tokens and log-probabilities are bitwise batch-invariant between updates of the model weights, for one
    build on one kind of machine.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[str, Any],
        *,
        slots: int,
        context: int | None = None,
        version: int = 0,
        device: str = "cpu",
        base: Path | None = None,
    ) -> None:
        """`base` is the folder of the base model, for versions that are adapters to it."""
        super().__init__(spec, slots=slots, context=context, version=version)
        self._base = base
        self._device = device
        self._retired: CpuDecoder | None = None  # the previous decoder, whose memory the next one reuses
        self._decoder = self.prepare(weights)
        affordable = int(_PREFILL_FLOPS / (2 * spec.parameters)) if device == "cpu" else _PREFILL_TOKENS
        self._batch = Batch(self._table, slots + max(1, min(_PREFILL_TOKENS, affordable)))
        self._cache = self._decoder.cache(slots, self._batch.rows)
        self._recomputing = 0  # tokens left to recompute

    def read(self, file: Path) -> dict[str, Float32Array]:
        """Read the model weights of a safetensors file or folder; an adapter is added to the base model.

        The base model is read again each time. That is as fast as reading whole model weights, and keeps no memory
        meanwhile. Raises ModelError for model weights that the engine can't run.
        """
        if file.is_dir() or (lora := read_lora(file)) is None:
            return read_arrays(file, self.spec)
        if self._base is None:
            raise ModelError(f"{file}: holds an adapter, but this engine was created without its base model's folder")
        return merged(read_arrays(self._base, self.spec), read_adapter(file, self.spec, lora), lora)

    def prepare(self, weights: Mapping[str, Any]) -> Decoder:
        """Prepare model weights, as arrays or torch tensors, for `swap`.

        It has no effect on running completions, so another thread may call it. A replaced decoder must not be used
        again.
        """
        if self._device == "cpu":
            from areal_core.generation.engines.decoder import CpuDecoder  # imports kernels that a GPU doesn't need

            retired, self._retired = self._retired, None
            return CpuDecoder(self.spec, weights, self.context, retired)
        from areal_core.generation.engines.torch_decoder import TorchDecoder  # imports torch: seconds

        return TorchDecoder(self.spec, weights, self.context, self._device)

    def clear_cache(self) -> None:
        """Clear the KV cache. The next steps recompute that of running completions, a group's prompt once."""
        super().clear_cache()
        table, running = self._table, self._running
        for slot in running.tolist():
            group, _ = self._completion_in(slot)
            table.reader[slot] = -1 if group.reader is None else group.reader
            group.reader = slot if group.reader is None else group.reader
        table.cached[running] = 0
        shared = np.where(table.reader[running] >= 0, table.prompt[running], 0)  # prefilled once, elsewhere
        self._recomputing = int(np.maximum(table.length[running] - 1 - shared, 0).sum())
        self.stats.recomputed_tokens = self._recomputing
        self.stats.recompute_ms = 0.0

    def _use(self, prepared: Decoder) -> None:
        if self._device == "cpu" and prepared is not self._decoder:
            # Freeing a large model's memory takes longer than a decode step.
            self._retired = cast("CpuDecoder", self._decoder)
        self._decoder = prepared

    def _begin(self, group: Group, slots: Int32Array) -> None:
        table, reader = self._table, group.reader
        shared = len(group.request.token_ids) - 1  # the last one runs: its logits give the first sampled token
        is_prefilled = reader is not None and table.cached[reader] >= shared  # the reader may be in `slots`
        table.fill(slots, group.request, group.started)
        if reader is None:
            group.reader = int(slots[0])
            table.reader[slots[1:]] = group.reader
        elif is_prefilled:
            self._cache.copy(reader, slots, shared)
            table.cached[slots] = shared
        else:
            table.reader[slots] = reader

    def _decode(self) -> list[Generation]:
        """Sample one token for every running completion whose prefill is complete."""
        if not len(self._running):
            return []
        sampling, tokens, logprobs = self._run()
        finished = self._batch.record(sampling, tokens, logprobs, self.version)
        self.stats.generated_tokens += len(sampling)
        self.stats.rollout_tokens += int(np.count_nonzero(self._table.rollout[sampling]))
        ended = np.flatnonzero(finished)
        if not len(ended):
            return []
        return self._release(
            sampling[ended].tolist(), ["stop" if finished[at] == STOPPED else "length" for at in ended.tolist()]
        )

    def _run(self) -> tuple[Int32Array, Int32Array, Float32Array]:
        """Run a pass. Returns the slots that sample a token, their tokens and log-probabilities, each [A].

        Raises DivergenceError if logits are not finite.
        """
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
            self._recomputing = self._recomputing - recomputed if recomputed else 0  # 0: the rest was aborted
            self.stats.recompute_ms += 1e3 * (time.perf_counter() - start) * recomputed / len(rows.tokens)
        return sampling, *sampled
