"""The engine as a user sees it: results, limits, exactness, policy versions."""

from __future__ import annotations

import itertools
import random
import threading
import time

import numpy as np
import pytest
import torch

from attention import AttentionMetadata, PackedAttention, select_backend
from rollout import PoisonedWeights, Rollout, RolloutEngine, SamplingParams
from rollout.policy import ParameterLeftArena
from tests.models import EOS, VOCABULARY, tiny_model


def random_prompts(count: int, seed: int = 0, longest: int = 70) -> list[list[int]]:
    rng = random.Random(seed)
    return [
        [rng.randrange(2, VOCABULARY) for _ in range(rng.randint(1, longest))] for _ in range(count)
    ]


def rollouts(engine: RolloutEngine, prompts: list[list[int]], **fields: object) -> list[Rollout]:
    found = engine.run_batch(prompts, return_details=True, **fields)
    engine.check_integrity()
    assert engine.get_stats()["kv_blocks_used"] == 0
    return found


def bits(found: list[Rollout]) -> list[tuple[list[int], list[float], list[float]]]:
    return [(r.token_ids, r.logprobs, r.sampling_logprobs) for r in found]


def full_logits(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    """Logits of every position by one packed forward; shares nothing with the engine's pages."""
    metadata = AttentionMetadata.packed([len(ids)])
    attention = PackedAttention(metadata, select_backend("reference"), 2, torch.device("cpu"))
    with torch.no_grad():
        hidden = model(torch.tensor(ids), torch.arange(len(ids)), attention)
        return model.logits(hidden)


@pytest.fixture(scope="module")
def model():
    return tiny_model()


WORKLOAD = {"n": 3, "max_tokens": 24, "temperature": 0.8, "seed": 11}


@pytest.fixture(scope="module")
def expected(model) -> list[Rollout]:
    """Every prompt alone in an engine of its own."""
    found = []
    for prompt in random_prompts(6):
        found += rollouts(RolloutEngine(model), [prompt], **WORKLOAD)
    return found


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_greedy_is_the_argmax_of_full_forwards(family):
    """L1: token by token, against a forward over the whole sequence without any cache."""
    model = tiny_model(family)
    engine = RolloutEngine(model)
    for r in rollouts(engine, random_prompts(3, longest=20), max_tokens=12, temperature=0.0):
        ids = list(r.prompt_token_ids)
        for token, logprob in zip(r.token_ids, r.logprobs, strict=True):
            logits = full_logits(model, ids)[-1]
            assert token == int(logits.argmax())
            assert logprob == pytest.approx(float(logits.log_softmax(-1)[token]), abs=2e-4)
            ids.append(token)


def test_results_are_complete_and_in_order(model):
    """L2, R6: lengths agree, log-probs are finite and not positive; order is that of prompts."""
    prompts = random_prompts(5)
    found = rollouts(RolloutEngine(model), prompts, n=2, max_tokens=20, seed=0)
    assert [r.prompt_index for r in found] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert [r.sample_index for r in found] == [0, 1] * 5
    for r in found:
        assert r.prompt_token_ids == prompts[r.prompt_index]
        assert len(r.logprobs) == len(r.token_ids) == len(r.sampling_logprobs) > 0
        assert all(np.isfinite(r.logprobs)) and max(r.logprobs) <= 0
        assert r.logprobs == r.sampling_logprobs
        assert r.finish_reason == ("stop" if r.token_ids[-1] == EOS else "length")


def test_return_forms(model):
    engine = RolloutEngine(model)
    ids = engine.run_batch([[5, 6]], max_tokens=4, seed=3)
    pairs = engine.run_batch([[5, 6]], max_tokens=4, seed=3, return_logprobs=True)
    full = engine.run_batch([[5, 6]], max_tokens=4, seed=3, return_details=True)
    assert ids == [full[0].token_ids]
    assert pairs == [(full[0].token_ids, full[0].logprobs)]


@pytest.mark.parametrize(
    "settings",
    [
        {"threads": 1},
        {"threads": 2},
        {"max_batch_size": 2},
        {"max_batch_size": 4, "max_num_batched_tokens": 7},
        {"block_size": 1},
        {"block_size": 4},
        {"block_size": 64},
        {"num_kv_blocks": 8},
        {"enable_prefix_caching": False},
    ],
    ids=lambda s: ",".join(f"{k}={v}" for k, v in s.items()),
)
def test_a_rollout_is_a_pure_function(model, expected, settings):
    """L5, K18, S5, S7: batch, queue, chunks, blocks, preemption, hits, threads: same bits."""
    settings = dict(settings)
    before = torch.get_num_threads()
    torch.set_num_threads(settings.pop("threads", 1))
    try:
        engine = RolloutEngine(model, **settings)
        prompts = random_prompts(6)
        assert bits(rollouts(engine, prompts, **WORKLOAD)) == bits(expected)
        if "num_kv_blocks" in settings:
            assert engine.get_stats()["preemptions"] > 0
        order = list(range(6))
        random.Random(5).shuffle(order)
        again = rollouts(engine, [prompts[i] for i in order], **WORKLOAD)  # warm, shuffled
        assert bits(again) == bits([r for i in order for r in expected[3 * i : 3 * i + 3]])
    finally:
        torch.set_num_threads(before)


def test_without_invariant_attention_the_bits_differ(model, expected):
    """L7: the control. The same comparison through the reference backend fails."""
    engine = RolloutEngine(model, attention_backend="reference")
    assert bits(rollouts(engine, random_prompts(6), **WORKLOAD)) != bits(expected)


def test_seeds(model):
    """L8: order and global RNG do not matter, the global RNG stays, a group is not clones."""
    engine = RolloutEngine(model)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = rollouts(engine, [[5, 6, 7]], n=8, max_tokens=16, seed=4)
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(2)
    assert bits(rollouts(engine, [[5, 6, 7]], n=8, max_tokens=16, seed=4)) == bits(first)
    assert len({tuple(r.token_ids) for r in first}) == 8
    other = rollouts(engine, [[5, 6, 7]], n=8, max_tokens=16, seed=5)
    assert bits(other) != bits(first)


def test_a_repeated_prompt_is_not_cloned(model):
    engine = RolloutEngine(model)
    found = rollouts(engine, [[5, 6], [9], [5, 6]], n=2, max_tokens=16, seed=4)
    assert [r.sample_index for r in found] == [0, 1, 0, 1, 2, 3]
    assert bits(found[:2]) != bits(found[4:])
    group = rollouts(engine, [[5, 6]], n=4, max_tokens=16, seed=4)
    assert bits(found[:2] + found[4:]) == bits(group)


def test_seed_none_is_derived_and_reported(model):
    prompts = random_prompts(3)
    found = rollouts(RolloutEngine(model, run_seed=7), prompts, max_tokens=8)
    assert len({r.seed for r in found}) == 3
    for r in found:
        alone = rollouts(RolloutEngine(model), [r.prompt_token_ids], max_tokens=8, seed=r.seed)
        assert bits(alone) == bits([r])


@pytest.mark.parametrize("length", [48, 50])
def test_a_group_computes_its_prompt_once(model, length):
    """K14, L5: to the token, and to the same bits as samples that share nothing."""
    prompt = random_prompts(1, longest=1)[0] * length
    engine = RolloutEngine(model)
    shared = rollouts(engine, [prompt], n=8, max_tokens=9, seed=0, ignore_eos=True)
    assert engine.get_stats()["computed_tokens"] == length + 8 * 8
    cold = RolloutEngine(model, enable_prefix_caching=False)
    apart = rollouts(cold, [prompt], n=8, max_tokens=9, seed=0, ignore_eos=True)
    assert bits(shared) == bits(apart)
    assert cold.get_stats()["computed_tokens"] == 8 * (length + 8)


def test_a_group_larger_than_the_batch_computes_its_prompt_once(model):
    """K14, L5: samples that find a sibling running compute one token of the prompt again."""
    prompt = random_prompts(1, longest=1)[0] * 50
    params = {"n": 12, "max_tokens": 30, "seed": 0, "temperature": 3.0}  # of various lengths
    engine = RolloutEngine(model, max_batch_size=4)
    shared = rollouts(engine, [prompt], **params)
    stats = engine.get_stats()
    of_prompts = stats["computed_tokens"] - sum(len(r.token_ids) - 1 for r in shared)
    assert 50 < of_prompts <= 50 + 8
    apart = rollouts(RolloutEngine(model, enable_prefix_caching=False), [prompt], **params)
    assert bits(shared) == bits(apart)


def test_output_of_a_turn_is_a_prefix_of_the_next(model):
    """K15, K17: the next turn hits the blocks its history filled; the last token had no KV."""
    engine = RolloutEngine(model)
    prompt = random_prompts(1, longest=1)[0] * 20
    (turn,) = rollouts(engine, [prompt], max_tokens=40, seed=1, ignore_eos=True)
    history = prompt + turn.token_ids
    before = engine.get_stats()["prefix_hit_tokens"]
    (warm,) = rollouts(engine, [[*history, 7]], max_tokens=5, seed=2)
    assert engine.get_stats()["prefix_hit_tokens"] - before == (len(history) - 1) // 16 * 16
    (cold,) = rollouts(RolloutEngine(model), [[*history, 7]], max_tokens=5, seed=2)
    assert bits([warm]) == bits([cold])


def test_stop_reasons_are_distinct(model):
    """S4, L10: stop ids, several EOS ids, max_tokens exactly, context end, ignore_eos."""
    engine = RolloutEngine(model, max_seq_len=30)
    (free,) = rollouts(engine, [[5, 6]], max_tokens=20, seed=9, ignore_eos=True)
    assert (free.finish_reason, free.stop_reason, len(free.token_ids)) == (
        "length", "max_tokens", 20,
    )
    third = free.token_ids[2]
    first_at = free.token_ids.index(third)
    (stopped,) = rollouts(
        engine, [[5, 6]], max_tokens=20, seed=9, ignore_eos=True, stop_token_ids=(third, 99)
    )
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", third)
    assert bits([stopped])[0] == tuple(column[: first_at + 1] for column in bits([free])[0])
    (context,) = rollouts(engine, [[5, 6]], seed=9, ignore_eos=True)
    assert (context.finish_reason, context.stop_reason) == ("length", "context")
    assert len(context.token_ids) == 28
    several = tiny_model(eos_token_id=[third, EOS])
    (ended,) = rollouts(RolloutEngine(several), [[5, 6]], max_tokens=20, seed=9)
    assert (ended.finish_reason, ended.stop_reason) == ("stop", third)


def test_min_tokens_holds_the_stop_back(model):
    engine = RolloutEngine(model)
    (free,) = rollouts(engine, [[5, 6]], max_tokens=20, seed=9, ignore_eos=True)
    stop = free.token_ids[0]
    (held,) = rollouts(
        engine, [[5, 6]], max_tokens=20, min_tokens=6, seed=9, stop_token_ids=(stop,)
    )
    assert len(held.token_ids) >= 6 and stop not in held.token_ids[:6]
    assert held.sampling_logprobs[0] > held.logprobs[0]


BAD = {
    "prompt_empty": ([], {}),
    "prompt_too_long": ([5] * 256, {}),
    "token_out_of_vocabulary": ([5, VOCABULARY], {}),
    "max_tokens_non_positive": ([5], {"max_tokens": 0}),
}


@pytest.mark.parametrize("reason", BAD)
def test_one_bad_prompt_fails_alone(model, reason):
    """S14, R6: rejected at once, by name; the neighbours are what they are without it."""
    prompt, fields = BAD[reason]
    params = SamplingParams(max_tokens=6, seed=0)
    bad_params = SamplingParams(**{"max_tokens": 6, "seed": 0, **fields})
    engine = RolloutEngine(model)
    first, bad, last = engine.run_batch(
        [[5, 6], prompt, [8]], [params, bad_params, params], return_details=True
    )
    assert (bad.finish_reason, bad.error_reason, bad.token_ids) == ("rejected", reason, [])
    assert bad.error_message
    assert bits([first, last]) == bits(rollouts(engine, [[5, 6], [8]], max_tokens=6, seed=0))


def test_prompts_that_are_no_token_ids_are_refused(model):
    """Nothing is guessed: text and floats are TypeErrors by prompt; NumPy ids are ids."""
    engine = RolloutEngine(model)
    with pytest.raises(TypeError, match=r"prompt 1 is text.*tokenizer\.encode"):
        engine.run_batch([[5], "w5"], max_tokens=2)
    with pytest.raises(TypeError, match=r"prompt 0 must be a sequence of token ids.*5\.7"):
        engine.run_batch([[5.7]], max_tokens=2)
    with pytest.raises(TypeError, match="prompt 0 must be a sequence of token ids"):
        engine.run_batch([5, 6], max_tokens=2)
    assert engine.get_stats()["requests_waiting"] == 0
    expected = engine.run_batch([[5, 6], [7, 8]], max_tokens=2, seed=0)
    assert engine.run_batch(np.array([[5, 6], [7, 8]]), max_tokens=2, seed=0) == expected
    assert engine.run_batch(([i, i + 1] for i in (5, 7)), max_tokens=2, seed=0) == expected


def test_what_can_never_fit_is_rejected(model):
    """S12, S6: `kv_cache_too_small` at once; without max_tokens the cache is the context."""
    engine = RolloutEngine(model, num_kv_blocks=2)
    (bad,) = rollouts(engine, [[5] * 20], max_tokens=14)
    assert bad.error_reason == "kv_cache_too_small"
    (fits,) = rollouts(engine, [[5] * 20], max_tokens=13, ignore_eos=True)
    assert len(fits.token_ids) == 13
    (limited,) = rollouts(engine, [[5] * 20], ignore_eos=True)
    assert (limited.finish_reason, len(limited.token_ids)) == ("length", 13)


def test_non_finite_logits_end_one_request_by_name():
    """L9: no token is invented; tokens so far and neighbours stand."""
    model = tiny_model()
    engine = RolloutEngine(model)
    (clean,) = rollouts(engine, [[5, 6]], max_tokens=8, seed=0)
    engine.apply_weight_update(None, lambda: model.model.embed_tokens.weight.data[77].fill_(np.nan))
    bad = rollouts(engine, [[77, 6]], max_tokens=8, seed=0)[0]
    assert (bad.finish_reason, bad.error_reason, bad.token_ids) == (
        "error", "non_finite_logits", [],
    )
    assert clean.token_ids


def test_kv_that_is_not_finite_stays_with_its_request():
    """L9, L5, W1: blocks of a request that ended so are reused; what lies past a sequence's end in
    them reaches nobody, neither under these weights nor under the next."""
    model = tiny_model(tie_word_embeddings=False)
    embedding = model.model.embed_tokens.weight.data
    params = {"max_tokens": 8, "seed": 0, "allowed_token_ids": list(range(2, 70))}
    clean = bits(rollouts(RolloutEngine(model), [[5, 6], [8] * 20], **params))
    row = embedding[77].clone()
    embedding[77].fill_(np.nan)
    engine = RolloutEngine(model, max_batch_size=1)
    (bad,) = rollouts(engine, [[77] * 40], **params)
    assert bad.error_reason == "non_finite_logits"
    assert bits(rollouts(engine, [[5, 6], [8] * 20], **params)) == clean
    engine.apply_weight_update(None, lambda: embedding[77].copy_(row))
    assert bits(rollouts(engine, [[5, 6], [8] * 20], **params)) == clean


def test_an_exception_frees_everything(model, monkeypatch):
    """K21, S8: a failed step leaves no block held or findable and a usable engine."""
    engine = RolloutEngine(model)
    prompts = random_prompts(4)
    expected = bits(rollouts(RolloutEngine(model), prompts, max_tokens=8, seed=0))
    calls = itertools.count()
    forward = type(model).forward

    def failing(self, *arguments):
        if next(calls) in (0, 3):
            raise KeyboardInterrupt
        return forward(self, *arguments)

    monkeypatch.setattr(type(model), "forward", failing)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            engine.run_batch(prompts, max_tokens=8, seed=0)
        engine.check_integrity()
        assert engine.get_stats()["kv_blocks_used"] == 0
    assert bits(rollouts(engine, prompts, max_tokens=8, seed=0)) == expected


def test_concurrent_calls_share_one_scheduler(model):
    prompts = random_prompts(6)
    expected = bits(rollouts(RolloutEngine(model), prompts, max_tokens=12, seed=0))
    engine = RolloutEngine(model, max_batch_size=3)
    found: dict[int, list[Rollout]] = {}

    def run(index: int) -> None:
        found[index] = engine.run_batch(prompts, max_tokens=12, seed=0, return_details=True)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [bits(found[i]) for i in range(4)] == [expected] * 4
    engine.check_integrity()


# ------------------------------------------------------------------ policy versions


def nudge(model, amount: float = 0.05) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.add_(amount * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))


