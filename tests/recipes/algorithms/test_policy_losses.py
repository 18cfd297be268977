"""Policy losses against independent NumPy forms and numbers worked by hand."""

import math

import numpy as np
import pytest
import torch

from recipes.algorithms.policy_losses import clip, reinforce, sft

torch.set_num_threads(1)


def numpy_clip(logprobs, old, advantages, low, high, dual=None):
    loss = []
    for lp, lo, a in zip(logprobs, old, advantages, strict=True):
        r = math.exp(min(max(lp - lo, -20), 20))
        value = -min(r * a, min(max(r, 1 - low), 1 + high) * a)
        if dual is not None and a < 0:
            value = min(value, -dual * a)
        loss.append(value)
    return np.array(loss)


def numpy_gradient(logprobs, old, advantages, low, high, dual=None):
    """Central differences of each token's own loss."""
    step = 1e-6
    up = numpy_clip(logprobs + step, old, advantages, low, high, dual)
    down = numpy_clip(logprobs - step, old, advantages, low, high, dual)
    return (up - down) / (2 * step)


@pytest.mark.parametrize("dual", [None, 3.0])
@pytest.mark.parametrize("bounds", [(0.2, 0.2), (0.2, 0.28), (0.0, 0.0)])
def test_clip_against_numpy(bounds, dual):
    rng = np.random.default_rng(1)
    old = -rng.exponential(size=400)
    logprobs = old + rng.normal(size=400) * 0.8
    advantages = rng.normal(size=400)
    variable = torch.tensor(logprobs, requires_grad=True)
    result = clip(
        variable,
        torch.tensor(old),
        torch.tensor(advantages),
        torch.zeros(400, dtype=torch.int64),
        clip_low=bounds[0],
        clip_high=bounds[1],
        dual_clip=dual,
    )
    expected = numpy_clip(logprobs, old, advantages, *bounds, dual)
    np.testing.assert_allclose(result.loss.detach(), expected, rtol=1e-12)
    result.loss.sum().backward()
    gradient = numpy_gradient(logprobs, old, advantages, *bounds, dual)
    np.testing.assert_allclose(variable.grad, gradient, rtol=1e-5, atol=1e-6)


def test_clip_worked_by_hand():
    """Ratios 1.5, 0.5, 1.5, 0.5 under clip 0.2 with advantages 1, 1, -1, -1."""
    log_ratio = torch.tensor([1.5, 0.5, 1.5, 0.5]).log()
    result = clip(
        log_ratio, torch.zeros(4), torch.tensor([1.0, 1.0, -1.0, -1.0]), torch.arange(4)
    )
    torch.testing.assert_close(result.loss, torch.tensor([-1.2, -0.5, 1.5, 0.8]))
    assert result.metrics["actor/pg_clipfrac"].tolist() == [1, 0, 0, 1]
    torch.testing.assert_close(result.metrics["actor/ppo_kl"], -log_ratio)


def test_dual_clip_worked_by_hand():
    """Ratio 10: A = -1 is capped at 3 (10 without the cap); A = +1 is untouched by it."""
    logprobs = torch.tensor([10.0, 10.0]).log().requires_grad_()
    old, advantages = torch.zeros(2), torch.tensor([-1.0, 1.0])
    index = torch.arange(2)
    single = clip(logprobs, old, advantages, index)
    dual = clip(logprobs, old, advantages, index, dual_clip=3.0)
    torch.testing.assert_close(single.loss, torch.tensor([10.0, -1.2]))
    torch.testing.assert_close(dual.loss, torch.tensor([3.0, -1.2]))
    assert dual.metrics["actor/pg_clipfrac_lower"].tolist() == [1, 0]
    dual.loss.sum().backward()
    assert logprobs.grad.tolist() == [0.0, 0.0]


def test_on_policy_loss_and_gradient_are_exact():
    """Ratio exactly 1: loss -A and gradient -A, to the bit; off-policy they differ."""
    logprobs = torch.tensor([-0.3, -2.7, -1e-4], requires_grad=True)
    advantages = torch.tensor([0.7, -1.3, 2.0])
    result = clip(logprobs, logprobs.detach().clone(), advantages, torch.arange(3))
    result.loss.sum().backward()
    assert torch.equal(result.loss.detach(), -advantages)
    assert torch.equal(logprobs.grad, -advantages)
    assert (result.metrics["actor/ppo_kl"] == 0).all()
    off = clip(logprobs, logprobs.detach() + 1e-3, advantages, torch.arange(3))
    assert not torch.equal(off.loss.detach(), -advantages)


def test_zero_advantage_gives_zero_loss_and_gradient():
    """R12: all rewards equal, whatever the ratios."""
    logprobs = torch.tensor([-1.0, -50.0, -3.0], requires_grad=True)
    old = torch.tensor([-90.0, -1.0, -3.0])
    for function in (clip, reinforce):
        logprobs.grad = None
        loss = function(logprobs, old, torch.zeros(3), torch.zeros(3, dtype=torch.int64)).loss
        loss.sum().backward()
        assert (loss == 0).all()
        assert (logprobs.grad == 0).all()


def test_extreme_ratios_stay_finite():
    logprobs = torch.tensor([-0.1, -900.0], requires_grad=True)
    old = torch.tensor([-900.0, -0.1])
    for advantage in (-1.0, 1.0):
        result = clip(logprobs, old, torch.full((2,), advantage), torch.arange(2))
        assert result.loss.isfinite().all()


def test_reinforce_and_sft():
    logprobs = torch.tensor([-0.5, -2.0], requires_grad=True)
    old = logprobs.detach() + 0.25
    result = reinforce(logprobs, old, torch.tensor([2.0, -1.0]), torch.arange(2))
    assert result.loss.tolist() == [1.0, -2.0]
    assert result.metrics["actor/ppo_kl"].tolist() == [0.25, 0.25]
    assert sft(logprobs).loss.tolist() == [0.5, 2.0]
    assert sft(logprobs, old, torch.zeros(2), torch.arange(2)).loss.tolist() == [0.5, 2.0]


def test_metrics_carry_no_gradient_and_inputs_stay():
    logprobs = torch.tensor([-0.5, -2.0], requires_grad=True)
    old, advantages = torch.tensor([-0.4, -2.5]), torch.tensor([1.0, -1.0])
    before = (logprobs.detach().clone(), old.clone(), advantages.clone())
    result = clip(logprobs, old, advantages, torch.arange(2), dual_clip=3.0)
    assert not any(metric.requires_grad for metric in result.metrics.values())
    for left, right in zip(before, (logprobs.detach(), old, advantages), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_low": 1.0}, r"clip_low must lie in \[0, 1\), got 1.0"),
        ({"clip_high": -0.1}, r"clip_high must be at least 0, got -0.1"),
        ({"dual_clip": 1.0}, r"dual_clip must be greater than 1 or None, got 1.0"),
    ],
)
def test_bad_bounds_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        clip(torch.zeros(1), torch.zeros(1), torch.zeros(1), torch.zeros(1), **options)
