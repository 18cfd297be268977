"""Advantages against independent NumPy forms and numbers worked by hand; R3, R5, R11, R12."""

import numpy as np
import pytest

from recipes.algorithms.advantages import (
    ADVANTAGES,
    dr_grpo_advantages,
    frac_reward_zero_std,
    grpo_advantages,
    reinforce_pp_advantages,
    rloo_advantages,
    teaching_groups,
    whiten,
)

BY_GROUP = {name: ADVANTAGES[name] for name in ("grpo", "dr_grpo", "rloo")}
ALL = pytest.mark.parametrize("function", BY_GROUP.values(), ids=list(BY_GROUP))


def test_grpo_worked_by_hand():
    """Rewards 1, 0, 0, 1: mean 0.5, std sqrt(4 * 0.25 / 3) = 0.57735."""
    advantages = grpo_advantages([1.0, 0.0, 0.0, 1.0], np.zeros(4, int))
    expected = 0.5 / (0.5773502691896258 + 1e-4)
    np.testing.assert_allclose(advantages, [expected, -expected, -expected, expected], rtol=1e-6)
    assert advantages.dtype == np.float32


def test_dr_grpo_worked_by_hand():
    advantages = dr_grpo_advantages([3.0, 1.0, 2.0], np.array([7, 7, 7]))
    np.testing.assert_allclose(advantages, [1.0, -1.0, 0.0])


def test_rloo_worked_by_hand():
    """Each reward less the mean of the two others: 3 - 1.5, 1 - 2.5, 2 - 2."""
    advantages = rloo_advantages([3.0, 1.0, 2.0], np.zeros(3, int))
    np.testing.assert_allclose(advantages, [1.5, -1.5, 0.0])


@pytest.mark.parametrize("seed", range(5))
def test_against_dense_forms(seed):
    """Equal groups as a matrix [prompts, samples], in any order of the rows."""
    rng = np.random.default_rng(seed)
    matrix = rng.normal(size=(6, 5))
    order = rng.permutation(30)
    rewards, groups = matrix.ravel()[order], np.repeat(np.arange(6), 5)[order]
    centered = matrix - matrix.mean(1, keepdims=True)
    others = (matrix.sum(1, keepdims=True) - matrix) / 4
    variance = (centered**2).sum(1, keepdims=True) / 4
    expected = {
        "grpo": centered / (np.sqrt(variance) + 1e-4),
        "dr_grpo": centered,
        "rloo": matrix - others,
    }
    for name, function in BY_GROUP.items():
        np.testing.assert_allclose(
            function(rewards, groups), expected[name].ravel()[order], rtol=1e-5, atol=1e-6
        )


@ALL
def test_groups_do_not_touch_each_other(function):
    alone = function([1.0, 0.0, 0.5], np.zeros(3, int))
    together = function([1.0, 9.0, 0.0, -9.0, 0.5], np.array([0, 1, 0, 1, 0]))
    np.testing.assert_array_equal(together[[0, 2, 4]], alone)


@ALL
def test_equal_rewards_give_exactly_zero(function):
    """R12: no NaN, and no rounding noise divided by a vanishing std. The mean of these rewards is
    not the reward itself in floating point, which is what would go wrong."""
    reward = 0.1
    rewards = [reward] * 3 + [reward * 7] * 11
    advantages = function(rewards, np.repeat([0, 1], [3, 11]))
    assert (advantages == 0).all()
    assert np.mean(rewards[:3]) != reward or np.mean(rewards[3:]) != reward * 7


@ALL
def test_missing_rewards_leave_the_baseline(function):
    """None: advantage 0, and the others are judged as if it were not there."""
    groups = np.zeros(4, int)
    advantages = function([1.0, None, 0.0, 0.5], groups)
    assert advantages[1] == 0
    np.testing.assert_array_equal(
        advantages[[0, 2, 3]], function([1.0, 0.0, 0.5], groups[:3])
    )
    zero_counted = function([1.0, 0.0, 0.0, 0.5], groups)
    assert not np.array_equal(advantages[[0, 2, 3]], zero_counted[[0, 2, 3]])


@ALL
@pytest.mark.parametrize("rewards", [[None, None], [1.0, None]])
def test_fewer_than_two_scored_teach_nothing(function, rewards):
    assert (function(rewards, np.zeros(2, int)) == 0).all()


@ALL
def test_a_group_of_one_is_refused(function):
    """R11: by sample and group, not a silent zero."""
    with pytest.raises(ValueError, match=r"sample 2 is alone in group 9"):
        function([1.0, 0.0, 1.0], np.array([4, 4, 9]))


@ALL
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), np.float32("nan")])
def test_non_finite_reward_names_the_sample(function, bad):
    """R3."""
    with pytest.raises(ValueError, match=r"reward of sample 1 is (nan|-?inf)"):
        function([0.0, bad], np.zeros(2, int))