def test_warm_equals_cold_after_an_update():
    """W1, K10, W12: prefixes of the old version are never served; a control shows they would
    have been wrong."""
    model = tiny_model()
    engine = RolloutEngine(model)
    prompts = random_prompts(4, longest=60)
    old = rollouts(engine, prompts, max_tokens=8, seed=0)
    hits = engine.get_stats()["prefix_hit_tokens"]
    engine.apply_weight_update(None, lambda: nudge(model))
    warm = rollouts(engine, prompts, max_tokens=8, seed=0)
    assert engine.get_stats()["prefix_hit_tokens"] == hits
    cold = rollouts(RolloutEngine(model), prompts, max_tokens=8, seed=0)
    assert bits(warm) == bits(cold) != bits(old)

    unguarded = RolloutEngine(model)
    rollouts(unguarded, prompts, max_tokens=8, seed=0)
    nudge(model)  # behind the engine's back: no new version, so old blocks are still served
    stale = rollouts(unguarded, prompts, max_tokens=8, seed=0)
    assert bits(stale) != bits(rollouts(RolloutEngine(model), prompts, max_tokens=8, seed=0))


def test_versions_are_monotone(model):
    """W2: None = live + 1, lower and non-ints refused, equal is a no-op."""
    engine = RolloutEngine(model, policy_version=5)
    assert engine.update_weights(5) == 5
    assert engine.apply_weight_update(None, lambda: "done") == "done"
    assert engine.policy_version == 6
    assert engine.update_weights(9) == 9
    for bad in (8, 9, -1, True, 1.5, "10"):
        with pytest.raises(ValueError):
            engine.apply_weight_update(bad, lambda: None)
    for bad in (8, -1, True):
        with pytest.raises(ValueError):
            engine.update_weights(bad)
    with pytest.raises(TypeError):
        engine.apply_weight_update(None, "not callable")
    assert engine.policy_version == 9
    assert engine.apply_weight_update(12, lambda policy_version: policy_version) == 12
    for bad in (-1, True, 0.5):
        with pytest.raises(ValueError):
            RolloutEngine(model, policy_version=bad)


