"""GSPO, CISPO and SAPO against independent NumPy forms; what every policy loss must keep."""

import numpy as np
import pytest
import torch

from recipes.algorithms.policy_losses import POLICY_LOSSES, cispo, clip, gspo, sapo

torch.set_num_threads(1)
EVERY = pytest.mark.parametrize("loss", POLICY_LOSSES.values(), ids=list(POLICY_LOSSES))


def numpy_gspo(logprobs, old, advantages, index, low=3e-4, high=4e-4):
    """The sequence form: one ratio per sequence, its loss at each of its tokens."""
    losses = np.empty(len(logprobs))
    for sequence in np.unique(index):
        own = index == sequence
        s = np.exp(np.mean(logprobs[own] - old[own]))
        a = advantages[own]
        losses[own] = -np.minimum(s * a, np.clip(s, 1 - low, 1 + high) * a)
    return losses


def numpy_cispo_gradient(logprobs, old, advantages, cap):
    """d/dlogprob with the weight held fast."""
    return -np.minimum(np.exp(logprobs - old), cap) * advantages


def numpy_sapo(logprobs, old, advantages, positive, negative):
    t = np.where(advantages > 0, positive, negative)
    return -4 / t / (1 + np.exp(-t * (np.exp(logprobs - old) - 1))) * advantages


def example(tokens=200, sequences=9, spread=0.3, seed=2):
    rng = np.random.default_rng(seed)
    old = -rng.exponential(size=tokens)
    index = np.sort(rng.integers(0, sequences, size=tokens)) * 3  # numbers need not be dense
    advantages = rng.normal(size=sequences * 3)[index]
    return old + spread * rng.normal(size=tokens), old, advantages, index


def tensors(logprobs, old, advantages, index):
    return (
        torch.tensor(logprobs, requires_grad=True), torch.tensor(old), torch.tensor(advantages),
        torch.tensor(index),
    )  # fmt: skip


def differences(function, logprobs, step=1e-6):
    """Gradient of a NumPy form's sum, by central differences."""
    gradient = np.empty(len(logprobs))
    for t in range(len(logprobs)):
        nudge = np.zeros(len(logprobs))
        nudge[t] = step
        gradient[t] = (function(logprobs + nudge).sum() - function(logprobs - nudge).sum()) / (
            2 * step
        )
    return gradient


@pytest.mark.parametrize("spread", [1e-3, 0.3])
def test_gspo_is_its_sequence_form(spread):
    """Loss and gradient, for tokens of one weight within a sequence."""
    logprobs, old, advantages, index = example(spread=spread)
    inputs = tensors(logprobs, old, advantages, index)
    result = gspo(*inputs)
    expected = numpy_gspo(logprobs, old, advantages, index)
    np.testing.assert_allclose(result.loss.detach(), expected, rtol=1e-12)
    result.loss.sum().backward()
    gradient = differences(lambda x: numpy_gspo(x, old, advantages, index), logprobs)
    np.testing.assert_allclose(inputs[0].grad, gradient, rtol=1e-4, atol=1e-6)


def test_gspo_worked_by_hand():
    """Log-ratios 0.1 and 0.3: s = e^0.2 for both tokens; A = 1 is clipped at 1 + 4e-4."""
    old = torch.zeros(3, dtype=torch.float64)
    logprobs = torch.tensor([0.1, 0.3, 0.2], dtype=torch.float64)
    advantages = torch.tensor([-1.0, -1.0, 1.0], dtype=torch.float64)
    result = gspo(logprobs, old, advantages, torch.tensor([0, 0, 1]))
    expected = torch.tensor([np.exp(0.2), np.exp(0.2), -1.0004], dtype=torch.float64)
    torch.testing.assert_close(result.loss, expected)
    assert result.metrics["actor/pg_clipfrac"].tolist() == [0, 0, 1]


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    logprobs, old, advantages, index = example(spread=2.0)
    inputs = tensors(logprobs, old, advantages, index)
    result = cispo(*inputs, ratio_max=2.0)
    expected = numpy_cispo_gradient(logprobs, old, advantages, 2.0)
    np.testing.assert_allclose(result.loss.detach(), expected * logprobs, rtol=1e-12)
    result.loss.sum().backward()
    np.testing.assert_allclose(inputs[0].grad, expected, rtol=1e-12)
    above = np.exp(logprobs - old) > 2.0
    assert above.any() and (inputs[0].grad.numpy()[above & (advantages != 0)] != 0).all()
    clipped = above & (advantages > 0)
    np.testing.assert_array_equal(result.metrics["actor/pg_clipfrac"], clipped)


