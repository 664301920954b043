import dataclasses

import numpy as np
import pytest

from areal_core.api.scored_groups import pack_group, unpack_group
from areal_core.errors import StorageError
from areal_core.types import GroupPayload


def group(lengths=(3, 1)):
    rng, total = np.random.default_rng(0), sum(lengths)
    return GroupPayload(
        prompt_tokens=np.array([5, 6], np.int32),
        lengths=np.array(lengths, np.int32),
        tokens=rng.integers(0, 18, total, np.int32),
        loss_mask=rng.random(total) < 0.5,
        logprobs=-rng.random(total, np.float32),
        versions=np.arange(total, dtype=np.int32),
        rewards=np.array([1.0, 0.0], np.float32),
        truncated=np.array([False, True]),
    )


def test_a_group_comes_back_exactly():
    before = group()
    after = unpack_group(pack_group(before))
    for field in dataclasses.fields(GroupPayload):
        one, two = getattr(before, field.name), getattr(after, field.name)
        assert one.dtype == two.dtype
        np.testing.assert_array_equal(one, two)


def test_the_same_group_gives_the_same_bytes():
    assert pack_group(group()) == pack_group(group())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tokens", np.zeros(3, np.int32)),
        ("loss_mask", np.zeros(3, np.bool_)),
        ("rewards", np.zeros(3, np.float32)),
        ("truncated", np.zeros(2, np.int32)),
        ("logprobs", np.zeros(4, np.float64)),
    ],
)
def test_a_group_that_contradicts_itself_is_not_packed(field, value):
    with pytest.raises(AssertionError, match=field):
        pack_group(dataclasses.replace(group(), **{field: value}))


@pytest.mark.parametrize("data", [b"", b"junk that is no safetensors file", pack_group(group())[:-1]])
def test_bytes_that_are_no_group_are_refused(data):
    with pytest.raises(StorageError, match="not a packed group"):
        unpack_group(data)


def test_a_safetensors_file_of_something_else_is_refused():
    from safetensors.numpy import save

    with pytest.raises(StorageError, match="not a packed group"):
        unpack_group(save({"weights": np.zeros(2)}))
