"""KL estimators: forms, bounds, and what they estimate."""

import numpy as np
import pytest
import torch

from recipes.algorithms.kl import KL_ESTIMATORS, k1, k2, k3

torch.set_num_threads(1)


def test_worked_by_hand():
    """d = 0.5: k1 0.5, k2 0.125, k3 exp(-0.5) - 0.5."""
    policy, reference = torch.tensor([-1.0]), torch.tensor([-1.5])
    torch.testing.assert_close(k1(policy, reference), torch.tensor([0.5]))
    torch.testing.assert_close(k2(policy, reference), torch.tensor([0.125]))
    torch.testing.assert_close(k3(policy, reference), torch.tensor([np.exp(-0.5) - 0.5]).float())


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_expectation_is_the_divergence(name):
    """Summed over the whole vocabulary with the policy's own probabilities, within the bounds."""
    rng = np.random.default_rng(0)
    policy = torch.log_softmax(torch.tensor(rng.normal(size=50) * 0.5), 0)
    reference = torch.log_softmax(torch.tensor(rng.normal(size=50) * 0.5), 0)
    exact = (policy.exp() * (policy - reference)).sum()
    estimate = (policy.exp() * KL_ESTIMATORS[name](policy, reference)).sum()
    torch.testing.assert_close(estimate, exact)


def test_k2_and_k3_are_never_negative_and_k1_is():
    policy, reference = torch.linspace(-5, 0, 101), torch.full((101,), -2.5)
    assert (k2(policy, reference) >= 0).all()
    assert (k3(policy, reference) >= 0).all()
    assert (k1(policy, reference) < 0).any()


@pytest.mark.parametrize("estimator", KL_ESTIMATORS.values(), ids=list(KL_ESTIMATORS))
def test_equal_is_zero_and_extremes_are_bounded(estimator):
    logprobs = torch.tensor([-1.0, -700.0, -0.1], requires_grad=True)
    assert (estimator(logprobs, logprobs.detach()) == 0).all()
    far = estimator(logprobs, torch.tensor([-700.0, -1.0, -0.1]))
    assert far.abs().max() <= 10
    far.sum().backward()
    assert logprobs.grad.isfinite().all()
