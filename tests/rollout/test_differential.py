"""The engine against the naive one: random workloads through batches, chunks, hits and preemption.

Tokens, reasons, spans and text must be equal, log-probs bit for bit. The naive engine decides in
float64 and the real one in fp32, so a sample in which a near tie goes the other way is compared up
to there.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout import Decoder, Rollout, RolloutEngine, SamplingParams
from tests.folders import word_tokenizer
from tests.models import EOS, VOCABULARY, tiny_model
from tests.rollout.naive_engine import NaiveResult, naive_prompt_logprobs, naive_rollout
from tests.rollout.test_engine import nudge

NEAR_TIE = 1e-6
TOKENIZER = word_tokenizer()
RUN_SEED = 3


@dataclass(frozen=True, slots=True)
class Batch:
    prompts: list[list[int]]
    params: list[SamplingParams]


def random_params(rng: random.Random, mixed: bool, lengths: Sequence[int | None]) -> SamplingParams:
    """Any mixture of the parameters, most of them off; without `mixed` just what is plain."""

    def maybe(chance: float, value: object, off: object) -> object:
        return value if mixed and rng.random() < chance else off

    def ids(most: int) -> tuple[int, ...]:
        return tuple(rng.sample(range(VOCABULARY), rng.randint(1, most)))

    def text() -> str:
        """A piece of output of the word tokenizer, often across a border of tokens."""
        words = TOKENIZER.decode([rng.randrange(VOCABULARY) for _ in range(2)])
        start = rng.randrange(len(words) - 2)
        return words[start : start + rng.randint(1, 3)]

    max_tokens = rng.choice(lengths)
    return SamplingParams(
        n=rng.choice([1, 1, 2, 3, 4]),
        seed=rng.choice([0, 1, None]),
        max_tokens=max_tokens,
        ignore_eos=rng.random() < 0.3,
        stop_token_ids=ids(15) if rng.random() < 0.4 else (),
        temperature=maybe(0.5, rng.choice([0.0, 0.5, 0.9, 1.5]), 1.0),
        top_p=maybe(0.25, rng.choice([0.0, 0.3, 0.9, 0.99]), 1.0),
        top_k=maybe(0.25, rng.choice([1, 3, 20, 500]), 0),
        min_p=maybe(0.25, rng.choice([0.01, 0.2, 1.0]), 0.0),
        repetition_penalty=maybe(0.25, rng.choice([0.7, 1.3, 2.0]), 1.0),
        frequency_penalty=maybe(0.2, rng.choice([-1.0, 0.5, 2.0]), 0.0),
        presence_penalty=maybe(0.2, rng.choice([-0.5, 1.5]), 0.0),
        logit_bias=maybe(0.2, {i: rng.uniform(-5, 5) for i in ids(6)}, ()),
        allowed_token_ids=maybe(0.2, ids(30), None),
        bad_words=maybe(0.25, (f"w{rng.randrange(VOCABULARY)}", ids(1), ids(2)), ()),
        min_tokens=maybe(0.3, rng.randint(0, max_tokens or 5), 0),
        stop=maybe(0.25, tuple(text() for _ in range(rng.randint(1, 3))), ()),
        include_stop_str_in_output=maybe(0.5, True, False),
        detokenize=maybe(0.3, True, False),
        logprobs=maybe(0.2, rng.choice([0, 1, 5]), None),
        prompt_logprobs=maybe(0.15, rng.choice([0, 2]), None),
    )


def random_batches(
    seed: int,
    num_batches: int,
    num_prompts: int,
    longest: int,
    mixed: bool = True,
    max_tokens: Sequence[int | None] = (1, 3, 6, 9, 12, None),
) -> list[Batch]:
    """Prompts of at most `longest` tokens; they share beginnings with others of their batch and
    of the batches before."""
    rng = random.Random(seed)

    def fresh(most: int) -> list[int]:
        return [rng.randrange(2, VOCABULARY) for _ in range(rng.randint(1, most))]

    stems = [fresh(longest // 2) for _ in range(2)]
    batches: list[Batch] = []
    for _ in range(num_batches):
        prompts = []
        for _ in range(num_prompts):
            old = [p for batch in batches for p in batch.prompts] + prompts
            stem = rng.choice([[], *stems])
            again = old and rng.random() < 0.2
            prompts.append(rng.choice(old) if again else stem + fresh(longest // 2))
        batches.append(Batch(prompts, [random_params(rng, mixed, max_tokens) for _ in prompts]))
    return batches


class Comparison:
    """Runs batches through both engines, compares the results and counts what was compared."""

    def __init__(self, model: Decoder, **engine_settings: object) -> None:
        self.model = model
        self.engine = RolloutEngine(model, TOKENIZER, run_seed=RUN_SEED, **engine_settings)
        held = self.engine.get_stats()["kv_blocks_total"] * engine_settings["block_size"]
        self.max_total_tokens = min(self.engine.max_seq_len, held + 1)
        self.version = 0
        self.seen: Counter[str] = Counter()
        self.other_bits = 0  # log-probs that are not bit for bit those of the naive engine

    def run(self, batches: list[Batch]) -> None:
        """A publication comes before the last batch: prefixes hit in all the others."""
        for number, batch in enumerate(batches):
            if number == len(batches) - 1:
                self.engine.apply_weight_update(None, lambda: nudge(self.model))
                self.version += 1
            found = self.engine.run_batch(batch.prompts, batch.params, return_details=True)
            self.engine.check_integrity()
            assert self.engine.get_stats()["kv_blocks_used"] == 0
            self._compare_batch(batch, found)

    def _compare_batch(self, batch: Batch, found: list[Rollout]) -> None:
        next_sample: Counter[tuple[int, tuple[int, ...]]] = Counter()
        results = iter(found)
        for index, (prompt, params) in enumerate(zip(batch.prompts, batch.params, strict=True)):
            for _ in range(params.n):
                r = next(results)
                assert params.seed is None or r.seed == params.seed
                sample_index = next_sample[r.seed, tuple(prompt)]
                next_sample[r.seed, tuple(prompt)] += 1
                assert (r.prompt_index, r.sample_index) == (index, sample_index)
                assert r.prompt_token_ids == prompt
                expected = naive_rollout(
                    self.model,
                    prompt,
                    params,
                    sample_index=sample_index,
                    seed=r.seed,
                    max_total_tokens=self.max_total_tokens,
                    eos_token_ids=(EOS,),
                    tokenizer=TOKENIZER,
                )
                self._compare(r, expected, params)
                if params.prompt_logprobs is not None:
                    self._compare_prompt(r, params)
        assert next(results, None) is None

    def _compare(self, r: Rollout, expected: NaiveResult, params: SamplingParams) -> None:
        where = f"{params}, prompt {r.prompt_token_ids}, sample {r.sample_index}"
        count = len(r.token_ids)
        assert count == len(r.logprobs) == len(r.sampling_logprobs)
        for i, (token, choice) in enumerate(zip(r.token_ids, expected.choices, strict=False)):
            near_tie = choice.margin < NEAR_TIE
            if near_tie and token != choice.token:
                self.seen["near ties lost"] += 1
                return
            assert token == choice.token, f"token {i} of {where}"
            assert r.logprobs[i] == pytest.approx(choice.logprob, abs=1e-4), where
            if not near_tie:
                sampling_logprob = pytest.approx(choice.sampling_logprob, abs=1e-4)
                assert r.sampling_logprobs[i] == sampling_logprob, where
            self.other_bits += r.logprobs[i] != choice.exact_logprob
            if not (params.greedy or params.edits or params.filters):
                assert r.sampling_logprobs[i] == r.logprobs[i], where
            if params.logprobs:
                self._compare_top(r.top_logprobs[i], choice.distribution, params.logprobs)
            self.seen["tokens"] += 1
        reasons = (r.finish_reason, r.stop_reason, r.text)
        assert reasons == (expected.finish_reason, expected.stop_reason, expected.text), where
        assert r.token_ids == expected.token_ids, where
        spans = [(self.version, 0, count)] if count else []
        assert list(r.version_spans) == spans, where
        kind = "stop string" if isinstance(r.stop_reason, str) else "stop id"
        self.seen[kind if r.finish_reason == "stop" else r.stop_reason or r.finish_reason] += 1
        self.seen["samples"] += 1

    def _compare_prompt(self, r: Rollout, params: SamplingParams) -> None:
        expected = naive_prompt_logprobs(self.model, r.prompt_token_ids, params.temperature or 1.0)
        assert r.prompt_logprobs[0] is None and len(r.prompt_logprobs) == len(r.prompt_token_ids)
        for i, distribution in enumerate(expected, start=1):
            logprob = distribution[r.prompt_token_ids[i]]
            assert r.prompt_logprobs[i] == pytest.approx(logprob, abs=1e-4)
            if params.prompt_logprobs:
                self._compare_top(r.prompt_top_logprobs[i], distribution, params.prompt_logprobs)
        self.seen["prompts scored"] += 1

    def _compare_top(self, top: dict[int, float], distribution: list[float], k: int) -> None:
        best = sorted(distribution, reverse=True)[:k]
        assert list(top.values()) == pytest.approx(best, abs=1e-4)
        assert [distribution[token] for token in top] == pytest.approx(best, abs=1e-4)
        self.seen["top log-probs"] += 1


def small_model() -> Decoder:
    return tiny_model(num_hidden_layers=2)


def budget(engine_settings: dict[str, int]) -> int:
    """Tokens that a step may have: every running request gets one at least."""
    return max(engine_settings["max_num_batched_tokens"], engine_settings["max_batch_size"])


@pytest.mark.parametrize("seed", range(2))
def test_mixed_workloads_under_pressure(seed: int) -> None:
    """L1, L3, L5, L10, S2, S4, S5, W1: all parameters at once, few blocks, small steps."""
    tight = {"max_batch_size": 5, "max_num_batched_tokens": 7, "block_size": 4}
    comparison = Comparison(small_model(), num_kv_blocks=14, max_seq_len=50, **tight)
    batches = random_batches(seed, num_batches=3, num_prompts=8, longest=36)
    comparison.run(batches)
    stats = comparison.engine.get_stats()
    assert stats["preemptions"] > 0 and stats["prefix_hit_tokens"] > 0
    # Steps were too small for whole prompts, so these came in chunks.
    assert stats["computed_tokens"] <= budget(tight) * stats["steps"]
    assert max(len(p) for batch in batches for p in batch.prompts) > budget(tight)
    assert comparison.other_bits == 0
    seen = comparison.seen
    assert seen["tokens"] > 200
    for kind in ("stop id", "stop string", "max_tokens", "top log-probs", "prompts scored"):
        assert seen[kind] > 0, seen
    assert seen["near ties lost"] <= 1, seen


@st.composite
def shapes(draw: st.DrawFn) -> tuple[list[Batch], dict[str, int]]:
    """Any workload and engine that go together: each prompt fits, most do not fit together."""
    longest = draw(st.integers(2, 30))
    batches = random_batches(
        draw(st.integers(0, 2**32)),
        num_batches=draw(st.integers(1, 3)),
        num_prompts=draw(st.integers(1, 12)),
        longest=longest,
        mixed=draw(st.booleans()),
        max_tokens=[1, 2, 4, 6],
    )
    block_size = draw(st.sampled_from([1, 4, 16]))
    fits_one = -(-(longest + 6) // block_size)
    return batches, {
        "max_batch_size": draw(st.integers(1, 6)),
        "max_num_batched_tokens": draw(st.integers(1, 20)),
        "block_size": block_size,
        "num_kv_blocks": fits_one + draw(st.integers(0, fits_one)),
        "enable_prefix_caching": draw(st.booleans()),
        "max_seq_len": longest + draw(st.integers(3, 12)),
    }


def test_any_shape_of_workload_and_engine() -> None:
    """L5, K18, S3, S6, S7: block sizes, queues, chunks, cache on and off; all of it was met."""
    total: Counter[str] = Counter()

    @given(shapes())
    @settings(max_examples=20, deadline=None, derandomize=True, database=None)
    def check(case: tuple[list[Batch], dict[str, int]]) -> None:
        batches, engine_settings = case
        comparison = Comparison(small_model(), **engine_settings)
        comparison.run(batches)
        stats = comparison.engine.get_stats()
        assert comparison.other_bits == 0
        if not engine_settings["enable_prefix_caching"]:
            assert stats["prefix_hit_tokens"] == 0
        longest = max(len(p) for batch in batches for p in batch.prompts)
        total.update(comparison.seen)
        total["chunked"] += longest > budget(engine_settings)
        total["preemptions"] += stats["preemptions"]
        total["hits"] += stats["prefix_hit_tokens"]

    check()
    assert total["tokens"] > 300
    assert min(total[kind] for kind in ("chunked", "preemptions", "hits", "context")) > 0, total
    assert total["near ties lost"] <= 1, total


def test_the_comparison_notices_other_attention() -> None:
    """L7, the control: not bit for bit through the reference backend, though near enough for the
    same tokens."""
    comparison = Comparison(
        small_model(), block_size=4, max_batch_size=6, attention_backend="reference"
    )
    batches = random_batches(0, 1, num_prompts=4, longest=30, mixed=False, max_tokens=[9])
    comparison.run(batches)
    assert comparison.seen["tokens"] > 20
    assert comparison.other_bits > 0