def test_a_failing_update_poisons_until_recover():
    """W3: every later call says so; the number is burnt."""
    model = tiny_model()
    engine = RolloutEngine(model)

    def fail() -> None:
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        engine.apply_weight_update(None, fail)
    with pytest.raises(PoisonedWeights, match="version 1"):
        engine.run_batch([[5]], max_tokens=2)
    assert engine.policy_version == 0
    assert engine.recover() == 2
    rollouts(engine, [[5]], max_tokens=2)


def test_poisoned_weights_refuse_every_call(model):
    """W3: also those that would compute nothing."""
    engine = RolloutEngine(model)

    def fail() -> None:
        raise OSError

    with pytest.raises(OSError):
        engine.apply_weight_update(None, fail)
    for call in (
        lambda: engine.run_batch([]),
        lambda: engine.run_batch([[]]),
        lambda: engine.add_task([5], callback=print),
        lambda: engine.update_weights(0),
        lambda: engine.apply_weight_update(None, lambda: None),
        lambda: engine.with_policy_snapshot(lambda version: version),
    ):
        with pytest.raises(PoisonedWeights, match="version 1"):
            call()
    engine.recover()
    assert engine.run_batch([]) == []


def test_an_update_that_is_refused_touches_no_request(model):
    """W2: a version that is not greater aborts nobody first."""
    engine = RolloutEngine(model, policy_version=4)
    engine.add_task([5], max_tokens=3, callback=lambda event: None)
    for mode in ("abort", "drain", "recompute", "keep"):
        with pytest.raises(ValueError, match="not greater than the live version 4"):
            engine.apply_weight_update(3, lambda: None, in_flight=mode)
    engine.pause()
    with pytest.raises(RuntimeError, match=r"while paused; resume\(\) first"):
        engine.apply_weight_update(None, lambda: None, in_flight="drain")
    assert engine.get_stats()["requests_waiting"] == 1 and engine.policy_version == 4


