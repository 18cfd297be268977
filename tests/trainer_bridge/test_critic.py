"""Critic and reference policy: what they compute, and what they leave alone."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from recipes.algorithms import clip, clipped_value_loss, explained_variance, kl_penalty
from recipes.algorithms.aggregation import token_weights
from rollout import RolloutBatch, load_pretrained
from rollout.model.checkpoint import save_pretrained
from tests.folders import word_tokenizer
from tests.trainer_bridge.test_learner import Bench, advantages_for
from trainer_bridge import Algorithm, CriticConfig, TokenColumns
from trainer_bridge.scoring import hidden_rows
from trainer_bridge.trajectory import micro_batches

TOKEN_MEAN = partial(token_weights, mode="token_mean")
PLAIN_VALUES = partial(clipped_value_loss, clip_range=None)
PPO = Algorithm("ppo", clip, TOKEN_MEAN, value_loss=PLAIN_VALUES)
CRITIC_ALONE = replace(PPO, policy_loss=None)
PENALIZED = Algorithm(
    "penalized", clip, TOKEN_MEAN, reference_penalty=partial(kl_penalty, coefficient=0.5)
)


def bench(trunk: str | None = "own", **settings: object) -> Bench:
    critic = None if trunk is None else CriticConfig(
        trunk, learning_rate=1e-2, weight_decay=0.0, max_grad_norm=None
    )
    return Bench(critic=critic, **settings)


def tokens_left(batch: RolloutBatch) -> np.ndarray:
    """A return that a critic can learn: a tenth of how many tokens are still to come."""
    return np.concatenate([np.arange(n, 0, -1) / 10 for n in batch.lengths]).astype(np.float32)


def with_returns(made: Bench, batch: RolloutBatch) -> TokenColumns:
    return replace(made.learner.score_tokens(batch), returns=tokens_left(batch))


def put_back(made: Bench, kept: torch.nn.Module) -> None:
    made.gate.write(2, lambda version: made.arena.copy_from(kept))


def critic_state(made: Bench) -> list[torch.Tensor]:
    critic = made.learner.critic
    trunk = [] if critic.trunk is None else list(critic.trunk.parameters())
    return [p.detach().clone() for p in (*critic.head.parameters(), *trunk)]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize(("trunk", "explained"), [("own", 0.9), ("shared", 0.5)])
def test_a_critic_learns_and_alone_it_publishes_nothing(trunk, explained):
    """Critic warm-up: its loss falls, the policy keeps its bits and its version. A head alone, on
    random hidden states, explains less."""
    made = bench(trunk)
    batch = made.batch(ignore_eos=True)
    before, returns = made.weights(), tokens_left(batch)
    assert not made.learner.score_tokens(batch).values.any(), "the head starts at 0"
    for _ in range(60):
        stats = made.learner.step(batch, None, CRITIC_ALONE, with_returns(made, batch))
    assert explained_variance(made.learner.score_tokens(batch).values, returns) > explained
    assert stats["critic/vf_loss"] < 0.2 * float(np.square(returns).mean() / 2)
    assert made.gate.version == made.learner.updates == 0
    assert same(before, made.weights())
    assert "actor/pg_loss" not in stats


def test_a_trunk_of_its_own_leaves_the_policy_alone():
    """To the bit; where the trunk is shared, the value loss moves the policy (control)."""
    after = {}
    for trunk in (None, "own", "shared"):
        made = bench(trunk)
        batch = made.batch()
        columns = TokenColumns() if trunk is None else with_returns(made, batch)
        algorithm = replace(PPO, value_loss=None) if trunk is None else PPO
        for _ in range(2):  # the head is 0 in the first step, and gives the trunk no gradient
            made.learner.step(batch, advantages_for(batch), algorithm, columns)
        assert made.gate.version == 2
        after[trunk] = made.weights()
    assert same(after[None], after["own"])
    assert not same(after[None], after["shared"])


@pytest.mark.parametrize("trunk", ["own", "shared"])
def test_values_and_gradients_are_those_of_plain_torch(trunk):
    """With prompts shared within a group and several micro-batches, against one pass per token."""
    made = bench(trunk, micro_batch_tokens=25)
    batch = made.batch()
    critic = made.learner.critic
    with torch.no_grad():
        for parameter in critic.head.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
    found = made.learner.score_tokens(batch)
    model = made.model if critic.trunk is None else critic.trunk
    values = []
    for i in range(len(batch)):
        alone = batch.select([i])
        (micro,) = micro_batches(alone, [0], 10_000)
        hidden = hidden_rows(model, micro, made.learner._backend)
        values.append(critic.head(hidden).squeeze(-1))
    plain = torch.cat(values)
    np.testing.assert_allclose(found.values, plain.detach().numpy(), atol=1e-6)

    returns = torch.from_numpy(tokens_left(batch))
    ((plain - returns).square() / 2).mean().backward()
    expected = [p.grad.clone() for p in critic.head.parameters()]
    expected_trunk = model.model.layers[0].mlp.up_proj.weight.grad.clone()
    made.learner.step(batch, None, CRITIC_ALONE, with_returns(made, batch))
    share = critic.coefficient
    for mine, theirs in zip(critic.head.parameters(), expected, strict=True):
        torch.testing.assert_close(mine.grad, theirs * share, atol=1e-6, rtol=1e-4)
    if trunk == "own":
        mine = model.model.layers[0].mlp.up_proj.weight.grad
        torch.testing.assert_close(mine, expected_trunk, atol=1e-6, rtol=1e-3)


@pytest.mark.parametrize("trunk", ["own", "shared"])
def test_gradient_checkpointing_changes_no_bit(trunk):
    """Policy and critic after a step; what enters a layer is all that is kept of it."""
    plain, checkpointed = bench(trunk), bench(trunk, gradient_checkpointing=True)
    assert checkpointed.model.gradient_checkpointing and not plain.model.gradient_checkpointing
    batch = plain.batch()
    forwards = []
    for made in (plain, checkpointed):
        columns, calls = with_returns(made, batch), []
        layer = made.model.model.layers[0]
        layer.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        made.learner.step(batch, advantages_for(batch), PPO, columns)
        forwards.append(len(calls))
    assert forwards == [1, 2], "once, and once again for the backward"
    assert same(plain.weights(), checkpointed.weights())
    assert same(critic_state(plain), critic_state(checkpointed))


@pytest.mark.parametrize("trunk", ["own", "shared"])
def test_going_on_from_a_state_is_as_if_never_interrupted(trunk, tmp_path):
    """Critic, its optimizer and the reference policy are part of the learner's state."""
    runs = []
    for interrupted in (False, True):
        made = bench(trunk, reference=True)
        made.learner.reset_from_policy("critic", "reference")
        batch = made.batch()
        algorithm = replace(PPO, reference_penalty=PENALIZED.reference_penalty)
        for step in range(4):
            if step == 2 and interrupted:
                torch.save(made.learner.state_dict(), tmp_path / "state.pt")
                save_pretrained(made.model, tmp_path / "weights", word_tokenizer())
                made = bench(trunk, reference=True)
                kept, _ = load_pretrained(tmp_path / "weights")
                put_back(made, kept)
                state = torch.load(tmp_path / "state.pt", weights_only=True)
                made.learner.load_state_dict(state)
            columns = with_returns(made, batch)
            made.learner.step(batch, advantages_for(batch), algorithm, columns)
        assert columns.reference_logprobs.tobytes() == batch.logprobs.tobytes()
        runs.append([*made.weights(), *critic_state(made)])
    assert same(*runs)


