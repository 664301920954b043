"""One loss, one gradient and the same weights, whichever engine trains, however ranks partition the model and however a
batch is cut."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from areal_core.types import Float32Array
from tests.support.engines import (
    BY_TRANSFORMERS,
    CUTS,
    DIVERGED,
    RECOMPUTED,
    SHARED,
    SMALL,
    STAGES,
    WHOLE,
    Outcome,
    run,
)
from tests.support.training import QWEN3, engine, numbers, train, weights

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.cpu_seconds(40)]

BFLOAT16 = 2**-8  # between two numbers next to each other, relative
CASES = [(size, f"torch {cut}") for size in SHARED for cut in CUTS] + [
    (size, f"{stage} {cut}") for size, cases in SHARED.items() for stage, cut in cases
]


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Outcome]]:
    """The outcomes of rank 0, by size of the group; the other rank has the same figures, and no weights."""
    root = tmp_path_factory.mktemp("engines")
    two, one = run(2, root / "2"), run(1, root / "1")  # one rank loads the state that two have saved
    for case, outcome in two[1].items():
        assert outcome.stats == two[0][case].stats, case
        assert outcome.error[:16] == two[0][case].error[:16], case  # each reports its own loss
    return {1: one[0], 2: two[0]}


@pytest.fixture(scope="module")
def expected(groups: dict[int, dict[str, Outcome]]) -> Outcome:
    """One rank, the torch engine, all sequences of a minibatch at once."""
    return groups[1][f"torch {WHOLE}"]


def assert_close(one: Mapping[str, Float32Array], other: Mapping[str, Float32Array], tolerance: float) -> None:
    """Relative to the norm of each tensor."""
    assert one.keys() == other.keys()
    for name, values in one.items():
        assert np.linalg.norm(other[name] - values) <= tolerance * np.linalg.norm(values), name


def assert_within_rounding(expected: Outcome, outcome: Outcome) -> None:
    """The gradient deviates by some roundings of bfloat16."""
    names = expected.gradient.keys()
    one, other = (np.concatenate([each.gradient[name].ravel() for name in names]) for each in (expected, outcome))
    assert 0 < np.linalg.norm(one - other) < 16 * BFLOAT16 * np.linalg.norm(one)
    assert outcome.stats[0].grad_norm == pytest.approx(expected.stats[0].grad_norm, rel=4 * BFLOAT16)


@pytest.mark.parametrize(("size", "case"), CASES)
def test_every_engine_takes_the_same_steps(
    groups: dict[int, dict[str, Outcome]], expected: Outcome, size: int, case: str
) -> None:
    outcome = groups[size][case]
    assert outcome.stats[0].grad_norm > 1  # so that it is clipped
    assert numbers(outcome.stats[0]) == pytest.approx(numbers(expected.stats[0]), rel=1e-5, abs=1e-7)
    assert_close(expected.gradient, outcome.gradient, 1e-5)
    for stats, alike in zip(outcome.stats, expected.stats, strict=True):
        assert numbers(stats) == pytest.approx(numbers(alike), rel=1e-3, abs=1e-5)
    assert_close(expected.weights, outcome.weights, 1e-4)


@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_without_work_takes_part(groups: dict[int, dict[str, Outcome]], stage: int) -> None:
    """Five minibatches of one group each leave one of two ranks without work in every minibatch."""
    alone = engine()
    train(alone, range(1, 2), minibatches=1)
    train(alone, range(2, 4), minibatches=5)
    assert_close(alone.weights(), groups[2][f"uneven {stage}"].weights, 1e-4)


def test_norms_of_heads_are_trained_as_other_weights(groups: dict[int, dict[str, Outcome]]) -> None:
    alone = engine(spec=QWEN3)
    train(alone, range(1, 2), minibatches=1)
    assert_close(alone.weights(), groups[2]["qwen3 3"].weights, 1e-4)


@pytest.mark.parametrize("case", BY_TRANSFORMERS)
def test_transformers_own_module_takes_the_same_steps(
    groups: dict[int, dict[str, Outcome]], expected: Outcome, case: str
) -> None:
    outcome = groups[2][f"transformers {case}"]
    if "bfloat16" in case:
        assert_within_rounding(expected, outcome)
        return
    assert_close(expected.gradient, outcome.gradient, 1e-5)
    for one, other in zip(expected.stats, outcome.stats, strict=False):
        assert numbers(one) == pytest.approx(numbers(other), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("stage", RECOMPUTED)
def test_computing_activations_again_changes_nothing(
    groups: dict[int, dict[str, Outcome]], expected: Outcome, stage: int
) -> None:
    computed = groups[2][f"recomputed {stage}"]
    assert_close(expected.gradient, computed.gradient, 1e-5)
    for one, other in zip(expected.stats, computed.stats, strict=False):
        assert numbers(one) == pytest.approx(numbers(other), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("stage", STAGES)
def test_bfloat16_takes_nearly_the_same_steps(
    groups: dict[int, dict[str, Outcome]], expected: Outcome, stage: int
) -> None:
    """A weight deviates by less than the updates may have moved it."""
    outcome = groups[2][f"bfloat16 {stage}"]
    assert_within_rounding(expected, outcome)
    alone = engine()
    train(alone, range(1, 2), minibatches=1)
    train(alone, range(2, 4))
    assert_close(alone.weights(), outcome.weights, 0.05)


@pytest.mark.parametrize("stage", SMALL)
def test_updates_too_small_for_bfloat16_are_kept(groups: dict[int, dict[str, Outcome]], stage: int) -> None:
    """With a learning rate of 1e-6 hardly a weight moves by what bfloat16 could tell."""
    outcome = groups[2][f"small {stage}"]
    changes = {name: outcome.weights[name] - before.numpy() for name, before in weights().items()}
    moved = sum(np.count_nonzero(change) for change in changes.values())
    assert moved > 0.9 * sum(change.size for change in changes.values())
    assert max(np.abs(change).max() for change in changes.values()) < 1e-6


@pytest.mark.parametrize(("stage", "dtype"), DIVERGED)
def test_divergence_raises_on_every_rank_and_leaves_no_trace(
    groups: dict[int, dict[str, Outcome]], stage: int, dtype: str
) -> None:
    outcome = groups[2][f"diverged {dtype} {stage}"]
    assert outcome.error.startswith("step 9, update 0: loss")
    assert not any(change.any() for change in outcome.gradient.values())
    if dtype == "float32":
        untroubled = engine()
        train(untroubled, range(1, 3))
        assert_close(untroubled.weights(), outcome.weights, 1e-4)
    assert all(np.isfinite(values).all() for values in outcome.weights.values())


def test_a_run_may_change_engine_stage_and_ranks(groups: dict[int, dict[str, Outcome]]) -> None:
    """The torch engine, two ranks at stage 2, one at stage 3, the torch engine again: two steps each."""
    straight = engine()
    expected = train(straight, range(1, 9))
    stats = groups[2]["relay 2"].stats + groups[1]["relay 1"].stats
    for one, other in zip(stats, expected, strict=True):
        assert numbers(one) == pytest.approx(numbers(other), rel=1e-3, abs=1e-5)
    assert_close(straight.weights(), groups[1]["relay 1"].weights, 1e-4)


def test_a_state_of_another_model_is_refused(groups: dict[int, dict[str, Outcome]]) -> None:
    outcome = groups[1]["refused"]
    assert outcome.error == (
        "weight/model.embed_tokens.weight: expected shape [23, 16] in the saved state, got shape [40, 16]"
    )
    assert not any(change.any() for change in outcome.gradient.values())
