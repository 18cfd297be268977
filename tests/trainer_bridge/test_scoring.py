"""L6: the trainer's log-probs are the engine's, bit for bit, and carry the right gradient."""

from __future__ import annotations

import random

import pytest
import torch

from attention import AttentionMetadata, PackedAttention, select_backend
from rollout import Rollout, RolloutBatch, RolloutEngine, SamplingParams
from tests.models import VOCABULARY, tiny_model
from trainer_bridge import score


def workload(count: int = 8, longest: int = 120) -> list[list[int]]:
    rng = random.Random(3)
    return [
        [rng.randrange(2, VOCABULARY) for _ in range(rng.randint(1, longest))] for _ in range(count)
    ]


def largest_difference(model, found: list[Rollout], **settings: object) -> float:
    scored = score(model, found, **settings)
    return max(
        float((s.detach() - torch.tensor(r.logprobs)).abs().max())
        for s, r in zip(scored, found, strict=True)
        if r.token_ids
    )


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_engine_equals_trainer(family, temperature):
    """L6: whatever batch limits, chunks, preemption here, and packs and threads there."""
    model = tiny_model(family)
    engine = RolloutEngine(model, max_batch_size=5, max_num_batched_tokens=50, num_kv_blocks=20)
    params = SamplingParams(n=3, max_tokens=40, temperature=temperature, seed=1)
    found = engine.run_batch(workload(), params, return_details=True)
    assert engine.get_stats()["preemptions"] > 0
    before = torch.get_num_threads()
    try:
        for threads, tokens in ((1, 100_000), (2, 100)):
            torch.set_num_threads(threads)
            difference = largest_difference(
                model, found, temperature=temperature, micro_batch_tokens=tokens
            )
            assert difference == 0
    finally:
        torch.set_num_threads(before)
    assert largest_difference(model, found) == 0  # at the temperature the rollouts remember


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("threads", [1, 2])
def test_group_sizes_prompt_lengths_and_packs(n, temperature, threads):
    """L6: prompts of 1 to 150 tokens, block borders among them, in packs of every size."""
    model = tiny_model("qwen3", tie_word_embeddings=n % 2 == 0)
    rng = random.Random(n)
    lengths = [1, 15, 16, 17, 150, *(rng.randint(1, 150) for _ in range(3))]
    prompts = [[rng.randrange(2, VOCABULARY) for _ in range(length)] for length in lengths]
    engine = RolloutEngine(model, max_batch_size=6, max_num_batched_tokens=37, num_kv_blocks=30)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        found = engine.run_batch(
            prompts, n=n, max_tokens=20, temperature=temperature, seed=n, return_details=True
        )
        torch.set_num_threads(3 - threads)
        for tokens in (1, 64, 700, 100_000):
            assert largest_difference(model, found, micro_batch_tokens=tokens) == 0
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2])
def test_widths_of_a_real_model(threads):
    """L6: sums long enough that matrix kernels split them differently for few and many rows."""
    model = tiny_model(
        "llama", vocab_size=5000, hidden_size=576, intermediate_size=1536, num_hidden_layers=2,
        num_attention_heads=9, num_key_value_heads=3, head_dim=64,
    )
    engine = RolloutEngine(model, max_batch_size=7, max_num_batched_tokens=90)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        found = engine.run_batch(workload(6), n=2, max_tokens=16, seed=1, return_details=True)
        for tokens in (50, 100_000):
            assert largest_difference(model, found, micro_batch_tokens=tokens) == 0
    finally:
        torch.set_num_threads(before)


def test_prompts_with_parameters_of_their_own():
    """L6, L11: temperatures, greedy and group sizes mixed in one batch and in one pack."""
    model = tiny_model("llama")
    params = [
        SamplingParams(n=1 + i % 3, temperature=t, max_tokens=15, seed=i)
        for i, t in enumerate((1.0, 0.7, 0.0, 1.3, 0.7, 1.0))
    ]
    found = RolloutEngine(model).run_batch(workload(6), params, return_details=True)
    assert largest_difference(model, found) == 0
    assert largest_difference(model, found, temperature=1.0) > 0.01  # the control
    shuffled = found.copy()
    random.Random(0).shuffle(shuffled)
    assert largest_difference(model, shuffled, micro_batch_tokens=150) == 0


