"""The forward pass of a Qwen2, Qwen3 or Llama decoder on one CPU core, compiled by numba.

A pass runs rows. A row is one token of one sequence, at `position` in `slot` of the KV cache. It attends to all tokens
of its slot up to itself. So decoding a token, prefilling a prompt and recomputing a sequence after an update are the
same operation. One pass may do all of them at once, for any number of tokens per sequence, without padding.

Every number of a row is computed in a fixed order of operations, whatever other rows exist. So results are bitwise
batch-invariant.

Packed matrices [depth, width] are stored by panels of `COLUMNS` columns, [width / COLUMNS, depth, COLUMNS]. The cache
is [layers, slots, kv_heads, blocks, 2, LANES * head width]. A block holds LANES tokens: first their keys by dimension
[head width, LANES], then their values by token [LANES, head width].
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import types

from areal_core.models.vectors import (
    AVX512,
    LANES,
    add,
    compiled,
    exp,
    first_lanes,
    gated,
    lanes_max,
    lanes_sum,
    loaded,
    maximum,
    multiply,
    multiply_add,
    splatted,
    stored,
    subtract,
    tile,
    transpose,
)

# Rows and vectors of a product's tile in registers.
ROWS, _VECTORS = (4, 4) if AVX512 else (6, 1)
COLUMNS = _VECTORS * LANES

_tile = tile(ROWS, _VECTORS)


class Shape(NamedTuple):
    """Sizes of a model, and offsets of the model weights in their flat array.

    Fields with `_width` are rounded up to whole vectors or panels. Fields after `layer_size` are offsets in a layer.
    """

    layers: int
    hidden: int
    hidden_width: int
    heads: int
    kv_heads: int
    head_dim: int
    head_width: int
    qkv_width: int
    inner_width: int
    gate_up_width: int
    vocab: int
    vocab_width: int
    slots: int
    blocks: int
    embedding: int
    head: int
    norm: int
    first_layer: int
    layer_size: int
    input_norm: int
    qkv: int
    qkv_bias: int  # -1: none
    qk_norm: int  # of queries, then of keys; -1: none
    out: int
    mlp_norm: int
    gate_up: int
    down: int

    @property
    def size(self) -> int:
        """Number of floats of all model weights."""
        return self.first_layer + self.layers * self.layer_size


@compiled()
def _matmul(a, a_width, weights, at, depth, c, c_width, rows, accumulate):
    """c [rows, c_width] = a [rows, depth] @ the packed matrix at `at`, or += if `accumulate`.

    It also computes rows up to the next multiple of ROWS, with unused results.
    """
    for panel in range(0, c_width, COLUMNS):
        for row in range(0, rows, ROWS):
            _tile(
                a, row * a_width, a_width, 1, weights, at + panel * depth, COLUMNS, depth,
                c, row * c_width + panel, c_width, accumulate,
            )  # fmt: skip


@compiled()
def _normalise(x, weights, at, hidden, width, eps, rows, out):
    """RMS norm of rows [rows, width] over their first `hidden` columns."""
    for row in range(rows):
        start = row * width
        squares = np.float32(0.0)
        for column in range(hidden):
            squares += x[start + column] * x[start + column]
        scale = np.float32(1.0) / np.sqrt(squares / np.float32(hidden) + eps)
        for column in range(hidden):
            out[start + column] = x[start + column] * scale * weights[at + column]


@compiled()
def _normalise_heads(shape, qkv, weights, at, eps, rows):
    """RMS norm of each head of queries and keys, in place. Zero padding of a head stays zero."""
    for row in range(rows):
        for head in range(shape.heads + shape.kv_heads):
            first = row * shape.qkv_width + head * shape.head_width
            norm = at if head < shape.heads else at + shape.head_width
            squares = splatted(np.float32(0.0))
            for i in range(0, shape.head_width, LANES):
                squares = multiply_add(loaded(qkv, first + i), loaded(qkv, first + i), squares)
            scale = splatted(np.float32(1.0) / np.sqrt(lanes_sum(squares) / np.float32(shape.head_dim) + eps))
            for i in range(0, shape.head_width, LANES):
                scaled = multiply(loaded(qkv, first + i), scale)
                stored(multiply(scaled, loaded(weights, norm + i)), qkv, first + i)


@compiled()
def _rotate_and_keep(shape, layer, qkv, cosines, sines, slots, positions, rows, cache):
    """Rotate queries, scaled for attention, in place; write rotated keys and values into the cache."""
    half = shape.head_dim // 2
    scale = np.float32(1.0 / np.sqrt(shape.head_dim))
    block_size = 2 * LANES * shape.head_width
    for row in range(rows):
        position = np.int64(positions[row])
        angle = position * half
        for head in range(shape.heads):
            first = row * shape.qkv_width + head * shape.head_width
            for i in range(half):
                cosine, sine = cosines[angle + i] * scale, sines[angle + i] * scale
                a, b = qkv[first + i], qkv[first + half + i]
                qkv[first + i] = a * cosine - b * sine
                qkv[first + half + i] = b * cosine + a * sine
        block, lane = position // LANES, position % LANES
        for head in range(shape.kv_heads):
            place = (layer * shape.slots + slots[row]) * shape.kv_heads + head
            keys = (place * shape.blocks + block) * block_size + lane
            first = row * shape.qkv_width + (shape.heads + head) * shape.head_width
            for i in range(half):
                cosine, sine = cosines[angle + i], sines[angle + i]
                a, b = qkv[first + i], qkv[first + half + i]
                cache[keys + i * LANES] = a * cosine - b * sine
                cache[keys + (half + i) * LANES] = b * cosine + a * sine
            values = keys - lane + (LANES + lane) * shape.head_width
            first += shape.kv_heads * shape.head_width
            for i in range(0, shape.head_width, LANES):
                stored(loaded(qkv, first + i), cache, values + i)


@compiled()
def _attend(cache, at, width, query, query_at, count, scores, out, out_at):
    """Attention of one query head over the first `count` tokens of a slot's head, cached from `at` on.

    The last block may contain further tokens. They get weight 0, and the cache holds only finite numbers.
    """
    blocks = (count + LANES - 1) // LANES
    block_size = 2 * LANES * width
    highest = splatted(np.float32(-np.inf))
    for block in range(blocks):
        keys = at + block * block_size
        even = odd = splatted(np.float32(0.0))
        for i in range(0, width, 2):
            even = multiply_add(splatted(query[query_at + i]), loaded(cache, keys + i * LANES), even)
            odd = multiply_add(splatted(query[query_at + i + 1]), loaded(cache, keys + (i + 1) * LANES), odd)
        score = first_lanes(add(even, odd), count - block * LANES)
        stored(score, scores, block * LANES)
        highest = maximum(highest, score)
    highest = splatted(lanes_max(highest))
    total = splatted(np.float32(0.0))
    for block in range(blocks):
        weight = exp(subtract(loaded(scores, block * LANES), highest))
        stored(weight, scores, block * LANES)
        total = add(total, weight)
    scale = splatted(np.float32(1.0) / lanes_sum(total))
    for column in range(0, width, LANES):
        a = b = c = d = splatted(np.float32(0.0))
        for block in range(blocks):
            values = at + block * block_size + LANES * width + column
            first = block * LANES
            for i in range(0, min(LANES, count - first), 4):
                a = multiply_add(splatted(scores[first + i]), loaded(cache, values + i * width), a)
                b = multiply_add(splatted(scores[first + i + 1]), loaded(cache, values + (i + 1) * width), b)
                c = multiply_add(splatted(scores[first + i + 2]), loaded(cache, values + (i + 2) * width), c)
                d = multiply_add(splatted(scores[first + i + 3]), loaded(cache, values + (i + 3) * width), d)
        stored(multiply(add(add(a, b), add(c, d)), scale), out, out_at + column)


@compiled()
def _gate(gate_up, inner, width, rows):
    """Compute silu(gate) * up of rows [gate, up], and write it over the gate."""
    for row in range(rows):
        start = row * width
        for column in range(start, start + inner, LANES):
            stored(gated(loaded(gate_up, column), loaded(gate_up, column + inner)), gate_up, column)


_FLOATS = types.float32[::1]
_INTS = types.int32[::1]
_SHAPE = types.NamedUniTuple(types.int64, len(Shape._fields), Shape)


@compiled(
    types.void(
        _SHAPE, types.float32, _FLOATS, _FLOATS, _FLOATS, _FLOATS, _INTS, _INTS, _INTS, types.int64, _INTS, types.int64,
        _FLOATS, _FLOATS, _FLOATS, _FLOATS, _FLOATS, _FLOATS, _FLOATS,
    )
)  # fmt: skip
def forward(
    shape, eps, weights, cosines, sines, cache, tokens, slots, positions, rows, ends, n_ends,
    x, normed, qkv, mixed, gate_up, scores, logits,
):  # fmt: skip
    """Run rows through the model. Keys and values are added to the cache.

    The rows `ends` [n_ends], ascending, give logits [n_ends, vocab_width]. `x` to `scores` are buffers.
    """
    hidden, width = shape.hidden, shape.hidden_width
    for row in range(rows):
        token = np.int64(tokens[row])
        column = shape.embedding + token // COLUMNS * COLUMNS * hidden + token % COLUMNS
        for i in range(hidden):
            x[row * width + i] = weights[column + i * COLUMNS]
    heads_of_each = shape.heads // shape.kv_heads
    running = rows
    for layer in range(shape.layers):
        base = shape.first_layer + layer * shape.layer_size
        _normalise(x, weights, base + shape.input_norm, hidden, width, eps, rows, normed)
        if shape.qkv_bias >= 0:
            for row in range(rows):
                for i in range(0, shape.qkv_width, LANES):
                    stored(loaded(weights, base + shape.qkv_bias + i), qkv, row * shape.qkv_width + i)
        _matmul(normed, width, weights, base + shape.qkv, hidden, qkv, shape.qkv_width, rows, shape.qkv_bias >= 0)
        if shape.qk_norm >= 0:
            _normalise_heads(shape, qkv, weights, base + shape.qk_norm, eps, rows)
        _rotate_and_keep(shape, layer, qkv, cosines, sines, slots, positions, rows, cache)
        last = layer == shape.layers - 1
        if last:  # only these rows' outputs are needed
            running = n_ends
            for i in range(n_ends):
                for column in range(0, width, LANES):
                    stored(loaded(x, ends[i] * width + column), x, i * width + column)
        for i in range(running):
            row = np.int64(ends[i]) if last else i
            for head in range(shape.heads):
                place = (layer * shape.slots + slots[row]) * shape.kv_heads + head // heads_of_each
                at = place * shape.blocks * (2 * LANES * shape.head_width)
                query_at = row * shape.qkv_width + head * shape.head_width
                out_at = (i * shape.heads + head) * shape.head_width
                _attend(cache, at, shape.head_width, qkv, query_at, positions[row] + 1, scores, mixed, out_at)
        attended = shape.heads * shape.head_width
        _matmul(mixed, attended, weights, base + shape.out, attended, x, width, running, True)
        _normalise(x, weights, base + shape.mlp_norm, hidden, width, eps, running, normed)
        _matmul(normed, width, weights, base + shape.gate_up, hidden, gate_up, shape.gate_up_width, running, False)
        _gate(gate_up, shape.inner_width, shape.gate_up_width, running)
        _matmul(
            gate_up, shape.gate_up_width, weights, base + shape.down, shape.inner_width, x, width, running, True
        )  # fmt: skip
    _normalise(x, weights, shape.norm, hidden, width, eps, n_ends, normed)
    _matmul(normed, width, weights, shape.head, hidden, logits, shape.vocab_width, n_ends, False)


@compiled(
    types.boolean(_FLOATS, types.int64, types.int64, _INTS, types.int64, _FLOATS, types.float64[::1], _INTS, _FLOATS)
)
def draw(logits, vocab, width, ends, count, temperatures, uniforms, tokens, logprobs):
    """Sample a token for each of `count` completions from row `ends` of logits [., width].

    Sampling inverts the distribution at the completion's temperature and records its log-probability. Temperature 0
    takes the most probable token and records its log-probability at temperature 1. Returns False if any logit is not
    finite.
    """
    weights = np.empty(width, dtype=np.float32)
    for completion in range(count):
        row = ends[completion] * width
        temperature = temperatures[completion]
        greedy = temperature == 0.0
        scale = splatted(np.float32(1.0) if greedy else np.float32(1.0) / temperature)
        top, finite = splatted(np.float32(-np.inf)), splatted(np.float32(0.0))
        for i in range(0, vocab, LANES):
            logit = loaded(logits, row + i)
            finite = multiply_add(logit, splatted(np.float32(0.0)), finite)
            top = maximum(top, first_lanes(logit, vocab - i))
        highest = lanes_max(top)
        if lanes_sum(finite) != 0.0:
            return False
        total = 0.0
        for i in range(0, vocab, LANES):
            distance = first_lanes(subtract(loaded(logits, row + i), splatted(highest)), vocab - i)
            weight = exp(multiply(distance, scale))
            stored(weight, weights, i)
            total += lanes_sum(weight)
        chosen = 0
        if greedy:
            while logits[row + chosen] != highest:
                chosen += 1
        else:
            # First token at which the cumulative weight exceeds u * total: find the vector, then the lane.
            target, before, block = uniforms[completion] * total, 0.0, 0
            while True:
                weight = np.float64(lanes_sum(loaded(weights, block)))
                if before + weight > target or block + LANES >= vocab:
                    break
                before, block = before + weight, block + LANES
            for i in range(block, min(block + LANES, vocab)):
                if weights[i] > 0.0:
                    chosen = i
                    before += weights[i]
                    if before > target:
                        break
        tokens[completion] = chosen
        distance = np.float64(logits[row + chosen] - highest)
        logprobs[completion] = distance / (1.0 if greedy else np.float64(temperature)) - np.log(total)
    return True


@compiled(types.void(_FLOATS, types.int64, types.int64, _FLOATS, types.int64, types.int64))
def pack(matrix, outputs, depth, weights, at, first):
    """Write transformers' [outputs, depth] to columns `first` and up of the packed matrix at `at`."""
    squares = outputs // LANES * LANES if first % LANES == 0 else 0
    for output in range(0, squares, LANES):
        column = first + output
        place = at + column // COLUMNS * COLUMNS * depth + column % COLUMNS
        for i in range(0, depth // LANES * LANES, LANES):
            transpose(matrix, output * depth + i, depth, weights, place + i * COLUMNS, COLUMNS)
    for output in range(outputs):
        column = first + output
        place = at + column // COLUMNS * COLUMNS * depth + column % COLUMNS
        for i in range(depth // LANES * LANES if output < squares else 0, depth):
            weights[place + i * COLUMNS] = matrix[output * depth + i]
