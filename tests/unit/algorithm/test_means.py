import numpy as np
import pytest

from areal_core.algorithm.losses import LOSS_MEANS

# Three completions of 2, 3 and 1 loss tokens with these terms, and one that is masked out; the limit is 5 tokens.
TERMS = [[1.0, 3.0], [6.0, 0.0, 3.0], [4.0]]
LOSS_TOKENS = np.array([2, 3, 1, 0])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("token", (4 + 9 + 4) / 6),
        ("sequence", (4 / 2 + 9 / 3 + 4 / 1) / 3),
        ("constant", (4 + 9 + 4) / (3 * 5)),
    ],
)
def test_means_by_hand(name: str, expected: float):
    weights, denominator_terms = LOSS_MEANS[name](LOSS_TOKENS, 5)
    total = sum(weight * sum(terms) for weight, terms in zip(weights, TERMS, strict=False))
    assert total / denominator_terms.sum() == pytest.approx(expected)
    assert denominator_terms[3] == 0
    assert np.isfinite(weights).all()


@pytest.mark.parametrize("name", LOSS_MEANS)
def test_the_denominator_is_the_sum_over_any_partition_of_the_completions(name: str):
    whole = LOSS_MEANS[name](LOSS_TOKENS, 5)
    parts = [LOSS_MEANS[name](LOSS_TOKENS[part], 5) for part in (slice(0, 1), slice(1, 4), slice(4, 4))]
    assert sum(part.denominator_terms.sum() for part in parts) == whole.denominator_terms.sum()
    np.testing.assert_array_equal(np.concatenate([part.weights for part in parts]), whole.weights)