def test_without_invariant_attention_they_differ():
    """L7: the control: only the trainer's attention is replaced."""
    model = tiny_model()
    found = RolloutEngine(model).run_batch(
        workload(), n=2, max_tokens=40, seed=1, return_details=True
    )
    assert 0 < largest_difference(model, found, attention_backend="reference") < 1e-3


def test_greedy_is_scored_at_temperature_one():
    model = tiny_model()
    found = RolloutEngine(model).run_batch(
        workload(3), max_tokens=10, temperature=0.0, return_details=True
    )
    assert all(r.sampling_logprobs == [0.0] * len(r.token_ids) for r in found)
    assert largest_difference(model, found) == 0


def test_filters_move_only_the_sampling_logprob():
    """L4: `logprobs` stays what the trainer recomputes."""
    model = tiny_model()
    found = RolloutEngine(model).run_batch(
        workload(3), max_tokens=10, top_k=5, min_tokens=3, seed=0, return_details=True
    )
    assert largest_difference(model, found) == 0
    assert any(r.logprobs != r.sampling_logprobs for r in found)


def gradients(model) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return found


def sampled(model, prompts: int, n: int) -> list[Rollout]:
    """`n` samples of 20 tokens of each prompt, prompts of at most 60."""
    return RolloutEngine(model).run_batch(
        workload(prompts, 60), n=n, max_tokens=20, seed=1, return_details=True
    )


def gradients_of(model, logprobs: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    torch.cat(logprobs).sum().backward()
    return gradients(model)


def assert_close(own: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], bound: float):
    """Every gradient within `bound` of the largest number of the one wanted."""
    assert own.keys() == wanted.keys()
    for name, gradient in wanted.items():
        scale = float(gradient.abs().max())
        assert float((own[name].to(gradient) - gradient).abs().max()) <= bound * scale, name


def assert_same_bits(logprobs: list[torch.Tensor], found: list[Rollout]):
    assert all(s.detach().tolist() == r.logprobs for s, r in zip(logprobs, found, strict=True))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_shared_prompt_gives_the_gradient_of_separate_ones(family):
    model = tiny_model(family)
    found = sampled(model, 3, n=4)
    shared = gradients_of(model, score(model, found))
    for rollout in found:
        score(model, [rollout])[0].sum().backward()
    assert_close(shared, gradients(model), 1e-5)


def test_gradient_against_stock_autograd():
    """The custom forwards differentiate like the plain operations in float64."""
    model = tiny_model("qwen2", num_hidden_layers=2)
    found = RolloutEngine(model).run_batch([[5, 9, 8]], max_tokens=12, seed=1, return_details=True)
    own = gradients_of(model, score(model, found))
    exact = tiny_model("qwen2", num_hidden_layers=2).double()
    wanted = gradients_of(exact, score(exact, found, attention_backend="reference"))
    assert_close(own, wanted, 2e-4)


@torch.no_grad()
def moved(model, found, name: str, direction: torch.Tensor) -> float:
    """Summed log-probs, all in float64, with one parameter moved by `direction`."""
    parameter, total = model.get_parameter(name), 0.0
    before = parameter.clone()
    parameter.add_(direction)
    group = model.config.num_attention_heads // model.config.num_key_value_heads
    for r in found:
        ids = torch.tensor(r.prompt_token_ids + r.token_ids)
        metadata = AttentionMetadata.packed([len(ids)])
        attention = PackedAttention(metadata, select_backend("reference"), group, ids.device)
        logits = model.logits(model(ids, torch.arange(len(ids)), attention))
        logprobs = logits[:-1].log_softmax(-1).gather(1, ids[1:, None])
        total += float(logprobs[-len(r.token_ids) :].sum())
    parameter.copy_(before)
    return total


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_gradient_against_float64_finite_differences(family):
    """The backward kernels, through the whole model, against nothing but forwards."""
    model = tiny_model(family, num_hidden_layers=2)
    found = RolloutEngine(model).run_batch(
        workload(3, 40), n=2, max_tokens=12, seed=1, return_details=True
    )
    torch.cat(score(model, found)).sum().backward()
    wide = tiny_model(family, num_hidden_layers=2).double()
    generator = torch.Generator().manual_seed(0)
    for name, own in model.named_parameters():
        noise = torch.randn(own.shape, generator=generator, dtype=torch.float64)
        # along the gradient and across it: a wrong direction is seen as well as a wrong length
        gradient = own.grad.double()
        direction = gradient / gradient.norm() + noise / noise.norm()
        step = 1e-5
        ends = [moved(wide, found, name, sign * step * direction) for sign in (1, -1)]
        slope = (ends[0] - ends[1]) / (2 * step)
        assert abs(float((gradient * direction).sum()) - slope) <= 1e-4 * gradient.norm(), name