def test_a_rebound_parameter_is_found_by_name():
    """W7: before the publication."""
    model = tiny_model()
    engine = RolloutEngine(model)

    def rebind() -> None:
        weight = model.model.layers[1].mlp.down_proj.weight
        weight.data = weight.data.clone()

    with pytest.raises(ParameterLeftArena, match=r"model\.layers\.1\.mlp\.down_proj\.weight"):
        engine.apply_weight_update(None, rebind)
    assert engine.policy_version == 0


def test_snapshot_blocks_an_update(model):
    """W5: an update from another thread waits; one from inside is refused."""
    engine = RolloutEngine(model)
    entered, leave = threading.Event(), threading.Event()
    seen: list[int] = []

    def hold(version: int) -> None:
        entered.set()
        leave.wait(10)
        seen.append(engine.policy_version)

    holder = threading.Thread(target=lambda: engine.with_policy_snapshot(hold))
    holder.start()
    entered.wait(10)
    updater = threading.Thread(target=lambda: engine.apply_weight_update(None, lambda: None))
    updater.start()
    updater.join(0.2)
    assert updater.is_alive() and engine.policy_version == 0
    leave.set()
    holder.join(10)
    updater.join(10)
    assert seen == [0] and engine.policy_version == 1
    with pytest.raises(RuntimeError, match="snapshot"):
        engine.with_policy_snapshot(lambda v: engine.apply_weight_update(None, lambda: None))


