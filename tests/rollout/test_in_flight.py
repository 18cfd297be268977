"""Updates between the steps of running samples, and what each token then is."""

from __future__ import annotations

import pytest
import torch

from attention import AttentionMetadata, PackedAttention
from rollout import Decoder, Rollout, RolloutEngine
from rollout.model import attention_for
from tests.models import tiny_model
from tests.rollout.test_engine import bits, random_prompts, rollouts
from tests.rollout.test_tasks import Listener

UPDATE_EVERY = 5


def perturb(model: Decoder, version: int) -> None:
    """Weights of a version, in place, from the seed that is its number."""
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.03 * torch.randn(p.shape, generator=torch.Generator().manual_seed(version)))


def model_of(version: int) -> Decoder:
    model = tiny_model()
    for v in range(1, version + 1):
        perturb(model, v)
    return model


def run_with_updates(in_flight: str, **settings: object) -> tuple[RolloutEngine, list[Rollout]]:
    """Six samples of three prompts, a publication after every fifth step."""
    model = tiny_model()
    engine = RolloutEngine(model, **settings)
    heard = [Listener() for _ in range(3)]
    for prompt, listener in zip(random_prompts(3, longest=40), heard, strict=True):
        engine.add_task(
            prompt, n=2, max_tokens=23, seed=1, temperature=0.9, ignore_eos=True, callback=listener
        )
    steps = 0
    while engine._core.step():
        assert steps < 500, "recompute starves: an update comes before the prefill is done"
        steps += 1
        engine.check_integrity()
        if steps % UPDATE_EVERY == 0:
            version = engine.policy_version + 1
            engine.apply_weight_update(
                None, lambda version=version: perturb(model, version), in_flight=in_flight
            )
    assert all(listener.done.is_set() for listener in heard)
    assert engine.get_stats()["kv_blocks_used"] == 0
    return engine, [
        e.rollout for listener in heard for e in listener.events if e.rollout is not None
    ]


def scored(model: Decoder, r: Rollout, start: int, end: int) -> list[float]:
    """Log-probs of output tokens [start, end) by one forward over the whole sequence so far."""
    ids = r.prompt_token_ids + r.token_ids[:end]
    attention = PackedAttention(
        AttentionMetadata.packed([len(ids)]), attention_for(model), 2, torch.device("cpu")
    )
    first = len(r.prompt_token_ids) + start
    with torch.no_grad():
        hidden = model(torch.tensor(ids), torch.arange(len(ids)), attention)
        logits = model.logits(hidden[first - 1 : -1])
    vocabulary, temperature = model.operators.vocabulary, torch.full((end - start,), r.temperature)
    lse, _ = vocabulary.log_normalizers(logits, temperature)
    return vocabulary.gather(logits, temperature, torch.tensor(ids[first:]), lse).tolist()


@pytest.mark.parametrize(
    "settings",
    [{}, {"num_kv_blocks": 9}, {"max_num_batched_tokens": 20, "max_batch_size": 3}],
    ids=["plain", "preempted", "chunked"],
)
def test_recompute_gives_each_token_under_the_version_of_its_span(settings):
    """W6, L6: bit for bit what a forward with the weights of that version says, and only that
    version; spans partition the output."""
    engine, found = run_with_updates("recompute", **settings)
    assert len(found) == 6 and engine.policy_version >= 4
    if "num_kv_blocks" in settings:
        assert engine.get_stats()["preemptions"] > 0
    models = {v: model_of(v) for v in range(engine.policy_version + 1)}
    several = 0
    for r in found:
        ends = [0, *(span.end for span in r.version_spans)]
        assert [span.start for span in r.version_spans] == ends[:-1] and ends[-1] == 23
        versions = [span.version for span in r.version_spans]
        assert versions == sorted(set(versions))
        several += len(versions) > 1
        for version, start, end in r.version_spans:
            assert scored(models[version], r, start, end) == r.logprobs[start:end]
            other = models[version + 1 if version + 1 in models else version - 1]
            assert scored(other, r, start, end) != r.logprobs[start:end]  # the control
    assert several > 0


def test_keep_labels_its_tokens_and_leaves_nothing_behind():
    """W6, K20, W12: the first span is of its version to the bit; later ones stand on old KV and
    say so; afterwards a warm prompt gives what a cold one gives."""
    engine, found = run_with_updates("keep")
    oldest = model_of(0)
    for r in found:
        version, start, end = r.version_spans[0]
        assert (version, start) == (0, 0)
        assert scored(oldest, r, start, end) == r.logprobs[start:end]
        assert [span.version for span in r.version_spans] == [0, 1, 2, 3, 4]
        assert r.version_spans[-1].end == 23
    prompts = [*random_prompts(3, longest=40), *(r.prompt_token_ids + r.token_ids for r in found)]
    warm = rollouts(engine, prompts, max_tokens=4, seed=5)
    cold = rollouts(RolloutEngine(model_of(4)), prompts, max_tokens=4, seed=5)
    assert bits(warm) == bits(cold)


def test_keep_lets_who_has_sampled_nothing_start_over():
    """W6: half a prompt under old weights would be labelled by its tokens' version alone."""
    model = tiny_model()
    engine = RolloutEngine(model, max_num_batched_tokens=8, max_batch_size=4)
    prompt = random_prompts(1, longest=1)[0] * 17
    heard = Listener()
    engine.add_task(prompt, max_tokens=6, seed=0, ignore_eos=True, callback=heard)
    engine._core.step()
    engine.apply_weight_update(None, lambda: perturb(model, 1), in_flight="keep")
    while engine._core.step():
        engine.check_integrity()
    rollout = heard.events[-1].rollout
    assert rollout is not None and [s.version for s in rollout.version_spans] == [1]
    assert scored(model_of(1), rollout, 0, 6) == rollout.logprobs
