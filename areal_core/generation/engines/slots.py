"""The layout of a forward pass over the sequences in the slots, and the interface of decoders, which run it.

A sequence is a prompt and its completion so far. `cached` of its tokens have keys and values: a pass runs the ones that
have none, so that a running completion (all but one), a new prompt (none) and a sequence whose cache was cleared (none)
are one case. Completions of one group share a prompt: one of them, its reader, prefills it; the others wait for that,
copy the prompt's keys and values and, where they have no token yet, sample from the same logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from areal_core.generation.engines.scheduler import Slots, uniforms
from areal_core.models.vectors import compiled
from areal_core.types import Float32Array, Int32Array

STOPPED, CUT_OFF = 1, 2  # how `record` says that a completion is finished


@dataclass(frozen=True, slots=True)
class Pass:
    """The rows of a forward pass, each one token of the sequence in a slot, and the completions that sample from them.

    The rows of one slot follow each other, in order, and go on where its cache ends."""

    tokens: Int32Array  # [M]
    slots: Int32Array  # [M]
    positions: Int32Array  # [M]
    ends: Int32Array  # [E] rows that are the last of their sequence, ascending
    of: Int32Array  # [A] which of `ends` a completion samples from
    temperatures: Float32Array  # [A] 0: the most probable token
    uniforms: NDArray[np.float64]  # [A] in [0, 1)


class Decoder(Protocol):
    """The weights of one version, ready to run. Immutable: an update makes another one and swaps the two."""

    def cache(self, slots: int, rows: int) -> Any:
        """An empty cache, good for every decoder of the same model, for passes of up to `rows` rows."""
        ...

    def run(self, cache: Any, rows: Pass) -> tuple[Int32Array, Float32Array] | None:
        """Add keys and values of the rows to the cache; next tokens and their log-probabilities, both [A]. None if
        logits are not finite."""
        ...


class Batch:
    """Lays out forward passes of at most `rows` rows, at least one for each slot."""

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
        """The next pass over running slots, the slots that sample a token from it, and those that have waited for their
        prompt and are to copy it from their reader once it ran.

        Completions that lack one token come first: however many prompts there are to prefill, decoding goes on."""
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
        """Append the sampled tokens; returns for each slot whether its completion is STOPPED, CUT_OFF or neither."""
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
