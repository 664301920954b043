"""Scored trajectory groups as bytes: safetensors in memory, never a pickle. The controller stores them unopened."""

from __future__ import annotations

import dataclasses

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from areal_core.errors import StorageError
from areal_core.types import GroupPayload, GroupSummary

_DTYPES = {
    "prompt_tokens": np.int32,
    "lengths": np.int32,
    "tokens": np.int32,
    "loss_mask": np.bool_,
    "logprobs": np.float32,
    "versions": np.int32,
    "rewards": np.float32,
    "truncated": np.bool_,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGroup:
    """A trajectory group whose rollouts have ended."""

    payload: bytes  # of pack_group
    summary: GroupSummary


def pack_group(payload: GroupPayload) -> bytes:
    """The group as safetensors bytes, which `unpack_group` turns back into exactly the same arrays."""
    groups, tokens = (len(payload.lengths),), (int(payload.lengths.sum()),)
    shapes: dict[str, tuple[int]] = {"lengths": groups, "rewards": groups, "truncated": groups}
    shapes |= {"tokens": tokens, "loss_mask": tokens, "logprobs": tokens, "versions": tokens}
    arrays: dict[str, np.ndarray] = {}
    for field in dataclasses.fields(GroupPayload):
        array: np.ndarray = getattr(payload, field.name)
        assert array.dtype == _DTYPES[field.name], f"{field.name}: {array.dtype}"
        assert array.shape == shapes.get(field.name, array.shape), f"{field.name}: {array.shape}"
        arrays[field.name] = np.ascontiguousarray(array)
    return save(arrays)


def unpack_group(data: bytes) -> GroupPayload:
    """Raises StorageError for bytes that `pack_group` did not make."""
    try:
        return GroupPayload(**load(data))
    except (SafetensorError, TypeError, KeyError) as error:
        raise StorageError(f"trajectory group: {len(data)} bytes that are not a packed group: {error}") from error
