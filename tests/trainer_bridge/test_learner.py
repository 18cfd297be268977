"""The training step in one process: real arena, real gate, real engine."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from recipes.algorithms import clip, presets, sft, token_weights
from rollout import Decoder, RolloutBatch, RolloutEngine, SamplingParams, load_pretrained
from rollout.model import save_pretrained
from rollout.policy import ParameterLeftArena
from tests.folders import word_tokenizer
from tests.models import tiny_config, tiny_model
from trainer_bridge import Algorithm, TrainerConfig, resolve_algorithm, score
from trainer_bridge.arena import ArenaLayout, WeightArena
from trainer_bridge.learner import Learner
from trainer_bridge.publication import SharedGate


class Bench:
    """A learner and an engine on one arena, as the actors of a run have it."""

    def __init__(self, **settings: object) -> None:
        source = tiny_model()
        self.model = Decoder(tiny_config(), device="meta")
        self.arena = WeightArena.create(ArenaLayout.for_module(self.model))
        self.arena.bind(self.model, requires_grad=True)
        self.arena.copy_from(source)
        self.gate = SharedGate.create(self.arena, self.model)
        self.gate.open()
        config = TrainerConfig(**{"learning_rate": 1e-3, "max_grad_norm": None, **settings})
        self.learner = Learner(self.model, self.gate, config)
        self.engine = RolloutEngine(self.model, word_tokenizer(), gate=self.gate)

    def batch(self, **fields: object) -> RolloutBatch:
        params = SamplingParams(**{"n": 4, "max_tokens": 12, "seed": 3, **fields})
        prompts = [[5, 6, 7], [9] * 20, [30, 2]]
        return RolloutBatch.from_rollouts(
            self.engine.run_batch(prompts, params, return_details=True)
        )

    def weights(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]


def advantages_for(batch: RolloutBatch) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(len(batch)).astype(np.float32)


def test_first_minibatch_is_exactly_on_policy():
    """L6: ratio exactly 1, difference exactly 0; the second pass is off-policy (control)."""
    bench = Bench(num_iterations=2)
    batch = bench.batch()
    stats = bench.learner.step(batch, advantages_for(batch), "grpo")
    for name in ("max", "mean", "min"):
        assert stats[f"sampling/importance_sampling_ratio/{name}"] == 1.0
        assert stats[f"sampling/sampling_logp_difference/{name}"] == 0.0
    assert stats["actor/ppo_kl"] != 0
    assert stats["publication/bytes_copied"] == 0


def test_the_update_is_that_of_plain_torch():
    """Loss, gradient and AdamW step against a plain computation of the same formula."""
    bench = Bench()
    batch = bench.batch()
    advantages = advantages_for(batch)
    plain = tiny_model()
    logprobs = torch.cat(score(plain, batch, attention_backend="reference"))
    per_token = torch.from_numpy(np.repeat(advantages, batch.lengths))
    ratio = (logprobs - torch.from_numpy(batch.logprobs)).exp()
    loss = -torch.min(ratio * per_token, ratio.clamp(0.8, 1.2) * per_token).mean()
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()])

    stats = bench.learner.step(batch, advantages, "grpo")
    assert stats["actor/pg_loss"] == pytest.approx(float(loss.detach()), abs=1e-5)
    assert stats["actor/grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    for (name, mine), theirs in zip(
        bench.model.named_parameters(), plain.parameters(), strict=True
    ):
        gradient = theirs.grad
        scale = float(gradient.abs().max())
        assert float((mine.grad - gradient).abs().max()) <= 1e-4 * scale, name


def test_micro_batches_add_up():
    """The gradient does not depend on how a minibatch is cut."""
    norms, losses = [], []
    for tokens in (10_000, 25):
        bench = Bench(micro_batch_tokens=tokens)
        batch = bench.batch()
        stats = bench.learner.step(batch, advantages_for(batch), "grpo")
        norms.append(stats["actor/grad_norm"])
        losses.append(stats["actor/pg_loss"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


def test_every_minibatch_is_a_publication():
    bench = Bench(minibatch_size=5, num_iterations=2)
    batch = bench.batch()  # 12 rollouts: minibatches of 5, 5 and 2, twice
    stats = bench.learner.step(batch, advantages_for(batch), "grpo")
    assert bench.gate.version == bench.learner.updates == 6
    assert stats["rollout/policy_version"] == 6


def test_rollouts_after_a_step_carry_the_new_version():
    """W1, W6: and are those of a cold engine on the new weights."""
    bench = Bench()
    batch = bench.batch()
    bench.learner.step(batch, advantages_for(batch), "grpo")
    after = bench.batch()
    assert {span.version for r in after for span in r.version_spans} == {1}
    cold = RolloutEngine(bench.model, word_tokenizer(), policy_version=1)
    expected = cold.run_batch(
        [[5, 6, 7], [9] * 20, [30, 2]], n=4, max_tokens=12, seed=3, return_details=True
    )
    assert list(after) == expected
    assert not np.array_equal(after.logprobs, batch.logprobs)


def test_a_gradient_that_is_not_finite_changes_nothing():
    bench = Bench()
    batch = bench.batch()
    before = bench.weights()
    poison = Algorithm("bad", infinite_loss, partial(token_weights, mode="token_mean"))
    stats = bench.learner.step(batch, None, poison)
    assert stats["actor/skipped_updates"] == 1
    assert bench.gate.version == 0
    assert all(torch.equal(a, b) for a, b in zip(before, bench.weights(), strict=True))


def infinite_loss(logprobs, old_logprobs, advantages, sequence_index):
    losses = sft(logprobs)
    return losses._replace(loss=losses.loss * float("inf"))


def test_equal_rewards_teach_nothing():
    """R12: loss 0, no NaN; weights move by weight decay alone, which is off."""
    bench = Bench()
    batch = bench.batch()
    stats = bench.learner.step(batch, np.zeros(len(batch), np.float32), "grpo")
    assert stats["actor/pg_loss"] == 0 and stats["actor/grad_norm"] == 0
    assert all(np.isfinite(value) for value in stats.values())


def test_bad_advantages_name_the_sample():
    """R3."""
    bench = Bench()
    batch = bench.batch()
    with pytest.raises(ValueError, match="shape"):
        bench.learner.step(batch, np.zeros(3, np.float32), "grpo")
    bad = np.zeros(len(batch), np.float32)
    bad[5] = np.nan
    with pytest.raises(ValueError, match="rollout 5"):
        bench.learner.step(batch, bad, "grpo")
    assert bench.gate.version == 0


def test_a_rebound_parameter_is_refused_by_name():
    """W7: before anything is published."""
    bench = Bench()
    batch = bench.batch()
    weight = bench.model.model.layers[0].mlp.up_proj.weight
    weight.data = weight.data.clone()
    with pytest.raises(ParameterLeftArena, match=r"layers\.0\.mlp\.up_proj\.weight"):
        bench.learner.step(batch, advantages_for(batch), "grpo")
    assert bench.gate.version == 0


def test_tied_embeddings_stay_tied_and_checkpoints_are_whole(tmp_path):
    """W8: and every tensor of an arena-bound model is written."""
    bench = Bench()
    batch = bench.batch()
    bench.learner.step(batch, advantages_for(batch), "grpo")
    assert bench.model.output_weight is bench.model.model.embed_tokens.weight
    save_pretrained(bench.model, tmp_path / "saved", word_tokenizer())
    model, tokenizer = load_pretrained(tmp_path / "saved")
    for mine, theirs in zip(bench.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    engine = RolloutEngine(model, tokenizer, policy_version=1)
    found = engine.run_batch([[5, 6, 7]], n=4, max_tokens=12, seed=3, return_details=True)
    assert found == [r for r in bench.batch() if r.prompt_index == 0]


def test_demonstrations_have_no_behaviour_policy():
    """Their placeholder log-probs are not reported as a mismatch; the likelihood rises."""
    bench = Bench()
    batch = RolloutBatch.from_demonstrations([[5, 6]] * 4, [[7, 8, 1]] * 4)
    losses = [bench.learner.step(batch, None, "sft")["actor/pg_loss"] for _ in range(5)]
    assert losses[-1] < losses[0]
    assert "sampling/importance_sampling_ratio/max" not in bench.learner.step(batch, None, "sft")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"lr_schedule": "constant"}, [1, 1, 1, 1]),
        ({"lr_schedule": "constant", "warmup_steps": 2}, [0.5, 1, 1, 1]),
        ({"lr_schedule": "linear", "total_steps": 4}, [1, 0.75, 0.5, 0.25]),
        ({"lr_schedule": "cosine", "total_steps": 4}, [1, 0.853553, 0.5, 0.146447]),
    ],
)
def test_learning_rates(settings, expected):
    bench = Bench(**settings)
    batch = RolloutBatch.from_demonstrations([[5, 6]], [[7, 1]])
    rates = [bench.learner.step(batch, None, "sft")["actor/lr"] / 1e-3 for _ in range(4)]
    assert rates == pytest.approx(expected, abs=1e-5)


def test_config_errors_name_field_and_value():
    for settings, message in (
        ({"lr_schedule": "step"}, "lr_schedule"),
        ({"lr_schedule": "linear"}, "total_steps"),
        ({"learning_rate": -1.0}, "learning_rate"),
        ({"micro_batch_tokens": 0}, "micro_batch_tokens"),
        ({"minibatch_size": 0}, "minibatch_size"),
    ):
        with pytest.raises(ValueError, match=message):
            TrainerConfig(**settings)


def test_algorithms_by_name_and_by_value():
    assert resolve_algorithm("grpo").name == "grpo"
    own = Algorithm("mine", clip, partial(token_weights, mode="token_mean"))
    assert resolve_algorithm(own) is own
    assert resolve_algorithm(presets.sft()).name == "sft"
    for name in ("nonsense", "clip", "Algorithm"):
        with pytest.raises((ValueError, TypeError)):
            resolve_algorithm(name)