def test_frozen_parameters_leave_the_others_their_bits():
    """A part trained alone: same log-probs, same gradients, none for what is frozen."""
    model = tiny_model()
    found = sampled(model, 3, n=2)
    whole = gradients_of(model, score(model, found))
    for trained in ("q_proj", "up_proj", "layernorm", "embed_tokens"):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trained in name)
        model.zero_grad()
        logprobs = score(model, found)
        assert_same_bits(logprobs, found)
        torch.cat(logprobs).sum().backward()
        for name, parameter in model.named_parameters():
            if trained not in name:
                assert parameter.grad is None, name
            else:
                assert torch.equal(parameter.grad, whole[name]), name


@pytest.mark.parametrize("frozen", [False, True])
def test_gradient_checkpointing_changes_no_bit(frozen):
    """Forward and backward, also where the first layers need no gradient."""
    model = tiny_model()
    found = sampled(model, 3, n=2)
    if frozen:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("layers.2" in name)

    def run() -> list[torch.Tensor]:
        model.zero_grad()
        logprobs = score(model, found)
        assert_same_bits(logprobs, found)
        torch.cat(logprobs).sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    plain = run()
    calls: list[int] = []
    model.model.layers[2].register_forward_pre_hook(lambda *_: calls.append(1))
    model.gradient_checkpointing_enable()
    again = run()
    assert len(calls) == 2  # computed again in backward, or nothing was checkpointed
    assert len(plain) == len(again) and all(map(torch.equal, plain, again))


def test_micro_batches_add_up_to_the_gradient_of_the_whole():
    model = tiny_model()
    found = sampled(model, 4, n=3)
    whole = gradients_of(model, score(model, found))
    assert_close(gradients_of(model, score(model, found, micro_batch_tokens=50)), whole, 1e-5)


def test_rollouts_of_different_prompts_are_never_merged():
    """Two calls both number their prompts from 0."""
    model = tiny_model()
    engine = RolloutEngine(model)
    one = engine.run_batch([[5, 6, 7]], max_tokens=6, seed=0, return_details=True)
    two = engine.run_batch([[9, 8]], max_tokens=6, seed=0, return_details=True)
    assert largest_difference(model, one + two) == 0
    assert RolloutBatch.from_rollouts(one + two).num_prompts == 2


def test_a_rejected_rollout_scores_nothing():
    """R6: it holds its place, empty."""
    model = tiny_model()
    found = RolloutEngine(model).run_batch([[5], [], [6]], max_tokens=3, return_details=True)
    scored = score(model, found)
    assert [len(s) for s in scored] == [len(r.token_ids) for r in found]
    assert len(scored[1]) == 0


def test_temperature_must_be_positive():
    with pytest.raises(ValueError, match="temperature"):
        score(tiny_model(), [], temperature=0.0)


def test_the_same_call_twice_is_scored_twice():
    """Rollouts with one prompt index *and* one prompt share it, and still are scored each."""
    model = tiny_model()
    found = RolloutEngine(model).run_batch([[5, 6, 7]], max_tokens=6, seed=0, return_details=True)
    assert largest_difference(model, found * 3) == 0
    assert RolloutBatch.from_rollouts(found * 3).num_prompts == 1


def test_graphs_of_all_packs_are_kept():
    """Each score can be differentiated alone, whichever pack it came from."""
    model = tiny_model()
    found = RolloutEngine(model).run_batch(
        workload(3, 30), n=2, max_tokens=8, seed=1, return_details=True
    )
    torch.cat(score(model, found)).sum().backward()
    expected = gradients(model)
    for scored in score(model, found, micro_batch_tokens=20):
        scored.sum().backward(retain_graph=True)
    for name, gradient in gradients(model).items():
        scale = float(gradient.abs().max())
        assert float((expected[name] - gradient).abs().max()) <= 1e-5 * scale, name
