"""Weights of tokens of older versions, the overlong penalty and the adaptive coefficient."""

import numpy as np
import pytest
import torch

from recipes.algorithms.corrections import CORRECTIONS, decoupled, mis, sequence_rejection, tis
from recipes.algorithms.kl import adaptive_coefficient
from recipes.algorithms.overlong import overlong_penalty

torch.set_num_threads(1)
EVERY = pytest.mark.parametrize("correction", CORRECTIONS.values(), ids=list(CORRECTIONS))


def example(spread):
    rng = np.random.default_rng(4)
    behaviour = -rng.exponential(size=300)
    index = np.sort(rng.integers(0, 30, size=300))
    return behaviour + spread * rng.normal(size=300), behaviour, index


def test_against_numpy():
    proximal, behaviour, index = example(0.8)
    inputs = tuple(map(torch.tensor, (proximal, behaviour, index)))
    rho = np.exp(proximal - behaviour)
    np.testing.assert_allclose(decoupled(*inputs), rho, rtol=1e-12)
    np.testing.assert_allclose(tis(*inputs, cap=1.5), np.minimum(rho, 1.5), rtol=1e-12)
    kept = np.where((rho >= 0.5) & (rho <= 2.0), rho, 0.0)
    np.testing.assert_allclose(mis(*inputs, low=0.5, high=2.0), kept, rtol=1e-12)
    assert 0 < (kept == 0).mean() < 1


def test_sequences_are_kept_or_rejected_whole():
    proximal, behaviour, index = example(0.05)
    weights = sequence_rejection(*map(torch.tensor, (proximal, behaviour, index))).numpy()
    seen = set()
    for sequence in np.unique(index):
        own = index == sequence
        mean = np.exp(np.mean(proximal[own] - behaviour[own]))
        assert (weights[own] == float(0.99 <= mean <= 1.01)).all()
        seen.add(weights[own][0])
    assert seen == {0.0, 1.0}


@EVERY
def test_the_own_version_weighs_exactly_one(correction):
    behaviour, index = torch.rand(50).neg(), torch.arange(50) // 7
    assert torch.equal(correction(behaviour.clone(), behaviour, index), torch.ones(50))


@EVERY
def test_extremes_stay_finite(correction):
    proximal, behaviour = torch.tensor([-900.0, -0.1]), torch.tensor([-0.1, -900.0])
    assert correction(proximal, behaviour, torch.arange(2)).isfinite().all()
    empty = torch.zeros(0)
    assert correction(empty, empty, torch.zeros(0, dtype=torch.int64)).shape == (0,)


def test_bad_bounds_are_named():
    one = torch.zeros(1)
    with pytest.raises(ValueError, match="cap must be positive, got 0"):
        tis(one, one, one, cap=0)
    for function in (mis, sequence_rejection):
        with pytest.raises(ValueError, match=r"must contain 1 and lie above 0, got \[1.5, 2"):
            function(one, one, one, low=1.5, high=2.0)


def test_overlong_worked_by_hand():
    """Limit 20, buffer 5: nothing up to 15 tokens, -1/5 for each one beyond."""
    penalty = overlong_penalty(np.array([0, 15, 16, 18, 20]), 20, 5)
    np.testing.assert_allclose(penalty, [0, 0, -0.2, -0.6, -1.0])
    np.testing.assert_allclose(overlong_penalty(np.array([20]), 20, 20, factor=0.5), [-0.5])
    with pytest.raises(ValueError, match=r"buffer must lie in 1..max_length \(20\), got 21"):
        overlong_penalty(np.array([1]), 20, 21)
    with pytest.raises(ValueError, match="factor must be at least 0"):
        overlong_penalty(np.array([1]), 20, 5, factor=-1)


def test_adaptive_coefficient_worked_by_hand():
    """Far above, at and far below the target: the error counts for at most 0.2."""
    options = {"num_samples": 100, "target": 0.1, "horizon": 10_000}
    assert adaptive_coefficient(0.5, 9.0, **options) == pytest.approx(0.5 * 1.002)
    assert adaptive_coefficient(0.5, 0.1, **options) == 0.5
    assert adaptive_coefficient(0.5, 0.0, **options) == pytest.approx(0.5 * 0.998)
    assert adaptive_coefficient(0.5, 0.11, **options) == pytest.approx(0.5 * 1.001)
    with pytest.raises(ValueError, match="target must be positive"):
        adaptive_coefficient(0.5, 0.0, num_samples=1, target=0.0, horizon=10)
    with pytest.raises(ValueError, match=r"horizon must be at least num_samples \(100\), got 10"):
        adaptive_coefficient(0.5, 0.0, num_samples=100, target=0.1, horizon=10)