@ALL
def test_wrong_shapes_are_refused(function):
    """R3."""
    with pytest.raises(ValueError, match=r"group_index has shape \(3,\), but there are 2 rewards"):
        function([0.0, 1.0], np.zeros(3, int))
    with pytest.raises(ValueError, match=r"one dimension .* got shape \(2, 2\)"):
        function(np.zeros((2, 2)), np.zeros(4, int))
    with pytest.raises(ValueError, match=r"sample 0 must be a number or None, got 'a'"):
        function(["a", 1.0], np.zeros(2, int))


@ALL
def test_an_empty_batch_is_empty(function):
    assert function([], np.zeros(0, int)).shape == (0,)


def numpy_reinforce_pp(rewards, lengths, gamma):
    """Token by token, backwards, then whitened."""
    returns = []
    for reward, length in zip(rewards, lengths, strict=True):
        total, own = 0.0, []
        for t in reversed(range(length)):
            total = (reward if t == length - 1 else 0.0) + gamma * total
            own.insert(0, total)
        returns += own
    return (returns - np.mean(returns)) / np.std(returns, ddof=1)


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
def test_reinforce_pp_against_a_loop(gamma):
    rng = np.random.default_rng(3)
    rewards, lengths = rng.normal(size=8), rng.integers(0, 6, size=8)
    groups = np.repeat(np.arange(4), 2)
    advantages = reinforce_pp_advantages(rewards, groups, lengths, gamma=gamma)
    assert advantages.dtype == np.float32 and advantages.shape == (lengths.sum(),)
    expected = numpy_reinforce_pp(rewards, lengths, gamma)
    np.testing.assert_allclose(advantages, expected, rtol=1e-5, atol=1e-6)
    centered = rewards - np.repeat(rewards.reshape(4, 2).mean(1), 2)
    np.testing.assert_allclose(
        reinforce_pp_advantages(rewards, groups, lengths, gamma=gamma, baseline=True),
        numpy_reinforce_pp(centered, lengths, gamma), rtol=1e-5, atol=1e-6,
    )  # fmt: skip


def test_reinforce_pp_worked_by_hand():
    """Rewards 1 and 0 on 1 and 3 tokens: mean 1/4, variance (9 + 3) / 16 / 3 = 1/4."""
    advantages = reinforce_pp_advantages([1.0, 0.0], np.arange(2), np.array([1, 3]))
    np.testing.assert_allclose(advantages, [1.5, -0.5, -0.5, -0.5], rtol=1e-6)


def test_reinforce_pp_edges():
    lengths, groups = np.array([2, 1, 1]), np.zeros(3, int)
    missing = reinforce_pp_advantages([None, 1.0, 0.0], groups, lengths)
    assert missing[:2].tolist() == [0, 0]
    np.testing.assert_array_equal(
        missing[2:], reinforce_pp_advantages([1.0, 0.0], groups[1:], lengths[1:])
    )
    assert not reinforce_pp_advantages([0.1] * 3, groups, lengths).any()
    assert not reinforce_pp_advantages([None] * 3, groups, lengths).any()
    assert reinforce_pp_advantages([], groups[:0], lengths[:0]).shape == (0,)
    with pytest.raises(ValueError, match="needs lengths"):
        reinforce_pp_advantages([1.0], groups[:1])
    with pytest.raises(ValueError, match=r"lengths has shape \(2,\), but there are 3 rewards"):
        reinforce_pp_advantages([1.0] * 3, groups, lengths[:2])
    with pytest.raises(ValueError, match=r"gamma must lie in \[0, 1\], got 1.5"):
        reinforce_pp_advantages([1.0] * 3, groups, lengths, gamma=1.5)
    with pytest.raises(ValueError, match="sample 2 is alone in group 9"):
        reinforce_pp_advantages([1.0, 0.0, 1.0], np.array([4, 4, 9]), lengths, baseline=True)


def test_whitening():
    """Mean 0 and std 1 over what is there; nothing is made of nothing."""
    white = whiten(np.array([1.0, np.nan, 3.0, 5.0]))
    np.testing.assert_allclose(white, [-1, 0, 0, 1], atol=1e-6)
    for flat in ([], [2.0], [0.1] * 11, [np.nan] * 3):
        assert not whiten(np.array(flat)).any()


def test_zero_variance_groups_are_counted():
    """R5: equal, unscored and lone-scored groups teach nothing; the last one does."""
    rewards = [1.0, 1.0, None, None, 0.5, None, 0.0, 1.0]
    kept = teaching_groups(rewards, np.repeat(np.arange(4), 2))
    assert kept.tolist() == [False] * 6 + [True] * 2
    assert frac_reward_zero_std(rewards, np.repeat(np.arange(4), 2)) == 0.75
    assert frac_reward_zero_std([], np.zeros(0, int)) == 0.0
