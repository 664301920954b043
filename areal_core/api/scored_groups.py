"""Binary format of scored trajectory groups. Each rank reads only its own sequences.

    prompt 0 | ... | sequence 0 | sequence 1 | ...       one part each, end to end
      |               `- tokens int32[L] | logprobs float32[L] | versions int32[L] | loss_mask bool[L]
      `- int32[L_prompt]                                 all little-endian

There is no header. The batch's description holds the lengths, which give each part's position, and each part's
checksum.
"""

from __future__ import annotations

import io
import os
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from areal_core.errors import StorageError
from areal_core.types import BatchGroup, GroupPayload, GroupSummary, PackedGroup, Sample

_PROMPT = np.dtype("<i4")
_FIELDS = {
    "tokens": np.dtype("<i4"),
    "logprobs": np.dtype("<f4"),
    "versions": np.dtype("<i4"),
    "loss_mask": np.dtype("?"),
}
_TOKEN_BYTES = sum(dtype.itemsize for dtype in _FIELDS.values())

SUFFIX = ".bin"  # of segments, the files that hold payloads

Span = tuple[int, int]  # start and end byte, end exclusive, in a payload or a segment

REQUEST_LINE_BYTES = 2**20  # longest request line that a server accepts: spans of thousands of completions
_SHOWN_CHARS = 100
_SPANS = re.compile(r"[0-9]{1,15}-[0-9]{1,15}(,[0-9]{1,15}-[0-9]{1,15})*")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGroup:
    """A trajectory group whose rollouts have ended."""

    payload: bytes  # from pack_group
    summary: GroupSummary
    failure: str | None = None  # message of its first errors.VerifierError
    samples: tuple[Sample, ...] = ()  # [G] rollouts, if samples were requested


def segment_file(folder: Path, segment: str) -> Path:
    return folder / f"{segment}{SUFFIX}"


def part_spans(prompts: Sequence[int], lengths: Sequence[int]) -> list[Span]:
    """Return the spans of a payload's parts, from the token counts of its prompts and sequences."""
    sizes = [*(_PROMPT.itemsize * tokens for tokens in prompts), *(_TOKEN_BYTES * length for length in lengths)]
    return list(pairwise(accumulate(sizes, initial=0)))


def spans_text(spans: Sequence[Span]) -> str:
    """Format spans for a request: 0-48,96-200."""
    return ",".join(f"{start}-{end}" for start, end in spans)


def parsed_spans(text: str) -> list[Span]:
    """Parse the format of `spans_text`. Raises ValueError."""
    if _SPANS.fullmatch(text):
        spans = [(int(start), int(end)) for start, end in (span.split("-") for span in text.split(","))]
        if all(start <= end for start, end in spans):
            return spans
    raise ValueError(
        f"spans: must be byte ranges START-END without byte END, such as 0-48,96-200, got {text[:_SHOWN_CHARS]!r}"
    )


def cut(data: bytes, spans: Sequence[Span]) -> list[bytes]:
    """Split `data`, which holds the bytes of these spans end to end."""
    parts = io.BytesIO(data)
    return [parts.read(end - start) for start, end in spans]


def in_segment(group: BatchGroup, spans: Sequence[Span]) -> list[Span]:
    """Convert spans of a group's payload to spans of its segment."""
    return [(group.start + start, group.start + end) for start, end in spans]


def pack_group(payload: GroupPayload) -> tuple[bytes, tuple[int, ...]]:
    """Serialise a group. Returns its bytes and the CRC-32 of each part."""
    ends = np.cumsum(payload.lengths)
    for name, dtype in _FIELDS.items():
        array: np.ndarray = getattr(payload, name)
        assert array.dtype == dtype, f"{name}: {array.dtype}"
        assert array.shape == (int(payload.lengths.sum()),), f"{name}: {array.shape}"
    assert all(prompt.dtype == _PROMPT for prompt in payload.prompts), "prompts: must be int32"
    parts = [prompt.tobytes() for prompt in payload.prompts]
    for start, end in zip(ends - payload.lengths, ends, strict=True):
        parts.append(b"".join(getattr(payload, name)[start:end].tobytes() for name in _FIELDS))
    return b"".join(parts), tuple(map(zlib.crc32, parts))


def read_group_file(folder: Path, group: BatchGroup, sequences: Sequence[int]) -> GroupPayload:
    """Like `read_group`, from the segment file in `folder`. Also raises OSError."""
    with segment_file(folder, group.segment).open("rb") as segment:

        def read(spans: Sequence[Span]) -> list[bytes]:
            return [os.pread(segment.fileno(), end - start, start) for start, end in in_segment(group, spans)]

        return read_group(read, group, sequences)


def read_group(
    read: Callable[[Sequence[Span]], list[bytes]], group: PackedGroup, sequences: Sequence[int]
) -> GroupPayload:
    """Read some sequences of a group, in the given order, and their prompts.
    `read` returns the bytes of spans of the payload. Raises StorageError if a part's length or CRC-32 is wrong."""
    spans, prompts = part_spans(group.prompts, group.lengths), sorted({group.prompt_of[index] for index in sequences})
    chosen = [*prompts, *(len(group.prompts) + index for index in sequences)]
    parts = read([spans[part] for part in chosen])
    for part, data in zip(chosen, parts, strict=True):
        start, end = spans[part]
        if len(data) != end - start or zlib.crc32(data) != group.checksums[part]:
            raise StorageError(f"part {part} of a trajectory group is damaged: its length or CRC-32 does not match")
    lengths = [group.lengths[index] for index in sequences]
    columns: dict[str, list[np.ndarray]] = {name: [] for name in _FIELDS}
    for data, length in zip(parts[len(prompts) :], lengths, strict=True):
        at = 0
        for name, dtype in _FIELDS.items():
            columns[name].append(np.frombuffer(data, dtype, length, at))
            at += length * dtype.itemsize
    joined: dict[str, Any] = {
        name: np.concatenate([np.zeros(0, _FIELDS[name]), *arrays]) for name, arrays in columns.items()
    }
    rollouts = [group.rollout_of[index] for index in sequences]
    return GroupPayload(
        prompts=tuple(np.frombuffer(data, _PROMPT) for data in parts[: len(prompts)]),
        prompt_of=np.array([prompts.index(group.prompt_of[index]) for index in sequences], np.int32),
        lengths=np.array(lengths, np.int32),
        truncated=np.array([group.truncated[rollout] for rollout in rollouts], np.bool_),
        loss_tokens=np.array([group.loss_tokens[rollout] for rollout in rollouts], np.int32),
        **joined,
    )
