"""A model's weights and rotary tables as numpy arrays, for engines that do without torch, whose import takes a second
and a half and 200 MB of every process.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from areal_core.errors import ModelError
from areal_core.models.spec import ModelSpec, check_weights, stored_tensors, weight_shapes
from areal_core.models.tensorfile import as_float32
from areal_core.types import Float32Array


def read_arrays(source: str | Path, spec: ModelSpec) -> dict[str, Float32Array]:
    """The weights of a model folder (one safetensors file or several with an index) or of one safetensors file.

    Raises ModelError naming the file or the tensor when something is missing, damaged or of another shape. Tensors that
    the model does not use (a tied lm_head.weight, say) are left out.
    """
    stored = stored_tensors(Path(source))
    found = {name: as_float32(stored[name]) for name in weight_shapes(spec) if name in stored}
    try:
        check_weights(spec, found)
    except ModelError as error:
        raise ModelError(f"{source}: {error}") from None
    return found


def rope_tables(spec: ModelSpec, length: int) -> tuple[Float32Array, Float32Array]:
    """cos and sin of the rotary angles of positions 0 to length - 1, each [length, head_dim / 2], in float32 as
    transformers computes them."""
    exponents = np.arange(0, spec.head_dim, 2, dtype=np.float32) / np.float32(spec.head_dim)
    # Rounded where torch rounds: at far positions the last bit of a frequency shows, and numpy's float32 power errs.
    powers = np.float64(spec.rope_theta) ** exponents.astype(np.float64)
    frequencies = np.float32(1.0) / powers.astype(np.float32)
    angles = np.outer(np.arange(length, dtype=np.float32), frequencies)
    return np.cos(angles), np.sin(angles)