def test_sapo_against_numpy():
    logprobs, old, advantages, index = example(spread=1.0)
    inputs = tensors(logprobs, old, advantages, index)
    result = sapo(*inputs, temperature_positive=1.5, temperature_negative=2.5)
    expected = numpy_sapo(logprobs, old, advantages, 1.5, 2.5)
    np.testing.assert_allclose(result.loss.detach(), expected, rtol=1e-12)
    result.loss.sum().backward()
    gradient = differences(lambda x: numpy_sapo(x, old, advantages, 1.5, 2.5), logprobs)
    np.testing.assert_allclose(inputs[0].grad, gradient, rtol=1e-5, atol=1e-7)


@EVERY
def test_on_policy_every_gradient_is_that_of_reinforce(loss):
    """At ratio 1, whatever the form: -A grad(logprob)."""
    logprobs, _, advantages, index = example()
    variable, old, advantages, index = tensors(logprobs, logprobs, advantages, index)
    loss(variable, old, advantages, index).loss.sum().backward()
    torch.testing.assert_close(variable.grad, -advantages, rtol=1e-12, atol=0)


@EVERY
def test_edges(loss):
    """No token, one token, zero advantages, extreme ratios: finite, and zero where nothing is
    taught; metrics carry no gradient and inputs stay as they were."""
    empty = loss(*(torch.zeros(0) for _ in range(3)), torch.zeros(0, dtype=torch.int64))
    assert empty.loss.shape == (0,)
    logprobs = torch.tensor([-0.1, -900.0, -2.0], requires_grad=True)
    old, index = torch.tensor([-900.0, -0.1, -2.0]), torch.tensor([0, 1, 2])
    for advantage in (-1.0, 0.0, 1.0):
        logprobs.grad = None
        inputs = (logprobs, old.clone(), torch.full((3,), advantage), index.clone())
        result = loss(*inputs)
        result.loss.sum().backward()
        assert result.loss.isfinite().all() and logprobs.grad.isfinite().all()
        assert advantage or not (result.loss.any() or logprobs.grad.any())
        assert all(m.shape == (3,) and not m.requires_grad for m in result.metrics.values())
        assert torch.equal(inputs[1], old) and torch.equal(inputs[3], index)
    one = loss(torch.tensor([-1.0]), torch.tensor([-1.0]), torch.ones(1), torch.tensor([7]))
    assert one.loss.shape == (1,) and one.loss.isfinite().all()


@EVERY
def test_micro_batches_add_up(loss):
    """Whole sequences may be split off without changing any token's loss."""
    logprobs, old, advantages, index = tensors(*example())
    whole = loss(logprobs, old, advantages, index).loss
    for cut in (index == 0, index != 0):
        part = loss(logprobs[cut], old[cut], advantages[cut], index[cut]).loss
        torch.testing.assert_close(part, whole[cut], rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("loss", "options", "message"),
    [
        (gspo, {"clip_low": 1.0}, r"clip_low must lie in \[0, 1\), got 1.0"),
        (cispo, {"ratio_max": 0.0}, "ratio_max must be positive, got 0.0"),
        (sapo, {"temperature_negative": 0.0}, "temperature_negative must be positive, got 0.0"),
    ],
)
def test_bad_options_are_named(loss, options, message):
    with pytest.raises(ValueError, match=message):
        loss(torch.zeros(1), torch.zeros(1), torch.zeros(1), torch.zeros(1), **options)


def test_the_ratio_of_gspo_is_not_that_of_clip():
    """The control of the forms above: token ratios give another loss."""
    inputs = tensors(*example())
    bounds = {"clip_low": 3e-4, "clip_high": 4e-4}
    assert not torch.allclose(gspo(*inputs, **bounds).loss, clip(*inputs, **bounds).loss)