def test_a_snapshot_may_run_batches_beside_an_update(model):
    """W5: the update of another thread waits for the snapshot, and neither for the other."""
    engine = RolloutEngine(model)
    expected = engine.run_batch([[5, 6]], max_tokens=8, seed=0)
    updater = threading.Thread(target=lambda: engine.apply_weight_update(None, lambda: None))
    found: list[list[list[int]]] = []

    def run(version: int) -> None:
        updater.start()
        time.sleep(0.2)  # the update is under way
        found.append(engine.run_batch([[5, 6]], max_tokens=8, seed=0))
        assert engine.policy_version == version == 0

    snapshot = threading.Thread(target=lambda: engine.with_policy_snapshot(run), daemon=True)
    snapshot.start()
    snapshot.join(60)
    updater.join(60)
    assert found == [expected] and engine.policy_version == 1


def mid_flight(engine: RolloutEngine, prompts: list[list[int]], in_flight: str, update):
    """Start a batch in another thread and update after its tenth step."""
    found: list[list[Rollout]] = []
    forward, steps = type(engine.model).forward, itertools.count(1)
    reached = threading.Event()

    def counting(self, *arguments):
        out = forward(self, *arguments)
        if next(steps) == 10:
            reached.set()
            time.sleep(0.2)  # the update queues for the lock while this step runs
        return out

    def run() -> None:
        found.append(
            engine.run_batch(prompts, max_tokens=60, seed=0, ignore_eos=True, return_details=True)
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(engine.model), "forward", counting)
        worker = threading.Thread(target=run)
        worker.start()
        reached.wait(30)
        try:
            engine.apply_weight_update(None, update, in_flight=in_flight)
        finally:
            worker.join(60)
    engine.check_integrity()
    return found[0]


