"""Vectors of `LANES` floats in numba-compiled functions, and matrix products in registers.

A vector is one AVX-512 register or two AVX2 registers. Arrays are flat, so an index is one number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import njit, types
from numba.core import cgutils
from numba.core.caching import FunctionCache
from numba.extending import intrinsic as numba_intrinsic
from numba.extending import models, register_model
from numba.np.arrayobj import make_array
from numpy.typing import NDArray

LANES = 16
AVX512 = bool(binding.get_host_cpu_features().get("avx512f"))  # it has 32 registers; AVX2 has 16, half as wide

_ALIGN = 4  # bytes; enough for loads
_FLOAT = ir.FloatType()
_REGISTER = ir.VectorType(_FLOAT, LANES)
_INT, _INDEX = ir.IntType(32), ir.IntType(64)
_INTS_OF_LANES = ir.VectorType(_INT, LANES)
_SOURCE = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


class _Cache(FunctionCache):
    """numba's cache, also invalidated by changes of this file, which compiled functions inline."""

    def _index_key(self, *of: Any) -> tuple[Any, ...]:
        return *super()._index_key(*of), _SOURCE


def compiled(signature: Any = None) -> Callable[[Any], Any]:
    """Decorator: compile a function with numba. With a signature at once, without one when another function needs it.

    Compiled functions are cached in `__pycache__`, or else in the user's cache folder (NUMBA_CACHE_DIR names another).
    If neither is writable, every process compiles for some seconds.
    """
    # Sums may be reordered. Infinities and NaN must survive, because they reveal divergence.
    flags: dict[str, Any] = {"nogil": True, "fastmath": {"contract", "nsz", "reassoc"}, "error_model": "numpy"}

    def compile_it(function: Any) -> Any:
        dispatcher: Any = njit(**flags)(function)
        try:
            dispatcher._cache = _Cache(function)
        except RuntimeError as error:
            if "no locator available" not in str(error):
                raise
        if signature is not None:
            dispatcher.compile(signature)
            dispatcher.disable_compile()
        return dispatcher

    return compile_it


intrinsic: Any = numba_intrinsic  # type checkers can't follow its changes of parameters


def zeros(size: int) -> NDArray[np.float32]:
    """Return zeros that begin at a cache line. Memory is allocated when first touched."""
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
    """Emit a pointer to an element of a flat array."""
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
    """Emit a call of an LLVM intrinsic on vectors."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.{name}.v{LANES}f32")
    return builder.call(function, arguments, fastmath=fastmath)


def _emit_larger(builder: Any, a: Any, b: Any) -> Any:
    """Emit a maximum as one instruction; LLVM's maxnum takes several because it handles NaN."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _emit_smaller(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered("<", a, b), a, b)


