"""The CPU decoder and its KV cache, by compiled kernels on one core (`engines.kernels`).

`areal_core.generation.engines.torch_decoder` has the decoder for other devices.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from areal_core.errors import ModelError
from areal_core.generation.engines import kernels
from areal_core.generation.engines.kernels import COLUMNS, Shape
from areal_core.generation.engines.slots import Pass
from areal_core.models.spec import ModelSpec, rope_tables
from areal_core.models.vectors import LANES, round_up, zeros
from areal_core.types import Float32Array, Int32Array

_MAP_NORESERVE = 0x4000  # Linux's value; Python 3.11 has no name for it
_HUGE_PAGES_BYTES = 256 * 2**20  # up to this size a cache may use all its memory


class CpuCache:
    """The KV cache and the buffers of a forward pass.

    Every slot has addresses for the whole context. Memory is allocated when touched, so the cache grows with the
    sequences, block by block.
    """

    def __init__(self, shape: Shape, slots: int, context: int, rows: int) -> None:
        self.shape = shape._replace(slots=slots, blocks=round_up(context, LANES) // LANES)
        rows = round_up(rows, kernels.ROWS)
        block = 2 * LANES * shape.head_width
        places = (shape.layers, slots, shape.kv_heads, self.shape.blocks, block)
        self.flat = _reserved(math.prod(places))
        self._kv = self.flat.reshape(places)
        widths = (
            shape.hidden_width, shape.hidden_width, shape.qkv_width, shape.heads * shape.head_width,
            shape.gate_up_width,
        )  # fmt: skip
        self.logits = zeros(round_up(slots, kernels.ROWS) * shape.vocab_width)
        self.buffers = (*(zeros(rows * width) for width in widths), zeros(self.shape.blocks * LANES), self.logits)

    def copy(self, source: int, targets: Int32Array, tokens: int) -> None:
        blocks = round_up(tokens, LANES) // LANES
        self._kv[:, targets, :, :blocks] = self._kv[:, source, None, :, :blocks]


def _reserved(size: int) -> Float32Array:
    """Return zeros. A large array uses small pages: with huge pages, short sequences would touch nearly all memory.

    Raises ModelError if the memory can't be reserved.
    """
    if 4 * size <= _HUGE_PAGES_BYTES:
        return zeros(size)
    try:
        memory = mmap.mmap(-1, 4 * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    except OSError as error:
        raise ModelError(
            f"--slots, --context: can't reserve a KV cache of {4 * size / 2**30:.0f} GiB ({error.strerror}); use fewer "
            "slots or a shorter context"
        ) from None
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype=np.float32)


class CpuDecoder:
    """All model weights in one float32 array, packed for the kernels."""

    def __init__(
        self, spec: ModelSpec, weights: Mapping[str, Any], context: int, retired: CpuDecoder | None = None
    ) -> None:
        """`retired` is a stopped decoder of the same model, whose memory this one reuses."""
        self._spec, self._context = spec, context
        self._shape = _shape(spec)
        self._eps = np.float32(spec.rms_eps)
        self._cosines, self._sines = (table.reshape(-1) for table in rope_tables(spec, context))
        self._weights = zeros(self._shape.size) if retired is None else retired._weights
        self._pack({name: np.asarray(array) for name, array in weights.items()})

    def cache(self, slots: int, rows: int) -> CpuCache:
        return CpuCache(self._shape, slots, self._context, rows)

    def run(self, cache: CpuCache, rows: Pass) -> tuple[Int32Array, Float32Array] | None:
        kernels.forward(
            cache.shape, self._eps, self._weights, self._cosines, self._sines, cache.flat,
            rows.tokens, rows.slots, rows.positions, len(rows.tokens), rows.ends, len(rows.ends), *cache.buffers,
        )  # fmt: skip
        count = len(rows.of)
        tokens, logprobs = np.empty(count, dtype=np.int32), np.empty(count, dtype=np.float32)
        vocab, width = self._shape.vocab, self._shape.vocab_width
        temperatures, uniforms = rows.temperatures, rows.uniforms
        finite = kernels.draw(cache.logits, vocab, width, rows.of, count, temperatures, uniforms, tokens, logprobs)
        return (tokens, logprobs) if finite else None

    def _pack(self, weights: Mapping[str, NDArray[np.float32]]) -> None:
        shape, spec = self._shape, self._spec

        def vector(name: str, at: int) -> None:
            self._weights[at : at + len(weights[name])] = weights[name]

        def matrix(array: NDArray[np.float32], at: int, first: int = 0) -> None:
            kernels.pack(np.ascontiguousarray(array).reshape(-1), *array.shape, self._weights, at, first)

        def by_head(array: NDArray[np.float32]) -> NDArray[np.float32]:
            """Pad each head with zeros to whole vectors."""
            missing = shape.head_width - shape.head_dim
            if not missing:
                return array
            heads = array.reshape(-1, shape.head_dim, *array.shape[1:])
            return np.pad(heads, ((0, 0), (0, missing), *[(0, 0)] * (array.ndim - 1))).reshape(-1, *array.shape[1:])

        matrix(weights["model.embed_tokens.weight"], shape.embedding)
        if not spec.tie_embeddings:
            matrix(weights["lm_head.weight"], shape.head)
        vector("model.norm.weight", shape.norm)
        for layer in range(spec.layers):
            name, base = f"model.layers.{layer}.", shape.first_layer + layer * shape.layer_size
            vector(name + "input_layernorm.weight", base + shape.input_norm)
            vector(name + "post_attention_layernorm.weight", base + shape.mlp_norm)
            first = 0
            for kind in "qkv":
                projection = by_head(weights[name + f"self_attn.{kind}_proj.weight"])
                matrix(projection, base + shape.qkv, first)
                if spec.qkv_bias:
                    bias, at = by_head(weights[name + f"self_attn.{kind}_proj.bias"]), base + shape.qkv_bias + first
                    self._weights[at : at + len(bias)] = bias
                first += len(projection)
            if spec.qk_norm:
                vector(name + "self_attn.q_norm.weight", base + shape.qk_norm)
                vector(name + "self_attn.k_norm.weight", base + shape.qk_norm + shape.head_width)
            out = weights[name + "self_attn.o_proj.weight"]
            matrix(out if shape.head_width == shape.head_dim else by_head(out.T).T, base + shape.out)
            matrix(weights[name + "mlp.gate_proj.weight"], base + shape.gate_up)
            matrix(weights[name + "mlp.up_proj.weight"], base + shape.gate_up, shape.inner_width)
            down, missing = weights[name + "mlp.down_proj.weight"], shape.inner_width - spec.intermediate_size
            matrix(np.pad(down, ((0, 0), (0, missing))) if missing else down, base + shape.down)


def _shape(spec: ModelSpec) -> Shape:
    hidden_width, vocab_width = round_up(spec.hidden_size, COLUMNS), round_up(spec.vocab_size, COLUMNS)
    head_width, inner_width = round_up(spec.head_dim, LANES), round_up(spec.intermediate_size, LANES)
    qkv_width = round_up((spec.heads + 2 * spec.kv_heads) * head_width, COLUMNS)
    gate_up_width = round_up(2 * inner_width, COLUMNS)

    def places(sizes: Mapping[str, int]) -> tuple[dict[str, int], int]:
        """Return where each part begins when they lie end to end (-1 for an empty part), and the total size."""
        ends = np.cumsum([round_up(size, LANES) for size in sizes.values()]).tolist()
        begins = zip(sizes.items(), [0, *ends[:-1]], strict=True)
        return {name: begin if size else -1 for (name, size), begin in begins}, ends[-1]

    layer, layer_size = places(
        {
            "input_norm": spec.hidden_size,
            "qkv": spec.hidden_size * qkv_width,
            "qkv_bias": qkv_width if spec.qkv_bias else 0,
            "qk_norm": 2 * head_width if spec.qk_norm else 0,
            "out": spec.heads * head_width * hidden_width,
            "mlp_norm": spec.hidden_size,
            "gate_up": spec.hidden_size * gate_up_width,
            "down": inner_width * hidden_width,
        }
    )
    table = spec.hidden_size * vocab_width
    whole, first_layer = places(
        {"embedding": table, "head": 0 if spec.tie_embeddings else table, "norm": spec.hidden_size}
    )
    return Shape(
        layers=spec.layers,
        hidden=spec.hidden_size,
        hidden_width=hidden_width,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        head_width=head_width,
        qkv_width=qkv_width,
        inner_width=inner_width,
        gate_up_width=gate_up_width,
        vocab=spec.vocab_size,
        vocab_width=vocab_width,
        slots=0,
        blocks=0,
        first_layer=first_layer,
        layer_size=layer_size,
        **layer,
        **whole | ({"head": 0} if spec.tie_embeddings else {}),
    )
