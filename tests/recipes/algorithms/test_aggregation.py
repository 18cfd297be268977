"""Token weights against the plain definition of each mean."""

import numpy as np
import pytest

from recipes.algorithms.aggregation import AGGREGATIONS, token_weights

LENGTHS = np.array([3, 1, 0, 6])


def by_definition(mode, losses, maximum):
    """The aggregate of ragged token losses, written out; empty sequences are not counted."""
    full = [x for x in losses if len(x)]
    if mode == "token_mean":
        return np.concatenate(full).mean()
    per_sequence = {
        "seq_mean_token_mean": [x.mean() for x in full],
        "seq_mean_token_sum": [x.sum() for x in full],
        "seq_mean_token_sum_norm": [x.sum() / maximum for x in full],
    }
    return np.mean(per_sequence[mode])


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_against_definition(mode):
    rng = np.random.default_rng(0)
    losses = [rng.normal(size=n) for n in LENGTHS]
    weights = token_weights(LENGTHS, mode, max_completion_length=8)
    total = sum(w * x.sum() for w, x in zip(weights, losses, strict=True))
    np.testing.assert_allclose(total, by_definition(mode, losses, 8), rtol=1e-6)
    assert weights.dtype == np.float32


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_micro_batches_add_up(mode):
    """The weights belong to the minibatch: parts summed are the whole. Weights taken per part
    would not add up, which is the error this prevents."""
    losses = [np.full(n, float(i + 1)) for i, n in enumerate(LENGTHS)]
    weights = token_weights(LENGTHS, mode, 8)
    parts = [sum(weights[i] * losses[i].sum() for i in part) for part in ([0, 3], [1, 2])]
    np.testing.assert_allclose(sum(parts), by_definition(mode, losses, 8), rtol=1e-6)
    wrong = sum(
        token_weights(LENGTHS[part], mode, 8) @ [losses[i].sum() for i in part]
        for part in ([0, 3], [1, 2])
    )
    assert not np.isclose(wrong, sum(parts))


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_an_empty_sequence_changes_nothing(mode):
    """R6: neighbours of a rejected request weigh what they weigh without it."""
    weights = token_weights(LENGTHS, mode, 8)
    assert weights[2] == 0
    np.testing.assert_array_equal(weights[[0, 1, 3]], token_weights([3, 1, 6], mode, 8))


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_no_tokens_at_all(mode, lengths):
    assert (token_weights(lengths, mode, 8) == 0).all()


def test_errors_name_the_value():
    with pytest.raises(ValueError, match=r"aggregation must be one of token_mean.*got 'mean'"):
        token_weights([1], "mean")
    with pytest.raises(ValueError, match="max_completion_length must be a positive number"):
        token_weights([1], "seq_mean_token_sum_norm")
    with pytest.raises(ValueError, match="lengths must be at least 0, got -1"):
        token_weights([-1], "token_mean")
    with pytest.raises(ValueError, match=r"one dimension \[sequences\], got shape \(1, 1\)"):
        token_weights([[1]], "token_mean")
