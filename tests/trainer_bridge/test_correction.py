"""Tokens of older versions in the training step, and advantages per token."""

from __future__ import annotations

import dataclasses
from functools import partial

import numpy as np
import pytest
import torch

from recipes.algorithms import presets
from recipes.algorithms.corrections import CORRECTIONS, tis
from rollout import RolloutBatch
from tests.models import tiny_model
from tests.trainer_bridge.test_learner import Bench, advantages_for
from trainer_bridge import Algorithm, score
from trainer_bridge.token_columns import advantages_per_token

torch.set_num_threads(1)


def corrected(correction) -> Algorithm:
    return dataclasses.replace(presets.algorithm("grpo"), correction=correction)


def gradients(model) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters()]


def moved(**settings) -> tuple[Bench, RolloutBatch]:
    """A batch, and a learner whose weights have moved on since it was sampled."""
    bench = Bench(learning_rate=1e-2, **settings)
    batch = bench.batch()
    bench.learner.step(batch, advantages_for(batch), "grpo")
    return bench, batch


@pytest.mark.parametrize("name", CORRECTIONS)
def test_on_policy_it_is_skipped(name):
    """Not one bit differs, and nothing is scored for it."""
    plain, other = Bench(), Bench()
    batch = plain.batch()
    advantages = advantages_for(batch)
    plain.learner.step(batch, advantages, "grpo")

    def must_not_be_called(*columns):
        raise AssertionError("a batch of the trainer's own version is not corrected")

    stats = other.learner.step(batch, advantages, corrected(CORRECTIONS[name]))
    assert stats["correction/corrected_tokens"] == 0
    assert all(map(torch.equal, plain.weights(), other.weights()))
    again = Bench()
    again.learner.step(batch, advantages, corrected(must_not_be_called))


def test_the_gradient_is_that_of_the_decoupled_objective():
    """One pass: the ratio to the proximal policy is 1, so each token weighs -A min(rho, C)."""
    bench, batch = moved()
    plain = tiny_model()
    with torch.no_grad():
        for mine, theirs in zip(plain.parameters(), bench.model.parameters(), strict=True):
            mine.copy_(theirs)
    advantages = np.random.default_rng(8).standard_normal(len(batch)).astype(np.float32)
    stats = bench.learner.step(batch, advantages, corrected(partial(tis, cap=1.05)))
    logprobs = torch.cat(score(plain, batch, attention_backend="reference"))
    rho = (logprobs.detach() - torch.from_numpy(batch.logprobs)).exp()
    weight = rho.clamp(max=1.05)
    assert 0.1 < float((rho > 1.05).float().mean()) < 0.9
    per_token = torch.from_numpy(np.repeat(advantages, batch.lengths))
    (-per_token * weight * logprobs).mean().backward()
    for mine, theirs in zip(gradients(bench.model), gradients(plain), strict=True):
        assert float((mine - theirs).abs().max()) <= 1e-3 * float(theirs.abs().max())
    assert stats["correction/corrected_tokens"] == batch.num_tokens
    assert stats["correction/weight/max"] == pytest.approx(1.05)
    assert stats["correction/weight/mean"] == pytest.approx(float(weight.mean()), rel=1e-4)
    assert stats["sampling/importance_sampling_ratio/max"] > 1.05  # of what was sampled, honestly
    assert stats["actor/ppo_kl"] == 0


def test_uncorrected_it_is_another_gradient():
    """The control of the above."""
    one, batch = moved()
    other, _ = moved()
    advantages = advantages_for(batch)
    one.learner.step(batch, advantages, corrected(tis))
    other.learner.step(batch, advantages, "grpo")
    assert not all(map(torch.equal, gradients(one.model), gradients(other.model)))


def test_only_tokens_of_older_versions_weigh_other_than_one():
    bench, old = moved()
    batch = RolloutBatch.concat([old, bench.batch(seed=11)])
    assert set(batch.token_versions.tolist()) == {0, 1}
    seen = []

    def spy(proximal, behaviour, index):
        seen.append((proximal, behaviour, index))
        return tis(proximal, behaviour, index)

    stats = bench.learner.step(batch, advantages_for(batch), corrected(spy))
    ((proximal, behaviour, index),) = seen
    own = torch.from_numpy(batch.token_versions == 1)
    assert torch.equal(proximal[own], behaviour[own])
    assert (proximal[~own] != behaviour[~own]).any()
    assert torch.equal(index, torch.from_numpy(np.repeat(np.arange(len(batch)), batch.lengths)))
    assert stats["correction/corrected_tokens"] == old.num_tokens


def test_micro_batches_correct_alike():
    one, batch = moved()
    other, _ = moved(micro_batch_tokens=24)
    for bench in (one, other):
        bench.learner.step(batch, advantages_for(batch), corrected(tis))
    for left, right in zip(gradients(one.model), gradients(other.model), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-6)


def test_advantages_per_token():
    """Repeated over its tokens, a rollout's advantage gives the same bits; others do not."""
    benches = [Bench(), Bench(), Bench()]
    batch = benches[0].batch()
    advantages = advantages_for(batch)
    per_token = np.repeat(advantages, batch.lengths)
    tilted = per_token * np.linspace(0.5, 1.5, len(per_token), dtype=np.float32)
    for bench, values in zip(benches, (advantages, per_token, tilted), strict=True):
        bench.learner.step(batch, values, "grpo")
    by_rollout, by_token, other = (bench.weights() for bench in benches)
    assert all(map(torch.equal, by_rollout, by_token))
    assert not all(map(torch.equal, by_rollout, other))


def test_what_cannot_be_told_apart_is_refused():
    """As many rollouts as tokens, and one of them empty: neither reading is certain."""
    batch = RolloutBatch.from_demonstrations([[1], [2]], [[], [3, 4]])
    with pytest.raises(ValueError, match="as many rollouts as tokens"):
        advantages_per_token(batch, np.zeros(2, np.float32))
    bad = np.zeros(3, np.float32)
    bad[2] = np.inf
    batch = RolloutBatch.from_demonstrations([[1], [2]], [[3], [4, 5]])
    with pytest.raises(ValueError, match="advantage of token 2 is inf"):
        advantages_per_token(batch, bad)
    assert not advantages_per_token(batch, None).any()