def _vector_function(parameters: int, build: Callable[..., Any]) -> Any:
    """Make a function of vectors that returns a vector. `build` emits its code."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return build(builder, *arguments)

    if parameters == 1:
        return intrinsic(lambda typing, a: (_VECTOR(a), generate))
    if parameters == 2:
        return intrinsic(lambda typing, a, b: (_VECTOR(a, b), generate))
    return intrinsic(lambda typing, a, b, c: (_VECTOR(a, b, c), generate))


add = _vector_function(2, lambda builder, a, b: builder.fadd(a, b))
subtract = _vector_function(2, lambda builder, a, b: builder.fsub(a, b))
multiply = _vector_function(2, lambda builder, a, b: builder.fmul(a, b))
divide = _vector_function(2, lambda builder, a, b: builder.fdiv(a, b))
maximum = _vector_function(2, _emit_larger)  # the second argument if either is NaN
multiply_add = _vector_function(3, lambda builder, a, b, c: _call(builder, "fma", _REGISTER, a, b, c))


@intrinsic
def splatted(typing, value):
    """Return a vector with a float in all lanes."""
    return _VECTOR(types.float32), lambda context, builder, signature, arguments: _splat(builder, arguments[0])


@intrinsic
def loaded(typing, array, index):
    def generate(context, builder, signature, arguments):
        return _load(builder, _place(context, builder, signature.args[0], *arguments))

    return _VECTOR(array, types.int64), generate


@intrinsic
def stored(typing, vector, array, index):
    def generate(context, builder, signature, arguments):
        _store(builder, arguments[0], _place(context, builder, signature.args[1], *arguments[1:]))
        return context.get_dummy_value()

    return types.void(vector, array, types.int64), generate


@intrinsic
def lanes_sum(typing, vector):
    def generate(context, builder, signature, arguments):
        return _call(
            builder, "vector.reduce.fadd", _FLOAT, ir.Constant(_FLOAT, -0.0), arguments[0], fastmath=("reassoc",)
        )

    return types.float32(vector), generate


@intrinsic
def lanes_max(typing, vector):
    def generate(context, builder, signature, arguments):
        (vector,) = arguments
        half = LANES // 2
        while half:
            other = [*range(half, LANES), *range(half)]
            turned = builder.shuffle_vector(vector, vector, ir.Constant(_INTS_OF_LANES, other))
            vector = _emit_larger(builder, vector, turned)
            half //= 2
        return builder.extract_element(vector, ir.Constant(_INT, 0))

    return types.float32(vector), generate


@intrinsic
def first_lanes(typing, vector, count):
    """Return the first `count` lanes, with minus infinity in the others."""

    def generate(context, builder, signature, arguments):
        vector, count = arguments
        counts = _splat(builder, builder.trunc(count, _INT))
        inside = builder.icmp_signed("<", ir.Constant(_INTS_OF_LANES, list(range(LANES))), counts)
        return builder.select(inside, vector, ir.Constant(_REGISTER, [-float("inf")] * LANES))

    return _VECTOR(vector, types.int64), generate


def _emit_swap(builder: Any, x: Any) -> Any:
    lanes = [*range(LANES // 2, LANES), *range(LANES // 2)]
    return builder.shuffle_vector(x, x, ir.Constant(_INTS_OF_LANES, lanes))


def _emit_exp(builder: Any, x: Any) -> Any:
    """Emit exp(x), accurate to 1 to 2 units in the last place. Below -80 it is 0, so that no product is subnormal.

    2^n exp(r) with |r| <= log(2) / 2, by the polynomial of Cephes' expf.
    """

    def constant(value: float) -> Any:
        return ir.Constant(_REGISTER, [float(np.float32(value))] * LANES)

    def fma(a: Any, b: Any, c: Any) -> Any:
        return _call(builder, "fma", _REGISTER, a, b, c)

    given, nan = x, builder.fcmp_unordered("uno", x, x)
    vanishing = builder.fcmp_ordered("<", x, constant(-80.0))
    x = _emit_smaller(builder, _emit_larger(builder, x, constant(-80.0)), constant(88.0))
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


exp = _vector_function(1, _emit_exp)
swapped = _vector_function(1, _emit_swap)  # swaps the halves of a vector


def tile(rows: int, vectors: int) -> Any:
    """Make a function that multiplies matrices in registers: c = a @ b, or c += a @ b if `accumulate`.

    Shapes: a [rows, depth], b [depth, vectors * LANES], c [rows, vectors * LANES]. For each matrix the function takes
    where it begins in its array. It also takes the distances between a's rows, a's columns, b's rows and c's rows.
    """

    @intrinsic
    def product(typing, a, a_at, a_row, a_column, b, b_at, b_row, depth, c, c_at, c_row, accumulate):
        def generate(context, builder, signature, arguments):
            a, a_at, a_row, a_column, b, b_at, b_row, depth, c, c_at, c_row, accumulate = arguments
            a, b, c = (
                _place(context, builder, signature.args[at], array, index)
                for at, array, index in ((0, a, a_at), (4, b, b_at), (8, c, c_at))
            )

            def number(value: int) -> Any:
                return ir.Constant(_INDEX, value)

            cells = [(row, vector) for row in range(rows) for vector in range(vectors)]
            sums = {cell: cgutils.alloca_once(builder, _REGISTER) for cell in cells}
            lines = [builder.gep(a, [builder.mul(a_row, number(row))]) for row in range(rows)]
            places = {
                (row, vector): builder.gep(c, [builder.add(builder.mul(c_row, number(row)), number(vector * LANES))])
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
                line = builder.gep(b, [builder.mul(loop.index, b_row)])
                factors = [_load(builder, builder.gep(line, [number(vector * LANES)])) for vector in range(vectors)]
                column = builder.mul(loop.index, a_column)
                for row in range(rows):
                    factor = _splat(builder, builder.load(builder.gep(lines[row], [column])))
                    for vector in range(vectors):
                        so_far = sums[row, vector]
                        product = _call(builder, "fma", _REGISTER, factor, factors[vector], builder.load(so_far))
                        builder.store(product, so_far)
            for cell in cells:
                _store(builder, builder.load(sums[cell]), places[cell])
            return context.get_dummy_value()

        index = types.int64
        return types.void(a, index, index, index, b, index, index, index, c, index, index, types.boolean), generate

    return product


@intrinsic
def transpose(typing, a, a_at, a_width, b, b_at, b_width):
    """Write the transpose of a [LANES, LANES] to b [LANES, LANES]."""

    def generate(context, builder, signature, arguments):
        a, a_at, a_width, b, b_at, b_width = arguments
        a, b = (
            _place(context, builder, signature.args[0], a, a_at),
            _place(context, builder, signature.args[3], b, b_at),
        )
        places = [ir.Constant(_INDEX, line) for line in range(LANES)]
        lines = [_load(builder, builder.gep(a, [builder.mul(a_width, place)])) for place in places]
        half = LANES // 2
        while half:  # swap the off-diagonal halves of every block of 2 half x 2 half
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
def gated(gate, up):
    """Return silu(gate) * up of two vectors [LANES] (SwiGLU, arXiv 2002.05202)."""
    negative = subtract(splatted(np.float32(0.0)), gate)
    return divide(multiply(gate, up), add(splatted(np.float32(1.0)), exp(negative)))
