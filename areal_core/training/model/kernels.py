"""CPU kernels of training passes in float32, except matrix products, compiled by numba.

Arrays are flat, so an index is one number. Each row of `sequences` has four numbers: first token and number of tokens
of a sequence, then the same of its shared prompt (no tokens if it has none).

Axes: T packed tokens, H query heads, K key-value heads, D width of a head.
"""

from __future__ import annotations

import numpy as np
from numba import types

from areal_core.models.vectors import (
    LANES,
    add,
    compiled,
    divide,
    exp,
    first_lanes,
    gated,
    lanes_max,
    lanes_sum,
    loaded,
    maximum,
    multiply,
    multiply_add,
    round_up,
    splatted,
    stored,
    subtract,
    swapped,
    tile,
    transpose,
)

_ROWS = 6  # rows of a product's tile in registers, one vector wide; AVX2's 16 registers hold it
_QUERIES = 4 * _ROWS  # rows of scores in memory at once
_PARTIAL = 64  # rows per partial sum, so that rounding errors don't grow with the number of rows

_tile = tile(_ROWS, 1)
_padded = compiled()(round_up)


@compiled()
def _gather(source, at, stride, count, size, target, first, width):
    """Copy `count` rows of `size` numbers, `stride` apart, to rows `first` and up of target [., width]."""
    for row in range(count):
        there, here = at + row * stride, (first + row) * width
        if size == width:
            for i in range(0, size, LANES):
                stored(loaded(source, there + i), target, here + i)
        else:
            for i in range(size):
                target[here + i] = source[there + i]


@compiled()
def _scatter(source, first, width, scale, target, at, stride, count, size):
    """Reverse of `_gather`: add the rows times `scale` to target."""
    for row in range(count):
        there, here = (first + row) * width, at + row * stride
        if size == width:
            for i in range(0, size, LANES):
                stored(
                    multiply_add(loaded(source, there + i), splatted(scale), loaded(target, here + i)), target, here + i
                )
        else:
            for i in range(size):
                target[here + i] += source[there + i] * scale


@compiled()
def _dot(a, b, at, size, width):
    """Dot product of the rows of `size` numbers that begin at `at` in a and b."""
    total = np.float32(0.0)
    if size == width:
        sums = splatted(total)
        for i in range(at, at + size, LANES):
            sums = multiply_add(loaded(a, i), loaded(b, i), sums)
        return lanes_sum(sums)
    for i in range(at, at + size):
        total += a[i] * b[i]
    return total


@compiled()
def _read(source, sequence, stride, head, size, rows, width):
    """Copy the rows of one head that a sequence attends to: those of its prompt, then its own."""
    start, tokens, prompt, shared = sequence
    _gather(source, prompt * stride + head * size, stride, shared, size, rows, 0, width)
    _gather(source, start * stride + head * size, stride, tokens, size, rows, shared, width)


@compiled()
def _panels(rows, count, width, panels):
    """Interleave rows: [count, width] -> panels [count / LANES, width, LANES]."""
    for row in range(0, count, LANES):
        for i in range(0, width, LANES):
            transpose(rows, row * width + i, width, panels, row * width + i * LANES, LANES)


@compiled()
def _products(rows, at, width, panels, count, out, out_at, out_width):
    """Dot products of _ROWS rows with the first `count` rows in panels."""
    for column in range(0, count, LANES):
        _tile(rows, at, width, 1, panels, column * width, LANES, width, out, out_at + column, out_width, False)


@compiled()
def _mixed(weights, at, most, rows, width, count, out, out_at):
    """For _ROWS queries, sum the first `count` rows by the attention weights that begin at `at`."""
    for i in range(0, width, LANES):
        _tile(weights, at, most, 1, rows, i, width, count, out, out_at + i, width, False)


@compiled()
def _add_by_key(weights, most, queries, count, width, first, keys, of_keys):
    """of_keys [keys, width] += weights.T @ queries, of `count` queries.

    Query i sees the first `first` + i + 1 keys. Whole tiles of queries that see none of a tile's keys are skipped.
    """
    for key in range(0, keys, _ROWS):
        unseeing = max(0, key - first) // _ROWS * _ROWS
        for i in range(0, width, LANES):
            _tile(
                weights, unseeing * most + key, 1, most, queries, unseeing * width + i, width, count - unseeing,
                of_keys, key * width + i, width, True,
            )  # fmt: skip