def test_the_reference_is_the_policy_to_the_bit_until_that_moves():
    """Scored by the same function. Afterwards it stays what it was (control: the policy does not),
    until it is told to follow."""
    made = bench(None, reference=True)
    made.learner.reset_from_policy("reference")
    batch = made.batch()
    first = made.learner.score_tokens(batch).reference_logprobs
    assert first.tobytes() == batch.logprobs.tobytes()
    stats = made.learner.step(
        batch, advantages_for(batch), PENALIZED, TokenColumns(reference_logprobs=first)
    )
    assert stats["kl"] == 0, "on-policy, and the reference is the policy"
    assert made.learner.score_tokens(batch).reference_logprobs.tobytes() == first.tobytes()
    later = made.batch()
    apart = made.learner.score_tokens(later).reference_logprobs
    assert apart.tobytes() != later.logprobs.tobytes()
    made.learner.reset_from_policy("reference")
    assert made.learner.score_tokens(later).reference_logprobs.tobytes() == later.logprobs.tobytes()


def test_the_penalty_holds_the_policy_at_the_reference():
    """The same advantages, again and again: with a heavy penalty the policy stays nearer."""
    distance = []
    for coefficient in (0.0, 5.0):
        made = bench(None, reference=True)
        made.learner.reset_from_policy("reference")
        penalty = partial(kl_penalty, coefficient=coefficient)
        batch = made.batch()
        columns = made.learner.score_tokens(batch)
        for _ in range(15):
            stats = made.learner.step(
                batch, advantages_for(batch), replace(PENALIZED, reference_penalty=penalty), columns
            )
        distance.append(stats["kl"])
    assert distance[1] < distance[0] / 2


