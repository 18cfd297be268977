"""Generalized advantage estimation and the critic's loss: loops, worked numbers, differences."""

import numpy as np
import pytest
import torch

from recipes.algorithms.advantages import gae
from recipes.algorithms.value_losses import clipped_value_loss, explained_variance

torch.set_num_threads(1)


def numpy_gae(rewards, values, gamma, lam):
    """The sum of the paper, eq. 16: A_t = sum over l of (gamma lam)^l delta_{t+l}."""
    deltas = rewards + gamma * np.append(values[1:], 0.0) - values
    return np.array(
        [
            sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, len(deltas)))
            for t in range(len(deltas))
        ]
    )


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0), (0.0, 0.5)])
def test_against_the_sum(gamma, lam):
    rng = np.random.default_rng(5)
    lengths = np.array([4, 0, 1, 7])
    rewards, values = rng.normal(size=12), rng.normal(size=12)
    result = gae(rewards, values, lengths, gamma=gamma, lam=lam)
    ends = np.cumsum(lengths)
    expected = np.concatenate(
        [
            numpy_gae(rewards[e - n : e], values[e - n : e], gamma, lam)
            for e, n in zip(ends, lengths, strict=True)
        ]
    )
    np.testing.assert_allclose(result.advantages, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(result.returns, expected + values, rtol=1e-5, atol=1e-6)


def test_worked_by_hand():
    """gamma = lam = 1: the advantage is the reward to go less the value."""
    result = gae(np.array([0.0, 0.0, 1.0]), np.array([0.5, 0.25, 0.75]), np.array([3]))
    np.testing.assert_allclose(result.advantages, [0.5, 0.75, 0.25])
    np.testing.assert_allclose(result.returns, [1.0, 1.0, 1.0])


def test_tokens_of_a_tool_are_passed_over():
    """Chosen tokens get what they would get if the others were not there; those get 0."""
    rng = np.random.default_rng(6)
    mask = np.array([1, 1, 0, 0, 1, 0, 1, 0], bool)
    rewards, values = rng.normal(size=8) * mask, rng.normal(size=8)
    options = {"gamma": 0.9, "lam": 0.8}
    lengths = np.array([5, 3])
    result = gae(rewards, values, lengths, mask, **options)
    alone = gae(rewards[mask], values[mask], np.array([3, 1]), **options)
    np.testing.assert_array_equal(result.advantages[mask], alone.advantages)
    np.testing.assert_array_equal(result.returns[mask], alone.returns)
    assert not result.advantages[~mask].any() and not result.returns[~mask].any()
    unmasked = gae(rewards, values, lengths, **options)
    assert not np.array_equal(unmasked.advantages[mask], alone.advantages)


def test_a_reward_on_a_tool_token_is_the_chosen_one_before():
    mask = np.array([True, False, True, False])
    there = gae(np.array([0, 2.0, 0, 3.0]), np.zeros(4), np.array([4]), mask)
    before = gae(np.array([2.0, 0, 3.0, 0]), np.zeros(4), np.array([4]), mask)
    np.testing.assert_array_equal(there.advantages, before.advantages)
    assert there.advantages.tolist() == [5, 0, 3, 0]


def test_edges_and_errors():
    one, empty = np.array([2.0]), np.zeros(0)
    assert gae(one, one / 4, np.array([1])).advantages.tolist() == [1.5]
    assert gae(empty, empty, np.array([0, 0])).advantages.shape == (0,)
    nothing = gae(one, one, np.array([1]), np.array([False]))
    assert nothing.advantages.tolist() == nothing.returns.tolist() == [0]
    with pytest.raises(ValueError, match=r"for each of the 2 tokens"):
        gae(one, one, np.array([2]))
    with pytest.raises(ValueError, match=r"lam must lie in \[0, 1\], got 2"):
        gae(one, one, np.array([1]), lam=2)
    with pytest.raises(ValueError, match="the value of token 1 is nan"):
        gae(np.zeros(2), np.array([0.0, np.nan]), np.array([2]))


def numpy_value_loss(values, old, returns, clip):
    near = old + np.clip(values - old, -clip, clip)
    return 0.5 * np.maximum((values - returns) ** 2, (near - returns) ** 2)


def test_value_loss_and_gradient():
    rng = np.random.default_rng(7)
    values, old, returns = rng.normal(size=(3, 300))
    variable = torch.tensor(values, requires_grad=True)
    result = clipped_value_loss(variable, torch.tensor(old), torch.tensor(returns))
    expected = numpy_value_loss(values, old, returns, 0.5)
    np.testing.assert_allclose(result.loss.detach(), expected, rtol=1e-12)
    result.loss.sum().backward()
    step = 1e-6
    gradient = (
        numpy_value_loss(values + step, old, returns, 0.5)
        - numpy_value_loss(values - step, old, returns, 0.5)
    ) / (2 * step)
    np.testing.assert_allclose(variable.grad, gradient, rtol=1e-5, atol=1e-6)
    clipped = result.metrics["critic/vf_clipfrac"].numpy()
    assert 0 < clipped.mean() < 1
    assert (expected[clipped > 0] > 0.5 * ((values - returns) ** 2)[clipped > 0]).all()
    free = clipped_value_loss(variable, torch.tensor(old), torch.tensor(returns), clip_range=None)
    np.testing.assert_allclose(free.loss.detach(), 0.5 * (values - returns) ** 2, rtol=1e-12)
    with pytest.raises(ValueError, match="clip_range must be positive or None, got 0"):
        clipped_value_loss(variable, variable, variable, clip_range=0)


def test_explained_variance():
    returns = np.array([0.0, 1.0, 2.0, 3.0])
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(np.full(4, 9.0), returns) == 0.0
    assert explained_variance(-returns, returns) == -3.0
    assert np.isnan(explained_variance(returns, np.ones(4)))
    assert np.isnan(explained_variance(np.zeros(0), np.zeros(0)))
