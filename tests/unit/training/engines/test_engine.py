from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from areal_core.errors import ModelError
from areal_core.training.batching.partition import Part
from areal_core.training.engines.engine import TrainingBatch, build_batch, check_batch
from areal_core.types import GroupPayload
from tests.support.training import SPEC, batch, shares_of, whole

GROUP = GroupPayload(
    prompt_tokens=np.array([7, 8], np.int32),
    lengths=np.array([3, 1], np.int32),
    tokens=np.array([10, 11, 1, 12], np.int32),
    loss_mask=np.ones(4, np.bool_),
    logprobs=np.array([-0.1, -0.2, -0.3, -0.4], np.float32),
    versions=np.array([4, 4, 5, 5], np.int32),
    truncated=np.array([False, True]),
)
OTHER = replace(GROUP, prompt_tokens=np.array([9], np.int32))
ADVANTAGES = np.array([[0.5, -0.5], [0.0, 0.0], [2.0, -2.0]])


def built(*shares: list[int], payloads: dict[int, GroupPayload], **how: Any) -> TrainingBatch:
    return build_batch(6, whole(payloads, *shares), payloads, ADVANTAGES, capacity=64, **how)


def test_layout_of_a_share():
    batch = built([2], [], [0], payloads={0: GROUP, 2: OTHER})
    assert batch.step == 6
    assert batch.tokens.tolist() == [9, 10, 11, 1, 9, 12, 7, 8, 10, 11, 1, 7, 8, 12]
    assert batch.lengths.tolist() == [4, 2, 5, 3]
    assert batch.prompt_lengths.tolist() == [1, 1, 2, 2]
    assert batch.loss_mask.tolist() == [bool(b) for b in (0, 1, 1, 1, 0, 1, 0, 0, 1, 1, 1, 0, 0, 1)]
    assert batch.versions.tolist() == [-1, 4, 4, 5, -1, 5, -1, -1, 4, 4, 5, -1, -1, 5]
    np.testing.assert_allclose(batch.behaviour_logprobs[:6], [0, -0.1, -0.2, -0.3, 0, -0.4])
    assert batch.advantages.tolist() == [0, 2, 2, 2, 0, -2, 0, 0, 0.5, 0.5, 0.5, 0, 0, -0.5]
    assert batch.minibatches == ((0, 1), (), (2, 3))
    assert batch.loss_tokens == [4, 0, 4]


def test_a_share_may_hold_some_of_a_groups_completions():
    """As many as `payloads` has of it, with the advantages that these have."""
    share = [[Part(0, (1,))], [Part(2, (0,))]]
    batch = build_batch(6, share, shares_of({0: GROUP, 2: OTHER}, share), ADVANTAGES, capacity=64, share_prompts=True)
    assert batch.tokens.tolist() == [7, 8, 12, 9, 10, 11, 1]
    assert batch.advantages.tolist() == [0, 0, -0.5, 0, 2, 2, 2]
    assert batch.minibatches == ((0,), (1,))
    assert batch.groups is not None
    assert batch.groups.tolist() == [0, 1]


def test_what_the_policy_did_not_sample_is_no_loss_token():
    """One token of the first trajectory is the environment's: it counts in no mean, and not as sampled."""
    sampled = np.array([True, False, True, True])
    group = replace(GROUP, loss_mask=sampled, versions=np.where(sampled, GROUP.versions, -1).astype(np.int32))
    batch = built([0], payloads={0: group}, loss_mean="sequence")
    assert batch.loss_mask.tolist() == [False, False, True, False, True, False, False, True]
    assert batch.versions.tolist() == [-1, -1, 4, -1, 5, -1, -1, 5]
    assert batch.weights[[2, 4, 7]].tolist() == [0.5, 0.5, 1.0]
    assert batch.loss_tokens == [3]
    both = built([0], payloads={0: group}, mask_truncated=True)
    assert both.loss_tokens == [2]


@pytest.mark.parametrize(
    ("fields", "spec", "said"),
    [
        ({"tokens": 23}, {}, "the batch of step 3 holds token 23: must be from 0 to 22, the model's vocabulary"),
        ({"tokens": -1}, {}, "the batch of step 3 holds token -1: must be from 0 to 22, the model's vocabulary"),
        ({}, {"context": 5}, r"the batch of step 3 holds a sequence of \d+ tokens: the model's context is 5"),
        (
            {"versions": 3},
            {},
            "the batch of step 3 holds a token of version 3: must be at most 2, the version trained on",
        ),
    ],
)
def test_a_batch_that_is_not_of_this_model_or_step_is_refused(
    fields: dict[str, int], spec: dict[str, int], said: str
) -> None:
    share = batch(3)
    check_batch(share, SPEC)
    broken = {}
    for name, value in fields.items():
        broken[name] = getattr(share, name).copy()
        broken[name][np.flatnonzero(share.loss_mask)[-1]] = value
    for name, values in broken.items():
        object.__setattr__(share, name, values)
    with pytest.raises(ModelError, match=f"^{said}$"):
        check_batch(share, replace(SPEC, **spec))