@pytest.mark.parametrize("in_flight", ["drain", "abort", "recompute", "keep"])
def test_in_flight_modes(in_flight):
    """W6, K20: spans partition the output and say which version produced which tokens."""
    model = tiny_model()
    engine = RolloutEngine(model)
    prompts = random_prompts(4)
    found = mid_flight(engine, prompts, in_flight, lambda: nudge(model))
    for r in found:
        assert [s.start for s in r.version_spans] + [len(r.token_ids)] == [
            0, *(s.end for s in r.version_spans)
        ]
        versions = [s.version for s in r.version_spans]
        assert versions == sorted(set(versions))
        if in_flight == "drain":
            assert versions == [0] and len(r.token_ids) == 60
        elif in_flight == "abort":
            assert (r.finish_reason, versions) == ("aborted", [0]) and 0 < len(r.token_ids) < 60
        else:
            assert versions == [0, 1] and len(r.token_ids) == 60
    if in_flight == "recompute":
        for r in found:  # the second span is what the new weights say of the whole sequence
            start = r.version_spans[1].start
            head = r.prompt_token_ids + r.token_ids[:start]
            logits = full_logits(model, head)[-1]
            logprob = float(logits.log_softmax(-1)[r.token_ids[start]])
            assert r.logprobs[start] == pytest.approx(logprob, abs=2e-4)
    warm = rollouts(engine, prompts, max_tokens=8, seed=1)
    assert bits(warm) == bits(rollouts(RolloutEngine(model), prompts, max_tokens=8, seed=1))


