"""Rollouts of several turns: what the policy did not choose is read, and never learned from."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from recipes.algorithms import clipped_value_loss, presets
from recipes.algorithms.corrections import tis
from rollout import Rollout, RolloutBatch, RolloutEngine, SamplingParams, VersionSpan
from tests.models import tiny_model
from tests.trainer_bridge.test_correction import corrected, gradients
from tests.trainer_bridge.test_learner import Bench, advantages_for
from trainer_bridge import CriticConfig, score

torch.set_num_threads(1)
HEARD = [40, 41, 42, 43, 44]


def conversations(engine: RolloutEngine, turns: int = 3) -> RolloutBatch:
    """Groups of two, `turns` turns of up to seven tokens, with `HEARD` in between."""
    prompts = [[5, 6, 7], [9] * 20, [30, 2]]
    params = SamplingParams(n=2, max_tokens=7, seed=3)
    talks = engine.run_batch(prompts, params, return_details=True)
    talks = [replace(t, response_mask=[True] * len(t.token_ids)) for t in talks]
    for turn in range(1, turns):
        contexts = [t.prompt_token_ids + t.token_ids + HEARD for t in talks]
        params = SamplingParams(max_tokens=7, seed=3 + turn)
        found = engine.run_batch(contexts, params, return_details=True)
        talks = [longer(talk, turn) for talk, turn in zip(talks, found, strict=True)]
    return RolloutBatch.from_rollouts(talks)


def longer(talk: Rollout, turn: Rollout) -> Rollout:
    silence = [0.0] * len(HEARD)
    start = len(talk.token_ids) + len(HEARD)
    return replace(
        talk,
        token_ids=talk.token_ids + HEARD + turn.token_ids,
        logprobs=talk.logprobs + silence + turn.logprobs,
        sampling_logprobs=talk.sampling_logprobs + silence + turn.sampling_logprobs,
        response_mask=talk.response_mask + [False] * len(HEARD) + [True] * len(turn.token_ids),
        version_spans=(
            *talk.version_spans,
            *(VersionSpan(v, start + a, start + b) for v, a, b in turn.version_spans),
        ),
    )


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("pack", [30, 100_000])
def test_engine_equals_trainer(family, pack):
    """Each turn was sampled on the KV of the turns before it; the trainer reads all at once."""
    model = tiny_model(family)
    batch = conversations(RolloutEngine(model, block_size=4))
    scored = torch.cat(score(model, batch, micro_batch_tokens=pack)).detach()
    assert torch.equal(scored, torch.from_numpy(batch.logprobs[batch.response_mask]))
    assert len(scored) < batch.num_tokens
    deaf = batch.token_ids.copy()  # the control: something else was heard
    deaf[~batch.response_mask] += 1
    other = torch.cat(score(model, replace(batch, token_ids=deaf))).detach()
    assert not torch.equal(scored, other)


def test_the_update_is_that_of_plain_torch():
    """Loss and gradient over the tokens that the policy chose, and those alone."""
    bench = Bench(micro_batch_tokens=60)
    batch = conversations(bench.engine)
    advantages = advantages_for(batch)
    plain = tiny_model()
    logprobs = torch.cat(score(plain, batch, attention_backend="reference"))
    per_token = torch.from_numpy(np.repeat(advantages, batch.lengths)[batch.response_mask])
    loss = -(per_token * logprobs).mean()
    loss.backward()
    stats = bench.learner.step(batch, advantages, "reinforce_pp")  # ratio 1: -A grad log p
    for mine, theirs in zip(gradients(bench.model), gradients(plain), strict=True):
        assert float((mine - theirs).abs().max()) <= 1e-4 * float(theirs.abs().max())
    assert stats["sampling/importance_sampling_ratio/max"] == 1
    assert stats["sampling/sampling_logp_difference/max"] == 0


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "gspo", "cispo", "rloo"])
def test_what_lies_on_tokens_heard_changes_no_bit(name):
    """Advantages there are not read. The control: elsewhere they are."""
    benches = [Bench() for _ in range(3)]
    batch = conversations(benches[0].engine)
    advantages = np.repeat(advantages_for(batch), batch.lengths)
    noise = np.random.default_rng(1).standard_normal(len(advantages)).astype(np.float32)
    cases = (
        advantages,
        np.where(batch.response_mask, advantages, noise),
        np.where(batch.response_mask, noise, advantages),
    )
    for bench, values in zip(benches, cases, strict=True):
        bench.learner.step(batch, values, name)
    plain, heard, chosen = (gradients(bench.model) for bench in benches)
    assert all(map(torch.equal, plain, heard))
    assert not all(map(torch.equal, plain, chosen))


def test_a_critic_predicts_what_the_policy_chose():
    critic = CriticConfig(learning_rate=1e-2, max_grad_norm=None)
    benches = [Bench(critic=critic), Bench(critic=critic)]
    batch = conversations(benches[0].engine)
    algorithm = replace(presets.algorithm("ppo"), policy_loss=None, value_loss=clipped_value_loss)
    returns = np.ones(batch.num_tokens, dtype=np.float32)
    for bench, heard in zip(benches, (0.0, 9.0), strict=True):
        columns = bench.learner.score_tokens(batch)
        assert (columns.values[~batch.response_mask] == 0).all()
        there = np.where(batch.response_mask, returns, np.float32(heard))
        stats = bench.learner.step(batch, None, algorithm, replace(columns, returns=there))
        assert stats["critic/vf_loss"] == pytest.approx(0.5)  # (0 - 1)^2 / 2, the head begins at 0
    left, right = (bench.learner.score_tokens(batch).values for bench in benches)
    assert np.array_equal(left, right) and (left[batch.response_mask] != 0).any()


def test_a_correction_sees_only_what_the_policy_chose():
    bench = Bench(learning_rate=1e-2)
    old = conversations(bench.engine)
    bench.learner.step(old, advantages_for(old), "grpo")
    batch = RolloutBatch.concat([old, conversations(bench.engine)])
    assert set(batch.token_versions.tolist()) == {-1, 0, 1}
    seen = []

    def spy(proximal, behaviour, index):
        seen.append((proximal, behaviour, index))
        return tis(proximal, behaviour, index)

    stats = bench.learner.step(batch, advantages_for(batch), corrected(spy))
    ((proximal, behaviour, index),) = seen
    mask = batch.response_mask
    assert torch.equal(behaviour, torch.from_numpy(batch.logprobs[mask]))
    of_rollout = np.repeat(np.arange(len(batch)), batch.lengths)
    assert torch.equal(index, torch.from_numpy(of_rollout[mask]))
    own = torch.from_numpy(batch.token_versions[mask] == 1)
    assert torch.equal(proximal[own], behaviour[own])
    assert stats["correction/corrected_tokens"] == old.response_mask.sum()


def test_a_rollout_without_a_chosen_token_is_passed_over():
    """Alone it is no step; beside others it changes nothing."""
    batch = RolloutBatch.from_demonstrations(
        [[5, 6], [7]], [[8, 9], [10]], [[False, False], [True]]
    )
    one, other = Bench(), Bench()
    one.learner.step(batch, None, "sft")
    other.learner.step(batch.select([1]), None, "sft")
    assert all(map(torch.equal, one.weights(), other.weights()))
    before = one.gate.version
    one.learner.step(batch.select([0]), None, "sft")
    assert one.gate.version == before