def test_entropy_coefficient():
    """loss = policy loss - c H, and the distribution gets wider for it."""
    made = bench(None)
    batch = made.batch()
    nothing = np.zeros(len(batch), np.float32)
    plain = made.learner.step(batch, nothing, Algorithm("plain", clip, TOKEN_MEAN))
    wide = Algorithm("wide", clip, TOKEN_MEAN, entropy_coefficient=0.3)
    entropies = []
    for _ in range(5):
        stats = made.learner.step(batch, nothing, wide)
        assert stats["actor/pg_loss"] == pytest.approx(-0.3 * stats["entropy"], rel=1e-5)
        entropies.append(stats["entropy"])
    assert plain["actor/pg_loss"] == 0
    assert entropies == sorted(entropies) and entropies[-1] > entropies[0]


def test_what_is_missing_is_said():
    made = bench(None)
    batch = made.batch()
    with pytest.raises(ValueError, match=r"ppo .*TrainerConfig\.critic"):
        made.learner.step(batch, None, PPO, TokenColumns(returns=tokens_left(batch)))
    with pytest.raises(ValueError, match=r"penalized .*TrainerConfig\.reference"):
        made.learner.step(batch, None, PENALIZED)
    with pytest.raises(ValueError, match="no critic"):
        made.learner.reset_from_policy("critic")
    with pytest.raises(ValueError, match="neither"):
        made.learner.step(batch, None, Algorithm("none", None, TOKEN_MEAN))
    with pytest.raises(ValueError, match="returns has shape"):
        made.learner.step(batch, None, "grpo", TokenColumns(returns=np.zeros(3, np.float32)))
    bad = tokens_left(batch)
    bad[4] = np.nan
    with pytest.raises(ValueError, match="returns of token 4"):
        made.learner.step(batch, None, "grpo", TokenColumns(returns=bad))
    assert made.gate.version == 0
    assert made.learner.score_tokens(batch) == TokenColumns()


def test_a_value_gradient_that_is_not_finite_changes_no_critic():
    made = bench("own")
    batch = made.batch()
    before = critic_state(made)
    bad = replace(CRITIC_ALONE, value_loss=infinite_values)
    stats = made.learner.step(batch, None, bad, with_returns(made, batch))
    assert stats["critic/skipped_updates"] == 1
    assert same(before, critic_state(made))


def infinite_values(values, old_values, returns):
    losses = PLAIN_VALUES(values, old_values, returns)
    return losses._replace(loss=losses.loss * float("inf"))


def test_columns_follow_a_selection():
    columns = TokenColumns(values=np.arange(4, dtype=np.float32))
    kept = columns.select(np.array([True, False, False, True]))
    assert kept.values.tolist() == [0, 3] and kept.returns is None