@compiled()
def _four(sequences, number):
    return sequences[number, 0], sequences[number, 1], sequences[number, 2], sequences[number, 3]


@compiled()
def _longest(sequences):
    longest = 0
    for number in range(len(sequences)):
        longest = max(longest, sequences[number, 1] + sequences[number, 3])
    return longest


@compiled()
def _zeros(size):
    return np.zeros(size, dtype=np.float32)


@compiled()
def _softmax(scores, at, count, reach, scale):
    """Replace one query's scores by exp(score - highest), 0 from `count` on. Returns the highest score and the sum."""
    factor, top, sums = splatted(scale), splatted(np.float32(-np.inf)), splatted(np.float32(0.0))
    for i in range(0, reach, LANES):
        score = first_lanes(multiply(loaded(scores, at + i), factor), count - i)
        stored(score, scores, at + i)
        top = maximum(top, score)
    highest = lanes_max(top)
    top = splatted(highest)
    for i in range(0, reach, LANES):
        weight = exp(subtract(loaded(scores, at + i), top))
        stored(weight, scores, at + i)
        sums = add(sums, weight)
    return highest, lanes_sum(sums)


@compiled()
def _softmax_backward(weights, of_scores, at, count, reach, scale, highest, share, delta):
    """For one query, turn scores into attention weights, and the gradient of these into the scores'.

    Both are 0 from `count` on and for one vector beyond `reach`: a tile of keys may begin before the end of what a
    query sees and end after it.
    """
    factor, top, part, centre = splatted(scale), splatted(highest), splatted(share), splatted(delta)
    for i in range(0, reach, LANES):
        distance = first_lanes(subtract(multiply(loaded(weights, at + i), factor), top), count - i)
        weight = multiply(exp(distance), part)
        stored(weight, weights, at + i)
        of_score = multiply(multiply(weight, factor), subtract(loaded(of_scores, at + i), centre))
        stored(of_score, of_scores, at + i)
    stored(splatted(np.float32(0.0)), weights, at + reach)
    stored(splatted(np.float32(0.0)), of_scores, at + reach)


_FLOATS = types.float32[::1]
_SIZES = types.UniTuple(types.int64, 3)  # H, K, D


