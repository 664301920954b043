"""The forward pass of a Qwen2 or Llama decoder on one CPU core, compiled by numba once per machine.

A pass runs rows: one row is one token of one text, standing at `position` in `slot` of the KV cache. It attends to all
that stands in its slot up to itself, so that decoding one token, reading a prompt and reading a text again after an
update are the same thing, and a pass may do all of them at once, over as many tokens as each text has, with no padding.

Every number of a row is computed in one order of operations, whatever other rows there are: results do not depend on
the company, to the bit.

Vectors are `LANES` floats, one AVX-512 register or two of AVX2. Arrays are flat, so that a place is one number. Packed
matrices [depth, width] are stored by panels of `COLUMNS` columns, [width / COLUMNS, depth, COLUMNS]; the cache is
[layers, slots, kv_heads, blocks, 2, LANES * head width]: a block holds LANES tokens, their keys by dimension
[head width, LANES], then their values by token [LANES, head width].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from llvmlite import binding, ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic as numba_intrinsic
from numba.extending import models, register_model
from numba.np.arrayobj import make_array
from numpy.typing import NDArray

LANES = 16
# Rows and vectors of the tile of a product that is kept in registers: 32 of them with AVX-512, else 16 half as wide.
ROWS, _VECTORS = (4, 4) if binding.get_host_cpu_features().get("avx512f") else (6, 1)
COLUMNS = _VECTORS * LANES

_ALIGN = 4  # bytes; loads need no more
_FLOAT = ir.FloatType()
_REGISTER = ir.VectorType(_FLOAT, LANES)
_INT, _INDEX = ir.IntType(32), ir.IntType(64)
_INTS_OF_LANES = ir.VectorType(_INT, LANES)


def compiled(signature: Any = None) -> Callable[[Any], Any]:
    """Compile a function: with a signature at once, or take it from the cache on disk; without, when another needs it.

    The cache is in `__pycache__`, or where that can't be written in the user's cache folder (NUMBA_CACHE_DIR names
    another); where neither can be, every process compiles, for some seconds."""
    # Sums may be reordered, but infinities and NaN stay what they are: they are how divergence shows.
    flags: dict[str, Any] = {"nogil": True, "fastmath": {"contract", "nsz", "reassoc"}, "error_model": "numpy"}

    def compile_it(function: Any) -> Any:
        try:
            return njit(signature, cache=True, **flags)(function)
        except RuntimeError as error:
            if "no locator available" not in str(error):
                raise
            return njit(signature, **flags)(function)

    return compile_it


intrinsic: Any = numba_intrinsic  # adds and removes parameters, which type checkers can't follow


class Shape(NamedTuple):
    """Sizes of a model, rounded up to whole vectors and panels where `_width` says so, and where its weights begin in
    the flat array of all of them. The fields after `layer_size` count from the beginning of a layer."""

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
    qkv_bias: int
    out: int
    mlp_norm: int
    gate_up: int
    down: int

    @property
    def size(self) -> int:
        """Floats of all weights."""
        return self.first_layer + self.layers * self.layer_size


def zeros(size: int) -> NDArray[np.float32]:
    """Floats that begin at a cache line; memory is given when they are first touched."""
    floats = np.zeros(size + LANES, dtype=np.float32)
    offset = -(floats.ctypes.data // floats.itemsize) % LANES
    return floats[offset : offset + size]


def round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


class _Vector(types.Type):
    def __init__(self) -> None:
        super().__init__(name=f"float32x{LANES}")


_VECTOR = _Vector()


@register_model(_Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: types.Type) -> None:
        super().__init__(manager, kind, _REGISTER)


def _place(context: Any, builder: Any, kind: Any, array: Any, index: Any) -> Any:
    """Pointer to an element of a flat array."""
    return builder.gep(make_array(kind)(context, builder, array).data, [index])


def _load(builder: Any, pointer: Any) -> Any:
    value = builder.load(builder.bitcast(pointer, _REGISTER.as_pointer()))
    value.align = _ALIGN
    return value


def _store(builder: Any, value: Any, pointer: Any) -> None:
    builder.store(value, builder.bitcast(pointer, _REGISTER.as_pointer())).align = _ALIGN


def _splat(builder: Any, value: Any) -> Any:
    undefined = ir.Constant(ir.VectorType(value.type, LANES), ir.Undefined)
    first = builder.insert_element(undefined, value, ir.Constant(_INT, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(_INTS_OF_LANES, [0] * LANES))


def _call(builder: Any, name: str, result: Any, *arguments: Any, fastmath: tuple[str, ...] = ()) -> Any:
    """An LLVM intrinsic on vectors."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.{name}.v{LANES}f32")
    return builder.call(function, arguments, fastmath=fastmath)


