"""Sampling and its parameters against an independent dense reference."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.request import PromptTask, Request
from rollout.sampler import kept_tokens, sample
from rollout.sampling import SamplingParams, checked_fields

EOS = frozenset({1})


def request(index: int = 0, seed: int = 0, **fields: object) -> Request:
    params = SamplingParams(**fields)
    return Request(index, PromptTask(0, [5, 6], params, seed, index), 0)


def logits_of(rows: int, vocab: int = 50, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def reference_kept(scaled: np.ndarray, top_p: float, top_k: int, min_p: float) -> set[int]:
    """Written as the definitions read, in plain Python: min_p, then top_k, then top_p."""
    order = sorted(range(len(scaled)), key=lambda i: (-scaled[i], i))
    weight = {i: math.exp(scaled[i] - scaled[order[0]]) for i in order}
    kept = [i for i in order if weight[i] >= min_p]
    if top_k > 0:
        kept = kept[:top_k]
    total, mass, chosen = sum(weight[i] for i in kept), 0.0, []
    for i in kept:
        if chosen and top_p < 1 and mass >= top_p * total:
            break
        chosen.append(i)
        mass += weight[i]
    return set(chosen)


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 10**6),
    st.floats(0, 1).filter(lambda p: p in (0, 1) or 0.01 < p < 0.99),
    st.integers(0, 60),
    st.sampled_from([0.0, 0.01, 0.1, 0.5, 1.0]),
)
def test_filters_keep_what_the_definitions_keep(seed, top_p, top_k, min_p):
    """L3."""
    scaled = logits_of(1, seed=seed)[0]
    kept = set(kept_tokens(scaled, top_p, top_k, min_p).nonzero().flatten().tolist())
    assert kept == reference_kept(scaled.double().numpy(), top_p, top_k, min_p)


def test_ties_and_extremes():
    """L3: top_k keeps exactly k among equals, the lower ids; top_p = 0 keeps the best."""
    flat = torch.zeros(10)
    assert kept_tokens(flat, 1.0, 3, 0.0).nonzero().flatten().tolist() == [0, 1, 2]
    row = logits_of(1)[0]
    assert kept_tokens(row, 0.0, 0, 0.0).nonzero().flatten().tolist() == [int(row.argmax())]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
def test_logprobs_and_draw_follow_the_distribution(temperature):
    """L3: values against log_softmax, frequencies against probabilities."""
    row = logits_of(1, vocab=12)
    requests = [request(i, temperature=temperature) for i in range(4000)]
    drawn = sample(row.expand(4000, -1), requests, EOS)
    log_p = (row[0] / temperature).log_softmax(-1)
    for s in drawn[:50]:
        assert s.logprob == pytest.approx(float(log_p[s.token]), abs=1e-5)
        assert s.sampling_logprob == s.logprob
    counts = np.bincount([s.token for s in drawn], minlength=12)
    expected = log_p.exp().numpy() * 4000
    large = expected > 5
    assert ((counts - expected)[large] ** 2 / expected[large]).sum() < 40


def test_sampling_logprob_is_the_filtered_one():
    """L4: sampling_logprob - logprob = -log(kept mass); nothing outside is drawn."""
    row = logits_of(1)
    requests = [request(i, top_k=4) for i in range(200)]
    kept = kept_tokens(row[0], 1.0, 4, 0.0)
    mass = float(row[0].softmax(-1)[kept].sum())
    for s in sample(row.expand(200, -1), requests, EOS):
        assert kept[s.token]
        assert s.sampling_logprob - s.logprob == pytest.approx(-math.log(mass), abs=1e-5)


def test_mixed_rows_are_what_each_is_alone():
    """L11: greedy, filtered, held back and plain rows side by side, bitwise."""
    kinds: list[dict[str, object]] = [
        {}, {"temperature": 0.0}, {"top_p": 0.7}, {"top_k": 3, "temperature": 0.6},
        {"min_p": 0.2}, {"min_tokens": 4}, {"temperature": 0.0, "min_tokens": 2}, {"seed": 3},
    ]
    requests = [request(i, **kinds[i % len(kinds)]) for i in range(40)]
    logits = logits_of(40)
    together = sample(logits, requests, EOS)
    alone = [sample(logits[i : i + 1], [r], EOS)[0] for i, r in enumerate(requests)]
    assert together == alone


def test_greedy():
    """L1, L3: the argmax; the first of equals; a held-back stop token is not taken."""
    row = torch.tensor([[0.0, 3.0, 3.0, 1.0]])
    (plain,) = sample(row, [request(temperature=0.0)], frozenset())
    assert (plain.token, plain.sampling_logprob) == (1, 0.0)
    assert plain.logprob == pytest.approx(float(row[0].log_softmax(-1)[1]))
    (held,) = sample(row, [request(temperature=0.0, min_tokens=1)], EOS)
    assert held.token == 2


def test_min_tokens_ends():
    row = torch.tensor([[0.0, 50.0, 0.0, 0.0]])
    waiting = request(min_tokens=1)
    assert sample(row, [waiting], EOS)[0].token != 1
    waiting.append(2, -1.0, -1.0, 0)
    assert sample(row, [waiting], EOS)[0].token == 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_rows_give_no_token(bad):
    """L9: and do not disturb their neighbours."""
    logits = logits_of(3)
    requests = [request(i) for i in range(3)]
    clean = sample(logits, requests, EOS)
    logits[1, 7] = bad
    found = sample(logits, requests, EOS)
    assert found[1].token is None
    assert [found[0], found[2]] == [clean[0], clean[2]]


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 0}, {"temperature": -0.1}, {"temperature": float("nan")}, {"top_p": 1.1},
        {"top_k": -2}, {"min_p": -0.1}, {"min_tokens": -1}, {"seed": -1},
        {"min_tokens": 5, "max_tokens": 4},
    ],
)
def test_bad_parameters_name_field_and_value(fields):
    name = next(iter(fields))
    with pytest.raises(ValueError, match=rf"SamplingParams\.{name}"):
        SamplingParams(**fields)


def test_unknown_fields_name_the_nearest():
    with pytest.raises(TypeError, match="'max_token'; did you mean 'max_tokens'"):
        checked_fields({"max_token": 3})
    with pytest.raises(TypeError, match="known: n, temperature"):
        SamplingParams.from_fields({"zzz": 1})
    assert SamplingParams.from_fields({"n": 2, "stop_token_ids": [3]}).stop_token_ids == (3,)
