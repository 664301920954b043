import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest

from areal_core.api.scored_groups import cut, in_segment, pack_group, parsed_spans, part_spans, read_group, spans_text
from areal_core.errors import StorageError
from areal_core.types import GroupPayload
from tests.support.groups import unpack_group
from tests.support.records import batch_group, group_payload


def group(lengths: Sequence[int] = (3, 1, 2)) -> GroupPayload:
    rng, total = np.random.default_rng(0), sum(lengths)
    return group_payload(
        np.array([5, 6], np.int32),
        np.array(lengths, np.int32),
        tokens=rng.integers(0, 18, total, np.int32),
        loss_mask=rng.random(total) < 0.5,
        logprobs=-rng.random(total, np.float32),
        versions=np.arange(total, dtype=np.int32),
        truncated=np.arange(len(lengths)) == 1,
    )


def test_group_comes_back_exactly():
    before = group()
    data, checksums = pack_group(before)
    assert part_spans([2], (3, 1, 2)) == [(0, 8), (8, 47), (47, 60), (60, 86)]  # 4 bytes a prompt token, 13 a later one
    assert len(data) == 86
    after = unpack_group(data, batch_group(before, checksums))
    for field in dataclasses.fields(GroupPayload):
        one, two = getattr(before, field.name), getattr(after, field.name)
        assert isinstance(one, tuple) or one.dtype == two.dtype
        np.testing.assert_array_equal(one, two)
    for damaged in (b"", b"junk", data[:-1]):
        with pytest.raises(StorageError, match="its length or CRC-32 does not match"):
            unpack_group(damaged, batch_group(before, checksums))


def test_some_completions_are_read_and_nothing_of_the_others():
    before, read = group(), []
    data, checksums = pack_group(before)

    def spans_of(spans: Sequence[tuple[int, int]]) -> list[bytes]:
        read.extend(spans)
        return [data[start:end] for start, end in spans]

    after = read_group(spans_of, batch_group(before, checksums), [2, 0])
    assert read == [part_spans([2], (3, 1, 2))[part] for part in (0, 3, 1)]
    assert after.prompts[0].tolist() == [5, 6]
    assert after.lengths.tolist() == [2, 3]
    assert after.tokens.tolist() == [*before.tokens[4:].tolist(), *before.tokens[:3].tolist()]
    assert after.versions.tolist() == [4, 5, 0, 1, 2]
    np.testing.assert_array_equal(after.loss_mask, np.concatenate([before.loss_mask[4:], before.loss_mask[:3]]))
    np.testing.assert_array_equal(after.logprobs, np.concatenate([before.logprobs[4:], before.logprobs[:3]]))
    assert after.truncated.tolist() == [False, False]


def test_spans_are_named_in_a_request_and_their_bytes_told_apart():
    spans = in_segment(batch_group(group(), (), start=6), [(0, 8), (47, 60), (8, 8)])
    assert spans_text(spans) == "6-14,53-66,14-14"
    assert parsed_spans("6-14,53-66,14-14") == spans == [(6, 14), (53, 66), (14, 14)]
    assert cut(bytes(range(21)), spans) == [bytes(range(8)), bytes(range(8, 21)), b""]


@pytest.mark.parametrize(
    "text", ["", "0", "2-1", "-1-2", "0-2,", "0 - 2", "0-2\n", "\u0661-2", "1_0-20", "1" * 16 + "-1"]
)
def test_text_that_names_no_spans_is_refused(text: str):
    line = "^spans: must be byte ranges START-END without byte END, such as 0-48,96-200, got '"
    with pytest.raises(ValueError, match=line):
        parsed_spans(text)


@pytest.mark.parametrize("part", range(4))
def test_a_flipped_bit_is_found_in_its_part_alone(part: int):
    data, checksums = pack_group(group())
    start, _ = part_spans([2], (3, 1, 2))[part]
    damaged = bytearray(data)
    damaged[start] ^= 1
    its = batch_group(group(), checksums)
    for completion in range(3):
        if part in (0, completion + 1):
            with pytest.raises(
                StorageError,
                match=f"^part {part} of a trajectory group is damaged: its length or CRC-32 does not match$",
            ):
                read_group(lambda spans: [bytes(damaged[a:b]) for a, b in spans], its, [completion])
        else:
            read_group(lambda spans: [bytes(damaged[a:b]) for a, b in spans], its, [completion])
