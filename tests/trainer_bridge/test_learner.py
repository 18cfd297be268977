"""The training step in one process: real arena, real gate, real engine."""

from __future__ import annotations

import dataclasses
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from recipes.algorithms import clip, grpo_advantages, presets, sft, token_weights
from rollout import Decoder, RolloutBatch, RolloutEngine, SamplingParams, load_pretrained
from rollout.model import save_pretrained
from rollout.policy import ParameterLeftArena
from tests.folders import word_tokenizer
from tests.models import tiny_config, tiny_model
from trainer_bridge import Algorithm, TrainerConfig, resolve_algorithm, score
from trainer_bridge.arena import ArenaLayout, WeightArena
from trainer_bridge.learner import Learner
from trainer_bridge.publication import GateSettings, SharedGate

PER_SEQUENCE = dataclasses.replace(
    presets.PRESETS["grpo"], aggregation="seq_mean_token_mean"
).algorithm()


class Bench:
    """A learner and an engine on one arena, as the actors of a run have it."""

    def __init__(self, **settings: object) -> None:
        source = tiny_model()
        self.model = Decoder(tiny_config(), device="meta")
        self.arena = WeightArena.create(ArenaLayout.for_module(self.model))
        self.arena.bind(self.model, requires_grad=True)
        self.arena.copy_from(source)
        self.gate = SharedGate.create(self.arena, self.model, GateSettings(undo=False))
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
    assert resolve_algorithm(presets.SFT).name == "sft"
    for name in ("nonsense", "clip", "Algorithm"):
        with pytest.raises((ValueError, TypeError)):
            resolve_algorithm(name)


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def clip_loss(logprobs, old, advantages, low=0.2, high=0.2) -> torch.Tensor:
    """Per token, from the formula."""
    ratio = (logprobs - old).exp()
    return -torch.min(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def test_a_clipped_update_is_that_of_plain_torch():
    """The second pass is off-policy: many tokens are clipped, and its gradient must show it."""
    once = Bench(learning_rate=1e-2)
    batch = once.batch()
    advantages = advantages_for(batch)
    once.learner.step(batch, advantages, "grpo")
    twice = Bench(learning_rate=1e-2, num_iterations=2)
    stats = twice.learner.step(batch, advantages, "grpo")

    plain = tiny_model()
    with torch.no_grad():
        for mine, theirs in zip(plain.parameters(), once.model.parameters(), strict=True):
            mine.copy_(theirs)
    logprobs = torch.cat(score(plain, batch, attention_backend="reference"))
    old = torch.from_numpy(batch.logprobs)
    per_token = torch.from_numpy(np.repeat(advantages, batch.lengths))
    losses = clip_loss(logprobs, old, per_token)
    losses.mean().backward()
    logprobs = logprobs.detach()
    clipped = float((losses > -(logprobs - old).exp() * per_token).float().mean())
    assert 0.1 < clipped < 0.9
    # Metrics are means over the tokens of both passes; nothing is clipped in the first.
    assert stats["actor/pg_clipfrac"] == pytest.approx(clipped / 2, abs=0.01)
    assert stats["actor/ppo_kl"] == pytest.approx(float((old - logprobs).mean()) / 2, rel=1e-3)
    for (name, mine), theirs in zip(
        twice.model.named_parameters(), plain.parameters(), strict=True
    ):
        scale = float(theirs.grad.abs().max())
        assert float((mine.grad - theirs.grad).abs().max()) <= 1e-3 * scale, name


@pytest.mark.parametrize(
    ("algorithm", "weigh"),
    [
        (presets.algorithm("grpo"), lambda n: 1 / n.sum()),
        (PER_SEQUENCE, lambda n: 1 / (len(n) * n)),
        (presets.algorithm("rloo"), lambda n: 1 / len(n)),
        (presets.PRESETS["dr_grpo"].algorithm(12), lambda n: 1 / (len(n) * 12)),
    ],
)
def test_loss_is_the_weighted_sum_over_the_minibatch(algorithm, weigh):
    """On-policy each token's loss is -A; packs of any size add up to the same weighted sum."""
    bench = Bench(micro_batch_tokens=25)
    batch = bench.batch(stop_token_ids=tuple(range(2, 30)))
    assert len(set(batch.lengths.tolist())) > 1
    advantages = advantages_for(batch)
    lengths = batch.lengths.astype(np.float64)
    expected = -float((advantages * lengths * weigh(lengths)).sum())
    stats = bench.learner.step(batch, advantages, algorithm)
    assert stats["actor/pg_loss"] == pytest.approx(expected, abs=1e-6)


def test_pg_loss_is_a_mean_over_the_minibatches():
    """As `actor/grad_norm` beside it: passing over a batch again must not double the loss."""
    losses = []
    for iterations in (1, 4):
        bench = Bench(learning_rate=0.0, num_iterations=iterations)
        batch = bench.batch()
        losses.append(bench.learner.step(batch, advantages_for(batch), "grpo")["actor/pg_loss"])
    assert losses[0] == pytest.approx(losses[1])


def test_micro_batches_change_no_gradient():
    """Every tensor's gradient, for one pack, small packs, and a pack for each rollout."""
    found = []
    for tokens in (10_000, 25, 1):
        bench = Bench(micro_batch_tokens=tokens)
        batch = bench.batch()
        bench.learner.step(batch, advantages_for(batch), "grpo")
        found.append({name: p.grad.clone() for name, p in bench.model.named_parameters()})
    for other in found[1:]:
        for name, gradient in found[0].items():
            scale = float(gradient.abs().max())
            assert float((other[name] - gradient).abs().max()) <= 2e-6 * scale, name


@pytest.mark.parametrize(
    ("minibatch_size", "num_iterations", "updates"),
    [(None, 1, 1), (None, 3, 3), (5, 1, 3), (4, 2, 6), (12, 1, 1), (100, 1, 1), (1, 1, 12)],
)
def test_number_of_versions(minibatch_size, num_iterations, updates):
    """Minibatches of the batch's 12 rollouts, times the passes."""
    bench = Bench(minibatch_size=minibatch_size, num_iterations=num_iterations)
    batch = bench.batch()
    stats = bench.learner.step(batch, advantages_for(batch), "grpo")
    assert stats["rollout/policy_version"] == bench.gate.version == updates
    assert stats["sampling/importance_sampling_ratio/max"] == 1.0


def test_tokens_are_weighed_within_their_minibatch():
    """The gradient of the last minibatch is that of its rollouts alone."""
    bench, alone = Bench(learning_rate=0.0, minibatch_size=8), Bench(learning_rate=0.0)
    batch = bench.batch(stop_token_ids=tuple(range(2, 30)))
    advantages = advantages_for(batch)
    bench.learner.step(batch, advantages, "grpo")
    alone.learner.step(batch.select(range(8, 12)), advantages[8:], "grpo")
    for mine, theirs in zip(bench.model.parameters(), alone.model.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


def test_the_gradient_is_scaled_to_the_bound():
    """`actor/grad_norm` is the norm before."""
    bench = Bench(max_grad_norm=0.01)
    batch = bench.batch()
    stats = bench.learner.step(batch, advantages_for(batch), "grpo")
    norm = torch.nn.utils.get_total_norm([p.grad for p in bench.model.parameters()])
    assert stats["actor/grad_norm"] > 0.02
    assert float(norm) == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
@pytest.mark.parametrize("poison", [float("inf"), float("nan"), 1e30])
def test_a_skipped_update_leaves_no_trace(max_grad_norm, poison):
    """The optimizer, the schedule and the versions go on as if it had not been tried.

    At 1e30 every gradient is finite and their norm alone overflows.
    """
    settings = {"max_grad_norm": max_grad_norm, "lr_schedule": "linear", "total_steps": 4}
    bench, other = Bench(**settings), Bench(**settings)
    batch = bench.batch()
    bad = Algorithm(
        "bad", partial(scaled_loss, factor=poison), partial(token_weights, mode="token_mean")
    )
    stats = bench.learner.step(batch, None, bad)
    assert stats["actor/skipped_updates"] == 1 and bench.learner.updates == 0
    after = bench.learner.step(batch, advantages_for(batch), "grpo")
    expected = other.learner.step(batch, advantages_for(batch), "grpo")
    assert after["actor/lr"] == expected["actor/lr"]
    assert after["rollout/policy_version"] == expected["rollout/policy_version"] == 1
    assert "actor/skipped_updates" not in after
    assert same(bench.weights(), other.weights())


def scaled_loss(logprobs, old_logprobs, advantages, sequence_index, factor):
    losses = sft(logprobs)
    return losses._replace(loss=losses.loss * factor)


def test_equal_rewards_from_the_reward_on():
    """R12: with the advantages of the recipe; not one bit of the weights moves."""
    bench = Bench(max_grad_norm=1.0)
    batch = bench.batch()
    before = bench.weights()
    advantages = grpo_advantages(np.full(len(batch), 0.3), batch.prompt_index)
    for _ in range(2):
        stats = bench.learner.step(batch, advantages, "grpo")
        assert stats["actor/pg_loss"] == stats["actor/grad_norm"] == 0
        assert all(np.isfinite(value) for value in stats.values())
    assert same(before, bench.weights())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_advantages_are_checked_before_anything_runs(value):
    """R3: shape and finiteness; the first bad sample is named with its value."""
    bench = Bench()
    batch = bench.batch()
    before = bench.weights()
    bad = np.zeros(len(batch), np.float32)
    bad[[7, 9]] = value
    with pytest.raises(ValueError, match=f"rollout 7 is {value}"):
        bench.learner.step(batch, bad, "grpo")
    for shape in ((len(batch), 1), (len(batch) + 1,), ()):
        with pytest.raises(ValueError, match="12 rollouts"):
            bench.learner.step(batch, np.zeros(shape, np.float32), "grpo")
    assert bench.gate.version == 0 and same(before, bench.weights())


def test_a_rejected_rollout_moves_no_gradient():
    """R6: beside it the others are trained on as without it, to the bit."""
    bench, other = Bench(), Bench()
    params = SamplingParams(n=4, max_tokens=12, seed=3)
    found = bench.engine.run_batch([[5, 6, 7], [], [30, 2]], params, return_details=True)
    with_bad = RolloutBatch.from_rollouts(found)
    without = with_bad.select([*range(4), *range(8, 12)])
    advantages = advantages_for(with_bad)
    bench.learner.step(with_bad, advantages, PER_SEQUENCE)
    other.learner.step(
        without, np.delete(advantages, range(4, 8)),
        PER_SEQUENCE,
    )
    assert same(bench.weights(), other.weights())
    assert not same(bench.weights(), list(tiny_model().parameters()))


def test_a_rejected_first_minibatch_does_not_hide_the_mismatch():
    """L6, R6: `sampling/*` is of the first minibatch that holds tokens."""
    bench = Bench(minibatch_size=4)
    params = SamplingParams(n=4, max_tokens=12, seed=3)
    batch = RolloutBatch.from_rollouts(
        bench.engine.run_batch([[], [5, 6, 7]], params, return_details=True)
    )
    stats = bench.learner.step(batch, advantages_for(batch), "grpo")
    assert bench.gate.version == 1
    assert stats["sampling/importance_sampling_ratio/max"] == 1.0


def test_a_batch_without_tokens_publishes_nothing():
    """R6: every prompt was rejected."""
    bench = Bench()
    batch = RolloutBatch.from_rollouts(bench.engine.run_batch([[], []], return_details=True))
    before = bench.weights()
    stats = bench.learner.step(batch, np.zeros(2, np.float32), "grpo")
    assert stats["rollout/policy_version"] == bench.learner.updates == 0
    assert all(np.isfinite(value) for value in stats.values())
    assert same(before, bench.weights())


def test_an_assigned_state_dict_is_refused_by_name():
    """W7: with the likely call; not one bit was written."""
    bench, other = Bench(), Bench()
    batch = bench.batch()
    norm = bench.model.model.norm
    norm.load_state_dict({"weight": norm.weight.detach().clone()}, assign=True)
    with pytest.raises(ParameterLeftArena, match=r"model\.norm\.weight.*assign=True"):
        bench.learner.step(batch, advantages_for(batch), "grpo")
    assert bench.gate.version == bench.learner.updates == 0
    assert same(bench.weights(), other.weights())


def test_the_optimizer_never_rebinds():
    """W7, W8: after several updates every parameter lies where the engines read it, ties too."""
    bench = Bench(num_iterations=3, minibatch_size=5, max_grad_norm=0.1)
    batch = bench.batch()
    addresses = {name: p.data_ptr() for name, p in bench.model.named_parameters()}
    stats = bench.learner.step(batch, advantages_for(batch), "grpo")
    assert {n: p.data_ptr() for n, p in bench.model.named_parameters()} == addresses
    bench.arena.check_bound(bench.model)
    assert bench.model.output_weight is bench.model.model.embed_tokens.weight
    assert stats["publication/bytes_copied"] == 0


@pytest.mark.parametrize("tied", [True, False])
def test_a_bound_model_is_saved_with_all_its_tensors(tied, tmp_path):
    """W8: every name is in the file once, and only the tie is left out."""
    source = tiny_model(tie_word_embeddings=tied)
    arena = WeightArena.create(ArenaLayout.for_module(source), "private")
    arena.copy_from(source)
    model = Decoder(tiny_config(tie_word_embeddings=tied), device="meta")
    arena.bind(model, requires_grad=True)
    save_pretrained(model, tmp_path / "saved")
    written = load_file(tmp_path / "saved" / "model.safetensors")
    assert written.keys() == dict(source.named_parameters()).keys()
    assert ("lm_head.weight" in written) is not tied
    for name, value in source.named_parameters():
        assert torch.equal(written[name], value), name


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"lr_schedule": "linear", "warmup_steps": 2, "total_steps": 4}, [0.5, 1, 1, 0.5, 0, 0]),
        ({"lr_schedule": "cosine", "warmup_steps": 1, "total_steps": 3}, [1, 1, 0.5, 0, 0, 0]),
    ],
)
def test_learning_rates_after_warmup_and_past_the_end(settings, expected):
    """A step at rate 0 still publishes a version, with the same weights."""
    bench = Bench(**settings)
    batch = RolloutBatch.from_demonstrations([[5, 6]], [[7, 1]])
    rates = [bench.learner.step(batch, None, "sft")["actor/lr"] / 1e-3 for _ in range(5)]
    before = bench.weights()
    rates.append(bench.learner.step(batch, None, "sft")["actor/lr"] / 1e-3)
    assert rates == pytest.approx(expected, abs=1e-6)
    assert same(before, bench.weights()) and bench.gate.version == 6