def test_an_update_with_requests_in_flight_is_refused_by_default():
    model = tiny_model()
    with pytest.raises(RuntimeError, match="requests run"):
        mid_flight(RolloutEngine(model), random_prompts(4), "refuse", lambda: None)


# ------------------------------------------------------------------ construction


def test_construction_errors(model):
    with pytest.raises(ValueError, match="cuda"):
        RolloutEngine(model, device="cuda")
    with pytest.raises(ValueError, match="bfloat16"):
        RolloutEngine(model, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="max_seq_len"):
        RolloutEngine(model, max_seq_len=10_000)
    with pytest.raises(ValueError, match="not both"):
        RolloutEngine(model, num_kv_blocks=3, kv_cache_bytes=1000)
    with pytest.raises(ValueError, match="tiled"):
        RolloutEngine(model, attention_backend="flash")
    with pytest.raises(ValueError, match="enable_cuda_graph"):
        RolloutEngine(model, enable_cuda_graph=True)
    with pytest.raises(TypeError, match="did you mean 'temperature'"):
        RolloutEngine(model).run_batch([[5]], temprature=0.5)
    assert RolloutEngine(model).backend_name == "native"
    assert RolloutEngine(model, kv_cache_bytes=10_000_000).cuda_graph_enabled is False


def test_tokens_in_tokens_out(model):
    """R1: nothing is encoded or decoded on the way; only EOS ids are asked of a tokenizer."""

    class OnlyEos:
        eos_token_ids = (EOS,)

    prompts = random_prompts(3)
    found = rollouts(RolloutEngine(model, OnlyEos()), prompts, max_tokens=8, seed=0)
    assert [r.prompt_token_ids for r in found] == prompts
    assert bits(found) == bits(rollouts(RolloutEngine(model), prompts, max_tokens=8, seed=0))


@pytest.mark.parametrize("training", [True, False])
def test_the_models_mode_is_left_alone(training, monkeypatch):
    """R2: train or eval, also when a step raises; so are the parameters' requires_grad."""
    model = tiny_model().train(training)
    model.model.norm.weight.requires_grad_(False)
    engine = RolloutEngine(model)
    rollouts(engine, [[5, 6]], max_tokens=3)

    def failing(*arguments: object) -> None:
        raise OSError

    with monkeypatch.context() as patch:
        patch.setattr(type(model), "forward", failing)
        with pytest.raises(OSError):
            engine.run_batch([[5, 6]], max_tokens=3)
    assert model.training is training and torch.is_grad_enabled()
    assert [n for n, p in model.named_parameters() if not p.requires_grad] == ["model.norm.weight"]
