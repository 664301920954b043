"""The layout of a forward pass over the sequences in the slots, and the interface of decoders.

A sequence is a prompt and its completion so far. Its first `cached` tokens have keys and values; a pass runs the
others. So a running completion, a new prompt and a sequence with a cleared cache are one case: all but one of the
tokens are cached, or none.

Completions of a group share a prompt. One of them, the reader, prefills it. The others wait, then copy the prompt's
keys and values. If they have no token yet, they sample from the same logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from areal_core.generation.engines.scheduler import Slots, uniforms
from areal_core.models.vectors import compiled
from areal_core.types import Float32Array, Int32Array

STOPPED, CUT_OFF = 1, 2  # why a completion is finished, as returned by `record`


@dataclass(frozen=True, slots=True)
class Pass:
    """The rows of a forward pass, and the completions that sample from them.

    Each row is one token of the sequence in a slot. The rows of a slot are contiguous and in order, and continue where
    its cache ends.
    """

    tokens: Int32Array  # [M]
    slots: Int32Array  # [M]
    positions: Int32Array  # [M]
    ends: Int32Array  # [E] rows that end their sequence, ascending
    of: Int32Array  # [A] index in `ends` of the row that a completion samples from
    temperatures: Float32Array  # [A] 0: greedy
    uniforms: NDArray[np.float64]  # [A] in [0, 1)


class Decoder(Protocol):
    """The model weights of one version, ready to run. Immutable: an update makes another decoder and swaps them."""

    def cache(self, slots: int, rows: int) -> Any:
        """Make an empty KV cache for passes of up to `rows` rows; it fits every decoder of the same model."""
        ...

    def run(self, cache: Any, rows: Pass) -> tuple[Int32Array, Float32Array] | None:
        """Add the rows' keys and values to the cache; sample tokens and their log-probabilities, each [A].

        Returns None if any logit is not finite.
        """
        ...


class Batch:
    """Lays out forward passes of at most `rows` rows, which must be at least one per slot."""

    def __init__(self, table: Slots, rows: int) -> None:
        slots = len(table.length)
        self.rows = rows
        self._table = table
        self._inputs = np.empty((3, rows), dtype=np.int32)  # tokens, slots, positions
        self._ends, self._of, self._sampling, self._copying = np.empty((4, slots), dtype=np.int32)
        self._end_of = np.empty(slots, dtype=np.int32)
        self._temperatures = np.empty(slots, dtype=np.float32)
        self._uniforms = np.empty(slots, dtype=np.float64)

    def gather(self, running: Int32Array) -> tuple[Pass, Int32Array, Int32Array]:
        """Return the next pass, the slots that sample from it, and the slots that then copy their prompt.

        The copying slots have waited for their reader. Completions that lack one token come first, so decoding
        continues however many prompts need prefill.
        """
        table, inputs = self._table, self._inputs
        rows, ends, sampling, copying = _gather(
            running, table.tokens, table.length, table.prompt, table.cached, table.reader, table.seed,
            table.temperature, *inputs, self._ends, self._of, self._sampling, self._copying, self._end_of,
            self._temperatures, self._uniforms,
        )  # fmt: skip
        batch = Pass(
            tokens=inputs[0, :rows],
            slots=inputs[1, :rows],
            positions=inputs[2, :rows],
            ends=self._ends[:ends],
            of=self._of[:sampling],
            temperatures=self._temperatures[:sampling],
            uniforms=self._uniforms[:sampling],
        )
        return batch, self._sampling[:sampling], self._copying[:copying]

    def record(
        self, sampling: Int32Array, tokens: Int32Array, logprobs: NDArray[np.float32], version: int
    ) -> NDArray[np.int8]:
        """Append the sampled tokens. Returns for each slot STOPPED, CUT_OFF or 0 (its completion continues)."""
        table = self._table
        finished = np.empty(len(sampling), dtype=np.int8)
        _record(
            sampling, tokens, logprobs, version, table.tokens, table.logprobs, table.versions, table.length,
            table.limit, table.stops, finished,
        )  # fmt: skip
        return finished


_uniforms = compiled()(uniforms)
_I1, _I2, _F1, _F2 = "int32[::1]", "int32[:, ::1]", "float32[::1]", "float32[:, ::1]"


@compiled(
    f"UniTuple(int64, 4)({_I1}, {_I2}, {_I1}, {_I1}, {_I1}, {_I1}, uint64[::1], {_F1},"
    f" {', '.join([_I1] * 8)}, {_F1}, float64[::1])"
)
def _gather(
    running, sequences, length, prompt, cached, reader, seed, temperature, tokens, slots, positions, ends, of, sampling,
    copying, end_of, temperatures, numbers,
):  # fmt: skip
    row = end = samples = copies = 0
    for prefilling in (False, True):
        for slot in running:
            missing = length[slot] - cached[slot]
            if reader[slot] >= 0 or (missing > 1) != prefilling:
                continue
            count = min(missing, len(tokens) - row)
            for position in range(cached[slot], cached[slot] + count):
                tokens[row], slots[row], positions[row] = sequences[slot, position], slot, position
                row += 1
            cached[slot] += count
            end_of[slot] = -1
            if count == missing:
                ends[end], end_of[slot] = row - 1, end
                of[samples], sampling[samples] = end, slot
                samples += 1
                end += 1
    for slot in running:
        if reader[slot] < 0 or cached[reader[slot]] < prompt[slot]:
            continue
        copying[copies] = slot
        copies += 1
        cached[slot] = length[slot] - 1 if length[slot] == prompt[slot] else prompt[slot]
        if length[slot] == prompt[slot] == length[reader[slot]] and end_of[reader[slot]] >= 0:
            cached[slot] = prompt[slot]
            of[samples], sampling[samples] = end_of[reader[slot]], slot
            samples += 1
    sampled = sampling[:samples]
    temperatures[:samples] = temperature[sampled]
    numbers[:samples] = _uniforms(seed[sampled], length[sampled] - prompt[sampled])
    return row, end, samples, copies


@compiled(f"void({_I1}, {_I1}, {_F1}, int64, {_I2}, {_F2}, {_I2}, {_I1}, {_I1}, {_I2}, int8[::1])")
def _record(
    sampling, tokens, logprobs, version, sequences, sequence_logprobs, versions, length, limit, stops, finished
):
    for sample in range(len(sampling)):
        slot, token = sampling[sample], tokens[sample]
        at = length[slot]
        sequences[slot, at], sequence_logprobs[slot, at], versions[slot, at] = token, logprobs[sample], version
        length[slot] = at + 1
        finished[sample] = CUT_OFF if length[slot] >= limit[slot] else 0
        for stop in stops[slot]:
            if stop == token:
                finished[sample] = STOPPED