@compiled(types.void(_FLOATS, _FLOATS, _FLOATS, types.int64[:, ::1], _SIZES, types.float32, _FLOATS, _FLOATS))
def attend(query, key, value, sequences, sizes, scale, out, statistics):
    """Causal attention within sequences, by tiles of queries (FlashAttention, arXiv 2205.14135).

    query and out are [T, H, D], key and value [T, K, D]. `out` must be zero before. statistics [T, H, 2] receives each
    query's highest score and 1 / the sum of exp(score - highest). From these the backward pass recomputes the attention
    weights.
    """
    heads, kv_heads, size = sizes
    width = _padded(size, LANES)
    most = _padded(_longest(sequences), LANES) + LANES
    keys, values, panels = _zeros(most * width), _zeros(most * width), _zeros(most * width)
    queries, mixed, scores = _zeros(_QUERIES * width), _zeros(_QUERIES * width), _zeros(_QUERIES * most)
    for number in range(len(sequences)):
        sequence = start, tokens, _, shared = _four(sequences, number)
        context = _padded(shared + tokens, LANES)
        for head in range(heads):
            if head % (heads // kv_heads) == 0:
                kv_head = head // (heads // kv_heads)
                _read(key, sequence, kv_heads * size, kv_head, size, keys, width)
                _read(value, sequence, kv_heads * size, kv_head, size, values, width)
                _panels(keys, context, width, panels)
            for first in range(0, tokens, _QUERIES):
                count = min(_QUERIES, tokens - first)
                at = ((start + first) * heads + head) * size
                _gather(query, at, heads * size, count, size, queries, 0, width)
                for row in range(0, count, _ROWS):
                    reach = min(_padded(shared + first + row + _ROWS, LANES), context)
                    _products(queries, row * width, width, panels, reach, scores, row * most, most)
                    for each in range(row, min(row + _ROWS, count)):
                        highest, total = _softmax(scores, each * most, shared + first + each + 1, reach, scale)
                        place = 2 * ((start + first + each) * heads + head)
                        statistics[place], statistics[place + 1] = highest, np.float32(1.0) / total
                    _mixed(scores, row * most, most, values, width, reach, mixed, row * width)
                for each in range(count):
                    share = statistics[2 * ((start + first + each) * heads + head) + 1]
                    _scatter(mixed, each, width, share, out, at + each * heads * size, 0, 1, size)


@compiled(
    types.void(
        _FLOATS, _FLOATS, _FLOATS, types.int64[:, ::1], _SIZES, types.float32, _FLOATS, _FLOATS,
        _FLOATS, _FLOATS, _FLOATS, _FLOATS,
    )
)  # fmt: skip
def attend_backward(
    query, key, value, sequences, sizes, scale, out, statistics,
    of_out, of_query, of_key, of_value,
):  # fmt: skip
    """Gradients of `attend`'s inputs, each in its input's shape, from the gradient of its output.

    FlashAttention, Algorithm 4. `delta` is its D: the dot product of out and its gradient. The results must be zero
    before.
    """
    heads, kv_heads, size = sizes
    width = _padded(size, LANES)
    most = _padded(_longest(sequences), LANES) + LANES
    keys, key_panels, of_keys = _zeros(most * width), _zeros(most * width), _zeros(most * width)
    values, value_panels, of_values = _zeros(most * width), _zeros(most * width), _zeros(most * width)
    queries, of_queries, of_mixed = _zeros(_QUERIES * width), _zeros(_QUERIES * width), _zeros(_QUERIES * width)
    weights, of_scores = _zeros(_QUERIES * most), _zeros(_QUERIES * most)
    for number in range(len(sequences)):
        sequence = start, tokens, prompt, shared = _four(sequences, number)
        context = _padded(shared + tokens, LANES)
        group = heads // kv_heads
        for head in range(heads):
            kv_head = head // group
            if head % group == 0:
                _read(key, sequence, kv_heads * size, kv_head, size, keys, width)
                _read(value, sequence, kv_heads * size, kv_head, size, values, width)
                _panels(keys, context, width, key_panels)
                _panels(values, context, width, value_panels)
                of_keys[: context * width] = np.float32(0.0)
                of_values[: context * width] = np.float32(0.0)
            for first in range(0, tokens, _QUERIES):
                count = min(_QUERIES, tokens - first)
                at = ((start + first) * heads + head) * size
                _gather(query, at, heads * size, count, size, queries, 0, width)
                _gather(of_out, at, heads * size, count, size, of_mixed, 0, width)
                for row in range(0, count, _ROWS):
                    reach = min(_padded(shared + first + row + _ROWS, LANES), context)
                    _products(queries, row * width, width, key_panels, reach, weights, row * most, most)
                    _products(of_mixed, row * width, width, value_panels, reach, of_scores, row * most, most)
                    for each in range(row, min(row + _ROWS, count)):
                        delta = _dot(of_out, out, at + each * heads * size, size, width)
                        place = 2 * ((start + first + each) * heads + head)
                        _softmax_backward(
                            weights, of_scores, each * most, shared + first + each + 1, reach, scale,
                            statistics[place], statistics[place + 1], delta,
                        )  # fmt: skip
                    _mixed(of_scores, row * most, most, keys, width, reach, of_queries, row * width)
                _scatter(of_queries, 0, width, np.float32(1.0), of_query, at, heads * size, count, size)
                seen = shared + first + count
                _add_by_key(weights, most, of_mixed, count, width, shared + first, seen, of_values)
                _add_by_key(of_scores, most, queries, count, width, shared + first, seen, of_keys)
            if head % group == group - 1:
                for source, target in ((of_keys, of_key), (of_values, of_value)):
                    stride, one = kv_heads * size, np.float32(1.0)
                    _scatter(source, 0, width, one, target, prompt * stride + kv_head * size, stride, shared, size)
                    _scatter(source, shared, width, one, target, start * stride + kv_head * size, stride, tokens, size)


@compiled(types.void(_FLOATS, _FLOATS, types.float32, _FLOATS, _FLOATS))
def rms_norm(x, weight, eps, out, scales):
    """RMS norm (arXiv 1910.07467): out = x scale weight, scale = 1 / sqrt(mean(x^2) + eps) of each row.

    Shapes: x and out [T, W], scales [T].
    """
    width = len(weight)
    for row in range(len(scales)):
        at = row * width
        squares = np.float32(0.0)
        for i in range(width):
            squares += x[at + i] * x[at + i]
        scale = np.float32(1.0) / np.sqrt(squares / np.float32(width) + eps)
        for i in range(width):
            out[at + i] = x[at + i] * scale * weight[i]
        scales[row] = scale


@compiled(types.void(_FLOATS, _FLOATS, _FLOATS, _FLOATS, _FLOATS, _FLOATS))
def rms_norm_backward(x, weight, scales, of_out, of_x, of_weight):
    """Backward pass of `rms_norm`. With n = x scale and h = of_out weight: of_x = scale (h - n mean(h n)).

    of_weight is the sum of of_out n over rows; it must be zero before.
    """
    width = len(weight)
    partial = np.zeros(width, dtype=np.float32)
    for row in range(len(scales)):
        at, scale = row * width, scales[row]
        total = np.float32(0.0)
        for i in range(width):
            product = of_out[at + i] * x[at + i] * scale
            partial[i] += product
            total += product * weight[i]
        mean = total / np.float32(width)
        for i in range(width):
            of_x[at + i] = scale * (of_out[at + i] * weight[i] - x[at + i] * scale * mean)
        if (row + 1) % _PARTIAL == 0 or row + 1 == len(scales):
            for i in range(width):
                of_weight[i] += partial[i]
                partial[i] = np.float32(0.0)


@compiled(types.void(_FLOATS, _FLOATS, _FLOATS, types.int64, types.int64, types.float32, _FLOATS))
def rotate(x, cosines, sines, heads, size, direction, out):
    """Rotary embedding (arXiv 2104.09864). x, out [T, H, D]; cosines, sines [T, D]. `direction` -1 rotates back."""
    half = size // 2
    signs = np.empty(LANES, dtype=np.float32)
    signs[: LANES // 2], signs[LANES // 2 :] = -direction, direction
    forth, back, both = splatted(direction), splatted(-direction), loaded(signs, 0)
    for row in range(len(cosines) // size):
        angle = row * size
        for head in range(heads):
            at = (row * heads + head) * size
            if size == LANES:
                turn = multiply(multiply(loaded(sines, angle), both), swapped(loaded(x, at)))
                stored(multiply_add(loaded(x, at), loaded(cosines, angle), turn), out, at)
            elif half % LANES == 0:
                for i in range(0, half, LANES):
                    cosine, sine = loaded(cosines, angle + i), loaded(sines, angle + i)
                    a, b = loaded(x, at + i), loaded(x, at + half + i)
                    stored(multiply_add(multiply(b, sine), back, multiply(a, cosine)), out, at + i)
                    stored(multiply_add(multiply(a, sine), forth, multiply(b, cosine)), out, at + half + i)
            else:
                for i in range(half):
                    cosine, sine = cosines[angle + i], sines[angle + i] * direction
                    a, b = x[at + i], x[at + half + i]
                    out[at + i] = a * cosine - b * sine
                    out[at + half + i] = b * cosine + a * sine


@compiled(types.void(_FLOATS, _FLOATS, _FLOATS))
def swiglu(gate, up, out):
    """SwiGLU (arXiv 2002.05202): out = silu(gate) up, elementwise."""
    whole = len(out) // LANES * LANES
    for i in range(0, whole, LANES):
        stored(gated(loaded(gate, i), loaded(up, i)), out, i)
    for i in range(whole, len(out)):
        out[i] = gate[i] * up[i] / (np.float32(1.0) + np.exp(-gate[i]))


@compiled(types.void(_FLOATS, _FLOATS, _FLOATS, _FLOATS, _FLOATS))
def swiglu_backward(gate, up, of_out, of_gate, of_up):
    """With s = sigmoid(gate): of_up = of_out gate s, of_gate = of_out up s (1 + gate (1 - s))."""
    one, zero = splatted(np.float32(1.0)), splatted(np.float32(0.0))
    whole = len(of_out) // LANES * LANES
    for i in range(0, whole, LANES):
        x, upstream = loaded(gate, i), loaded(of_out, i)
        sigmoid = divide(one, add(one, exp(subtract(zero, x))))
        silu = multiply(x, sigmoid)
        stored(multiply(upstream, silu), of_up, i)
        slope = multiply_add(silu, subtract(one, sigmoid), sigmoid)
        stored(multiply(multiply(upstream, loaded(up, i)), slope), of_gate, i)
    for i in range(whole, len(of_out)):
        sigmoid = np.float32(1.0) / (np.float32(1.0) + np.exp(-gate[i]))
        of_up[i] = of_out[i] * gate[i] * sigmoid
        of_gate[i] = of_out[i] * up[i] * (sigmoid + gate[i] * sigmoid * (np.float32(1.0) - sigmoid))