def _vector_function(parameters: int, build: Callable[..., Any]) -> Any:
    """A function of vectors that returns one, from what emits its code."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return build(builder, *arguments)

    if parameters == 1:
        return intrinsic(lambda typing, a: (_VECTOR(a), generate))
    if parameters == 2:
        return intrinsic(lambda typing, a, b: (_VECTOR(a, b), generate))
    return intrinsic(lambda typing, a, b, c: (_VECTOR(a, b, c), generate))


_add = _vector_function(2, lambda builder, a, b: builder.fadd(a, b))
_subtract = _vector_function(2, lambda builder, a, b: builder.fsub(a, b))
_multiply = _vector_function(2, lambda builder, a, b: builder.fmul(a, b))
_divide = _vector_function(2, lambda builder, a, b: builder.fdiv(a, b))
_maximum = _vector_function(2, lambda builder, a, b: _call(builder, "maxnum", _REGISTER, a, b))
_multiply_add = _vector_function(3, lambda builder, a, b, c: _call(builder, "fma", _REGISTER, a, b, c))


@intrinsic
def _splatted(typing, value):
    """A float in all lanes."""
    return _VECTOR(types.float32), lambda context, builder, signature, arguments: _splat(builder, arguments[0])


@intrinsic
def _loaded(typing, array, index):
    def generate(context, builder, signature, arguments):
        return _load(builder, _place(context, builder, signature.args[0], *arguments))

    return _VECTOR(array, types.int64), generate


@intrinsic
def _stored(typing, vector, array, index):
    def generate(context, builder, signature, arguments):
        _store(builder, arguments[0], _place(context, builder, signature.args[1], *arguments[1:]))
        return context.get_dummy_value()

    return types.void(vector, array, types.int64), generate


@intrinsic
def _total(typing, vector):
    def generate(context, builder, signature, arguments):
        return _call(
            builder, "vector.reduce.fadd", _FLOAT, ir.Constant(_FLOAT, -0.0), arguments[0], fastmath=("reassoc",)
        )

    return types.float32(vector), generate


@intrinsic
def _highest(typing, vector):
    def generate(context, builder, signature, arguments):
        return _call(builder, "vector.reduce.fmax", _FLOAT, arguments[0])

    return types.float32(vector), generate


@intrinsic
def _first(typing, vector, count):
    """The first `count` lanes; minus infinity in the others."""

    def generate(context, builder, signature, arguments):
        vector, count = arguments
        counts = _splat(builder, builder.trunc(count, _INT))
        inside = builder.icmp_signed("<", ir.Constant(_INTS_OF_LANES, list(range(LANES))), counts)
        return builder.select(inside, vector, ir.Constant(_REGISTER, [-float("inf")] * LANES))

    return _VECTOR(vector, types.int64), generate


def _emit_exp(builder: Any, x: Any) -> Any:
    """exp(x), 1 to 2 units in the last place off: 2^n exp(r) with |r| <= log(2) / 2, by the polynomial of Cephes' expf.
    Below -80 it is 0: no product of it is subnormal."""

    def constant(value: float) -> Any:
        return ir.Constant(_REGISTER, [float(np.float32(value))] * LANES)

    def fma(a: Any, b: Any, c: Any) -> Any:
        return _call(builder, "fma", _REGISTER, a, b, c)

    given, nan = x, builder.fcmp_unordered("uno", x, x)
    vanishing = builder.fcmp_ordered("<", x, constant(-80.0))
    x = _call(builder, "maxnum", _REGISTER, x, constant(-80.0))
    x = _call(builder, "minnum", _REGISTER, x, constant(88.0))
    n = _call(builder, "nearbyint", _REGISTER, builder.fmul(x, constant(1.44269504088896341)))
    r = fma(n, constant(-0.693359375), x)
    r = fma(n, constant(2.12194440e-4), r)
    y = constant(1.9875691500e-4)
    for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        y = fma(y, r, constant(coefficient))
    y = builder.fadd(fma(builder.fmul(r, r), y, r), constant(1.0))
    exponent = builder.add(builder.fptosi(n, _INTS_OF_LANES), ir.Constant(_INTS_OF_LANES, [127] * LANES))
    power = builder.bitcast(builder.shl(exponent, ir.Constant(_INTS_OF_LANES, [23] * LANES)), _REGISTER)
    result = builder.select(vanishing, constant(0.0), builder.fmul(y, power))
    return builder.select(nan, given, result)


_exp = _vector_function(1, _emit_exp)


@intrinsic
def _tile(typing, a, a_at, a_width, b, b_at, depth, c, c_at, c_width, accumulate):
    """c [ROWS, COLUMNS] = a [ROWS, depth] @ b [depth, COLUMNS], or += if `accumulate`; the tile stays in registers."""

    def generate(context, builder, signature, arguments):
        a, a_at, a_width, b, b_at, depth, c, c_at, c_width, accumulate = arguments
        a, b, c = (
            _place(context, builder, signature.args[at], array, index)
            for at, array, index in ((0, a, a_at), (3, b, b_at), (6, c, c_at))
        )

        def number(value: int) -> Any:
            return ir.Constant(_INDEX, value)

        cells = [(row, vector) for row in range(ROWS) for vector in range(_VECTORS)]
        sums = {cell: cgutils.alloca_once(builder, _REGISTER) for cell in cells}
        rows = [builder.gep(a, [builder.mul(a_width, number(row))]) for row in range(ROWS)]
        places = {
            (row, vector): builder.gep(c, [builder.add(builder.mul(c_width, number(row)), number(vector * LANES))])
            for row, vector in cells
        }
        with builder.if_else(accumulate) as (add, begin):
            with add:
                for cell in cells:
                    builder.store(_load(builder, places[cell]), sums[cell])
            with begin:
                for cell in cells:
                    builder.store(ir.Constant(_REGISTER, [0.0] * LANES), sums[cell])
        with cgutils.for_range(builder, depth) as loop:
            line = builder.gep(b, [builder.mul(loop.index, number(COLUMNS))])
            factors = [_load(builder, builder.gep(line, [number(vector * LANES)])) for vector in range(_VECTORS)]
            for row in range(ROWS):
                factor = _splat(builder, builder.load(builder.gep(rows[row], [loop.index])))
                for vector in range(_VECTORS):
                    total = sums[row, vector]
                    product = _call(builder, "fma", _REGISTER, factor, factors[vector], builder.load(total))
                    builder.store(product, total)
        for cell in cells:
            _store(builder, builder.load(sums[cell]), places[cell])
        return context.get_dummy_value()

    index = types.int64
    return types.void(a, index, index, b, index, index, c, index, index, types.boolean), generate


@intrinsic
def _transpose(typing, a, a_at, a_width, b, b_at, b_width):
    """b [LANES, LANES] = a [LANES, LANES], transposed."""

    def generate(context, builder, signature, arguments):
        a, a_at, a_width, b, b_at, b_width = arguments
        a, b = (
            _place(context, builder, signature.args[0], a, a_at),
            _place(context, builder, signature.args[3], b, b_at),
        )
        places = [ir.Constant(_INDEX, line) for line in range(LANES)]
        lines = [_load(builder, builder.gep(a, [builder.mul(a_width, place)])) for place in places]
        half = LANES // 2
        while half:  # the off-diagonal halves of every block of 2 half x 2 half change places
            low = [lane if not lane & half else LANES + lane - half for lane in range(LANES)]
            high = [lane + half if not lane & half else LANES + lane for lane in range(LANES)]
            for line in range(LANES):
                if not line & half:
                    pair = lines[line], lines[line + half]
                    lines[line], lines[line + half] = (
                        builder.shuffle_vector(*pair, ir.Constant(_INTS_OF_LANES, lanes)) for lanes in (low, high)
                    )
            half //= 2
        for line, place in zip(lines, places, strict=True):
            _store(builder, line, builder.gep(b, [builder.mul(b_width, place)]))
        return context.get_dummy_value()

    return types.void(a, types.int64, types.int64, b, types.int64, types.int64), generate


@compiled()
def _matmul(a, a_width, weights, at, depth, c, c_width, rows, accumulate):
    """c [rows, c_width] = a [rows, depth] @ the packed matrix at `at`, or += if `accumulate`; rows up to a multiple of
    ROWS are computed, whatever stands there."""
    for panel in range(0, c_width, COLUMNS):
        for row in range(0, rows, ROWS):
            _tile(
                a, row * a_width, a_width, weights, at + panel * depth, depth,
                c, row * c_width + panel, c_width, accumulate,
            )  # fmt: skip


@compiled()
def _normalise(x, weights, at, hidden, width, eps, rows, out):
    """RMS norm of rows [rows, width] whose first `hidden` columns count."""
    for row in range(rows):
        start = row * width
        squares = np.float32(0.0)
        for column in range(hidden):
            squares += x[start + column] * x[start + column]
        scale = np.float32(1.0) / np.sqrt(squares / np.float32(hidden) + eps)
        for column in range(hidden):
            out[start + column] = x[start + column] * scale * weights[at + column]


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
                _stored(_loaded(qkv, first + i), cache, values + i)


@compiled()
def _attend(cache, at, width, query, query_at, count, scores, out, out_at):
    """Attention of one query head over the first `count` tokens of one head of one slot, whose cache begins at `at`.

    Tokens beyond are loaded with the last block but weigh nothing: the cache holds finite numbers everywhere."""
    blocks = (count + LANES - 1) // LANES
    block_size = 2 * LANES * width
    highest = _splatted(np.float32(-np.inf))
    for block in range(blocks):
        keys = at + block * block_size
        even = odd = _splatted(np.float32(0.0))
        for i in range(0, width, 2):
            even = _multiply_add(_splatted(query[query_at + i]), _loaded(cache, keys + i * LANES), even)
            odd = _multiply_add(_splatted(query[query_at + i + 1]), _loaded(cache, keys + (i + 1) * LANES), odd)
        score = _first(_add(even, odd), count - block * LANES)
        _stored(score, scores, block * LANES)
        highest = _maximum(highest, score)
    highest = _splatted(_highest(highest))
    total = _splatted(np.float32(0.0))
    for block in range(blocks):
        weight = _exp(_subtract(_loaded(scores, block * LANES), highest))
        _stored(weight, scores, block * LANES)
        total = _add(total, weight)
    scale = _splatted(np.float32(1.0) / _total(total))
    for column in range(0, width, LANES):
        a = b = c = d = _splatted(np.float32(0.0))
        for block in range(blocks):
            values = at + block * block_size + LANES * width + column
            first = block * LANES
            for i in range(0, min(LANES, count - first), 4):
                a = _multiply_add(_splatted(scores[first + i]), _loaded(cache, values + i * width), a)
                b = _multiply_add(_splatted(scores[first + i + 1]), _loaded(cache, values + (i + 1) * width), b)
                c = _multiply_add(_splatted(scores[first + i + 2]), _loaded(cache, values + (i + 2) * width), c)
                d = _multiply_add(_splatted(scores[first + i + 3]), _loaded(cache, values + (i + 3) * width), d)
        _stored(_multiply(_add(_add(a, b), _add(c, d)), scale), out, out_at + column)


@compiled()
def _gate(gate_up, inner, width, rows):
    """silu(gate) * up of rows [gate, up], written over the gate."""
    one, zero = _splatted(np.float32(1.0)), _splatted(np.float32(0.0))
    for row in range(rows):
        start = row * width
        for column in range(start, start + inner, LANES):
            gate = _loaded(gate_up, column)
            product = _multiply(gate, _loaded(gate_up, column + inner))
            _stored(_divide(product, _add(one, _exp(_subtract(zero, gate)))), gate_up, column)


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
    """Run rows through the model: their keys and values are added to the cache, and the rows `ends` [n_ends], which
    ascend, give logits [n_ends, vocab_width]. `x` to `scores` are buffers."""
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
                    _stored(_loaded(weights, base + shape.qkv_bias + i), qkv, row * shape.qkv_width + i)
        _matmul(normed, width, weights, base + shape.qkv, hidden, qkv, shape.qkv_width, rows, shape.qkv_bias >= 0)
        _rotate_and_keep(shape, layer, qkv, cosines, sines, slots, positions, rows, cache)
        last = layer == shape.layers - 1
        if last:  # nobody reads what the other rows would put out
            running = n_ends
            for i in range(n_ends):
                for column in range(0, width, LANES):
                    _stored(_loaded(x, ends[i] * width + column), x, i * width + column)
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
    """Draw a token for each of `count` answers from row `ends` of logits [., width], by inversion of the distribution
    at the answer's temperature, and record its log-probability; temperature 0 takes the most probable token and
    records its log-probability at temperature 1. False if any logit is not finite."""
    weights = np.empty(width, dtype=np.float32)
    for answer in range(count):
        row = ends[answer] * width
        temperature = temperatures[answer]
        greedy = temperature == 0.0
        scale = _splatted(np.float32(1.0) if greedy else np.float32(1.0) / temperature)
        top, finite = _splatted(np.float32(-np.inf)), _splatted(np.float32(0.0))
        for i in range(0, vocab, LANES):
            logit = _loaded(logits, row + i)
            finite = _multiply_add(logit, _splatted(np.float32(0.0)), finite)
            top = _maximum(top, _first(logit, vocab - i))
        highest = _highest(top)
        if _total(finite) != 0.0:
            return False
        total = 0.0
        for i in range(0, vocab, LANES):
            distance = _first(_subtract(_loaded(logits, row + i), _splatted(highest)), vocab - i)
            weight = _exp(_multiply(distance, scale))
            _stored(weight, weights, i)
            total += _total(weight)
        chosen = 0
        if greedy:
            while logits[row + chosen] != highest:
                chosen += 1
        else:
            # The first token at which the sum of weights exceeds u * total: whole vectors, then inside of one.
            target, before, block = uniforms[answer] * total, 0.0, 0
            while True:
                weight = np.float64(_total(_loaded(weights, block)))
                if before + weight > target or block + LANES >= vocab:
                    break
                before, block = before + weight, block + LANES
            for i in range(block, min(block + LANES, vocab)):
                if weights[i] > 0.0:
                    chosen = i
                    before += weights[i]
                    if before > target:
                        break
        tokens[answer] = chosen
        distance = np.float64(logits[row + chosen] - highest)
        logprobs[answer] = distance / (1.0 if greedy else np.float64(temperature)) - np.log(total)
    return True


@compiled(types.void(_FLOATS, types.int64, types.int64, _FLOATS, types.int64, types.int64))
def pack(matrix, outputs, depth, weights, at, first):
    """Write a matrix [outputs, depth], as transformers has it, to columns `first` and up of the packed matrix
    [depth, .] that begins at `at`."""
    squares = outputs // LANES * LANES if first % LANES == 0 else 0
    for output in range(0, squares, LANES):
        column = first + output
        place = at + column // COLUMNS * COLUMNS * depth + column % COLUMNS
        for i in range(0, depth // LANES * LANES, LANES):
            _transpose(matrix, output * depth + i, depth, weights, place + i * COLUMNS, COLUMNS)
    for output in range(outputs):
        column = first + output
        place = at + column // COLUMNS * COLUMNS * depth + column % COLUMNS
        for i in range(depth // LANES * LANES if output < squares else 0, depth):
            weights[place + i * COLUMNS] = matrix[output * depth + i]
