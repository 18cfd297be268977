"""Sampling against an independent reference in plain Python, one row and one id at a time."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from rollout.logit_edits import LogitEdits
from rollout.model.operators import select_operators
from rollout.model.vocabulary import PortableVocabulary, Vocabulary, normalizer, tempered
from rollout.noise import noise_key, uniforms
from rollout.sampler import best_tokens, filtered_logits
from rollout.sampler import sample as sample_with
from rollout.sampling import SamplingParams
from rollout.sampling_rows import (
    NOT_FINITE,
    NOTHING_LEFT,
    EditedRow,
    Filters,
    SampledRows,
    SamplingRows,
)

EOS = frozenset({1})
NEVER = -math.inf


VOCABULARIES: dict[str, Vocabulary] = {
    "default": select_operators(None, torch.device("cpu"), torch.float32).vocabulary,
    "portable": PortableVocabulary(),
}
under_test: list[Vocabulary] = []


@pytest.fixture(autouse=True, params=VOCABULARIES)
def vocabulary(request):
    """Every test here runs with each."""
    under_test[:] = [VOCABULARIES[request.param]]


def sample(logits: torch.Tensor, rows: SamplingRows) -> SampledRows:
    return sample_with(logits, rows, under_test[0])


class Row(NamedTuple):
    """A request as the sampler sees it."""

    params: SamplingParams
    prompt: tuple[int, ...] = (5, 6)
    output: tuple[int, ...] = ()
    index: int = 0


def row(index: int = 0, output: Sequence[int] = (), **fields: object) -> Row:
    return Row(SamplingParams(**fields), output=tuple(output), index=index)


def columns(rows: Sequence[Row]) -> SamplingRows:
    params = [r.params for r in rows]
    edited = []
    for i, r in enumerate(rows):
        edits = LogitEdits.build(r.params, EOS, None)
        if edits is not None:
            prompt, output = np.array(r.prompt, np.int32), np.array(r.output, np.int32)
            edited.append(EditedRow(i, edits, prompt, output))
    filters = None
    if any(p.filters for p in params):
        filters = Filters(
            np.array([p.top_p for p in params], np.float64),
            np.array([p.top_k for p in params], np.int64),
            np.array([p.min_p for p in params], np.float64),
        )
    return SamplingRows(
        np.array([p.temperature or 1.0 for p in params], np.float32),
        np.array([p.greedy for p in params]),
        np.array([noise_key(r.params.seed or 0, r.prompt, r.index) for r in rows], np.uint64),
        np.array([len(r.prompt) + len(r.output) for r in rows], np.int64),
        filters,
        edited,
        max(p.logprobs or 0 for p in params),
    )


def drawn(logits: torch.Tensor, rows: Sequence[Row]) -> SampledRows:
    return sample(logits, columns(rows))


def one(logits: Sequence[float], **fields: object) -> SampledRows:
    return drawn(torch.tensor([logits]), [row(**fields)])


def support(logits: Sequence[float], draws: int = 400, **fields: object) -> set[int]:
    """Ids that occur among many draws; logits must give each kept id a fair share."""
    rows = [row(i, **fields) for i in range(draws)]
    return set(drawn(torch.tensor([logits]).expand(draws, -1), rows).tokens.tolist())


def logits_of(rows: int, vocab: int = 50, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def bits(result: SampledRows, i: int) -> tuple[int, int, int]:
    """Token and both log-probs, these as their bits."""
    as_int = (result.logprobs.view(np.int32)[i], result.sampling_logprobs.view(np.int32)[i])
    return int(result.tokens[i]), int(as_int[0]), int(as_int[1])


# ------------------------------------------------------------------ the reference


def reference_edits(x: list[float], r: Row) -> list[float]:
    p, output = r.params, list(r.output)
    if p.allowed_token_ids is not None:
        x = [v if i in p.allowed_token_ids else NEVER for i, v in enumerate(x)]
    for word in p.bad_words:
        *before, last = word
        if output[len(output) - len(before) :] == before:
            x[last] = NEVER
    if len(output) < p.min_tokens:
        for stop in EOS:
            x[stop] = NEVER
    for token, value in p.logit_bias:
        x[token] += value
    for token in range(len(x)):
        if token in r.prompt or token in output:
            positive = x[token] > 0
            x[token] *= 1 / p.repetition_penalty if positive else p.repetition_penalty
        if token in output:
            x[token] -= p.frequency_penalty * output.count(token) + p.presence_penalty
    return x


def reference_filters(x: list[float], top_p: float, top_k: int, min_p: float) -> list[float]:
    order = sorted(range(len(x)), key=lambda i: (-x[i], i))
    weight = {i: math.exp(x[i] - x[order[0]]) for i in order}
    kept = [i for i in order if weight[i] >= min_p]
    if top_k > 0:
        kept = kept[:top_k]
    total, mass, chosen = sum(weight[i] for i in kept), 0.0, []
    for i in kept:
        if chosen and top_p < 1 and mass >= top_p * total:
            break
        chosen.append(i)
        mass += weight[i]
    return [v if i in chosen else NEVER for i, v in enumerate(x)]


def log_softmax(x: Sequence[float]) -> list[float]:
    best = max(x)
    total = best + math.log(sum(math.exp(v - best) for v in x))
    return [v - total for v in x]


def check_against_reference(result: SampledRows, i: int, logits: list[float], r: Row) -> None:
    p = r.params
    token, temperature = int(result.tokens[i]), p.temperature or 1.0
    edited = reference_edits(list(logits), r)
    if max(edited) == NEVER:
        assert token == NOTHING_LEFT
        return
    raw = log_softmax([v / temperature for v in logits])
    assert result.logprobs[i] == pytest.approx(raw[token], abs=2e-5)
    if p.greedy:
        # Two logits that differ by rounding alone may change places in fp32.
        assert edited[token] == pytest.approx(max(edited), abs=1e-6)
        assert result.sampling_logprobs[i] == 0.0
        return
    scaled = [v / temperature for v in edited]
    really = log_softmax(reference_filters(scaled, p.top_p, p.top_k, p.min_p))
    assert result.sampling_logprobs[i] == pytest.approx(really[token], abs=2e-5)
    keys = np.array([noise_key(p.seed or 0, r.prompt, r.index)], np.uint64)
    u = uniforms(keys, np.array([len(r.prompt) + len(r.output)]))[0]
    below = sum(math.exp(v) for v in really[:token])
    assert below - 1e-5 <= u <= below + math.exp(really[token]) + 1e-5


TOKENS = st.integers(0, 19)
MIXTURES = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.5, 1.0, 1.5]),
        "top_p": st.sampled_from([0.0, 0.3, 0.77, 0.95]),
        "top_k": st.integers(1, 25),
        "min_p": st.sampled_from([0.01, 0.1, 0.5]),
        "repetition_penalty": st.sampled_from([0.7, 1.3, 2.0]),
        "frequency_penalty": st.sampled_from([-1.5, 0.4, 2.0]),
        "presence_penalty": st.sampled_from([-0.7, 0.9]),
        "logit_bias": st.dictionaries(TOKENS, st.sampled_from([-50.0, -1.5, 2.0, 7.0])),
        "allowed_token_ids": st.lists(TOKENS, min_size=1, max_size=8),
        "bad_words": st.lists(st.lists(TOKENS, min_size=1, max_size=2), max_size=6),
        "min_tokens": st.integers(0, 4),
        "seed": st.integers(0, 9),
    },
)
ROWS = st.builds(
    lambda fields, prompt, output: Row(SamplingParams(**fields), tuple(prompt), tuple(output)),
    MIXTURES,
    st.lists(TOKENS, min_size=1, max_size=5),
    st.lists(TOKENS, max_size=6),
)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**6), st.lists(ROWS, min_size=1, max_size=6))
def test_any_mixture_follows_the_definitions(seed, rows):
    """L3: every parameter, alone and together, rows of all kinds side by side."""
    logits = logits_of(len(rows), 20, seed)
    before = logits.clone()
    result = drawn(logits, rows)
    assert torch.equal(logits, before)
    for i, r in enumerate(rows):
        check_against_reference(result, i, logits[i].tolist(), r)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6), st.lists(ROWS, min_size=2, max_size=6))
def test_any_row_is_what_it_is_alone(seed, rows):
    """L11, L5: bit for bit, whatever lies beside it."""
    logits = logits_of(len(rows), 20, seed)
    together = drawn(logits, rows)
    for i, r in enumerate(rows):
        if together.tokens[i] >= 0:
            assert bits(together, i) == bits(drawn(logits[i : i + 1], [r]), 0)
        else:
            assert drawn(logits[i : i + 1], [r]).tokens[0] == together.tokens[i]


KINDS: list[dict[str, object]] = [
    {}, {"temperature": 0.0}, {"top_p": 0.7}, {"top_k": 3, "temperature": 0.6}, {"min_p": 0.2},
    {"min_tokens": 4}, {"temperature": 0.0, "min_tokens": 2}, {"seed": 3},
    {"repetition_penalty": 1.4, "top_p": 0.9}, {"allowed_token_ids": range(0, 3000, 7)},
    {"temperature": 0.0, "logit_bias": {8: 30.0}}, {"bad_words": [[3], [4, 5]]},
    {"min_p": 0.01, "top_k": 40, "top_p": 0.8, "frequency_penalty": 0.5},
]


@pytest.mark.parametrize("vocab", [3000, 20011])
def test_mixed_rows_are_what_each_is_alone(vocab):
    """L11: vocabularies that are no multiple of a vector, and two kinds of neighbours."""
    rows = [row(i, output=[4, i], **KINDS[i % len(KINDS)]) for i in range(26)]
    logits = logits_of(26, vocab)
    together = drawn(logits, rows)
    for i, r in enumerate(rows):
        assert bits(together, i) == bits(drawn(logits[i : i + 1], [r]), 0)
    plain = drawn(logits, [row(i, output=[4, i]) for i in range(26)])
    changed = [i for i in range(26) if bits(together, i) != bits(plain, i)]
    assert len(changed) >= 20  # the comparison above has something to tell apart


# ------------------------------------------------------------------ the distribution


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
def test_frequencies_follow_the_distribution(temperature):
    """L3; the control: the same draws do not fit a neighbouring temperature."""
    logits = logits_of(1, vocab=12)
    rows = [row(i, temperature=temperature) for i in range(4000)]
    counts = np.bincount(drawn(logits.expand(4000, -1), rows).tokens, minlength=12)

    def chi_square(t: float) -> float:
        expected = (logits[0] / t).softmax(-1).numpy() * 4000
        large = expected > 5
        return float(((counts - expected)[large] ** 2 / expected[large]).sum())

    assert chi_square(temperature) < 40
    assert chi_square(temperature * 1.2) > 40


def test_frequencies_under_edits_and_filters():
    """L3: what is drawn follows the distribution that sampling_logprobs speak of."""
    logits = logits_of(1, vocab=12)
    fields = {"repetition_penalty": 1.5, "logit_bias": {2: 2.0}, "top_p": 0.9, "temperature": 1.3}
    rows = [row(i, output=[7, 7], **fields) for i in range(4000)]
    result = drawn(logits.expand(4000, -1), rows)
    counts = np.bincount(result.tokens, minlength=12)
    edited = reference_edits(logits[0].tolist(), rows[0])
    scaled = reference_filters([v / 1.3 for v in edited], 0.9, 0, 0.0)
    expected = np.exp(log_softmax(scaled)) * 4000
    assert set(np.flatnonzero(counts)) <= set(np.flatnonzero(expected))
    large = expected > 5
    assert ((counts - expected)[large] ** 2 / expected[large]).sum() < 40


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.8])
def test_plain_logprobs_have_the_bits_of_the_shared_functions(dtype, temperature):
    """L6: what the trainer computes; both log-probs are one where nothing is on."""
    logits = logits_of(8, 501).to(dtype)
    result = drawn(logits, [row(i, temperature=temperature) for i in range(8)])
    t, tokens = torch.full((8,), temperature), torch.from_numpy(result.tokens)
    lse, _ = under_test[0].log_normalizers(logits, t)
    expected = under_test[0].gather(logits, t, tokens, lse).numpy()
    assert result.logprobs.tobytes() == expected.tobytes()
    assert result.sampling_logprobs.tobytes() == expected.tobytes()
    assert (result.logprobs <= 0).all()


@pytest.mark.parametrize(
    "fields", [{"top_k": 4}, {"allowed_token_ids": [3, 9, 30]}, {"min_p": 0.3}, {"top_p": 0.5}]
)
def test_the_kept_mass_lies_between_the_logprobs(fields):
    """L4: sampling_logprob - logprob = -log(kept mass); nothing outside is drawn."""
    logits = logits_of(1)
    rows = [row(i, **fields) for i in range(200)]
    raw = logits[0].tolist()
    p = rows[0].params
    kept = reference_filters(reference_edits(raw, rows[0]), p.top_p, p.top_k, p.min_p)
    mass = sum(math.exp(log_softmax(raw)[i]) for i, v in enumerate(kept) if v > NEVER)
    result = drawn(logits.expand(200, -1), rows)
    assert all(kept[token] > NEVER for token in result.tokens)
    difference = result.sampling_logprobs - result.logprobs
    assert difference == pytest.approx(np.full(200, -math.log(mass)), abs=1e-5)
    assert mass < 0.95


def test_the_global_generator_is_untouched():
    """L8: and the same rows give the same tokens."""
    torch.manual_seed(0)
    state = torch.get_rng_state()
    rows = [row(i, **KINDS[i % len(KINDS)]) for i in range(13)]
    first = drawn(logits_of(13, 3000), rows)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(7)
    assert drawn(logits_of(13, 3000), rows).tokens.tolist() == first.tokens.tolist()


# ------------------------------------------------------------------ filters


def kept(logits: torch.Tensor, top_p: float, top_k: int, min_p: float) -> set[int]:
    filters = Filters(np.array([top_p]), np.array([top_k]), np.array([min_p]))
    out = filtered_logits(logits.unsqueeze(0), filters)[0]
    alive = out > NEVER
    assert torch.equal(out[alive], logits[alive])
    return set(alive.nonzero().flatten().tolist())


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 10**6),
    st.booleans(),
    st.floats(0, 1).filter(lambda p: p in (0, 1) or 0.01 < p < 0.99),
    st.integers(-1, 60),
    st.sampled_from([0.0, 0.01, 0.1, 0.5, 1.0]),
)
def test_filters_keep_what_the_definitions_keep(seed, ties, top_p, top_k, min_p):
    """L3; whole logits have many equals, where the lower id comes first."""
    logits = logits_of(1, seed=seed)[0]
    logits = logits.round() if ties else logits
    expected = reference_filters(logits.tolist(), top_p, top_k, min_p)
    assert kept(logits, top_p, top_k, min_p) == {i for i, v in enumerate(expected) if v > NEVER}


def test_ties_and_extremes():
    """L3: top_k keeps exactly k among equals, the lower ids; top_p = 0 keeps the best; a share
    that is reached exactly takes no token more."""
    flat = torch.zeros(10)
    assert kept(flat, 1.0, 3, 0.0) == {0, 1, 2}
    assert kept(flat, 0.3, 0, 0.0) == {0, 1, 2}
    assert kept(flat, 1.0, 0, 1.0) == set(range(10))
    assert kept(flat, 1.0, 99, 0.0) == set(range(10))
    logits = logits_of(1)[0]
    assert kept(logits, 0.0, 0, 0.0) == {int(logits.argmax())}


def test_a_top_p_beside_it_takes_nothing_from_a_top_k():
    """L3, L11: exactly k are kept, also where the last of them weigh nothing."""
    logits = torch.tensor([[0.0, -200.0, -300.0, -400.0]]).expand(2, -1)
    filters = Filters(np.array([1.0, 0.5]), np.array([3, 0]), np.zeros(2))
    alive = filtered_logits(logits, filters) > NEVER
    assert alive.tolist() == [[True, True, True, False], [True, False, False, False]]


# ------------------------------------------------------------------ edits


def test_greedy():
    """L1, L3: the argmax; the first of equals; a held-back stop token is not taken."""
    logits = [0.0, 3.0, 3.0, 1.0]
    plain = one(logits, temperature=0.0)
    assert (plain.tokens[0], plain.sampling_logprobs[0]) == (1, 0.0)
    assert plain.logprobs[0] == pytest.approx(log_softmax(logits)[1])
    assert one(logits, temperature=0.0, min_tokens=1).tokens[0] == 2
    assert one(logits, temperature=0.0, top_k=1, top_p=0.1, min_p=1.0).tokens[0] == 1


@pytest.mark.parametrize(
    ("fields", "token"),
    [
        ({}, 4),
        ({"repetition_penalty": 2.0}, 2),  # 4 and 5 halved: 2.0 and 1.7
        ({"frequency_penalty": 0.6}, 5),  # 4 twice: 2.8; 5 is of the prompt, untouched
        ({"frequency_penalty": 0.2}, 4),
        ({"presence_penalty": 0.7}, 5),
        ({"presence_penalty": 0.5}, 4),
        ({"logit_bias": {0: 4.5}}, 0),
        ({"allowed_token_ids": [0, 3]}, 3),
        ({"bad_words": [[4]]}, 5),
        ({"bad_words": [[4, 4], [4, 4, 5]]}, 2),
        ({"bad_words": [[5, 4], [4, 4, 4, 4]]}, 4),
    ],
)
def test_greedy_honours_edits(fields, token):
    """L3: the log-prob is that of the logits as the model gave them."""
    logits = [0.0, 0.1, 2.5, 1.0, 4.0, 3.4]
    r = Row(SamplingParams(temperature=0.0, **fields), (5,), (4, 4))
    result = drawn(torch.tensor([logits]), [r])
    assert result.tokens[0] == token
    assert result.logprobs[0] == pytest.approx(log_softmax(logits)[token], abs=1e-5)
    assert result.sampling_logprobs[0] == 0.0


def test_penalties_leave_absent_tokens_alone():
    """L3: of the prompt, frequency and presence know nothing."""
    logits = logits_of(1, 12)
    fields = {"frequency_penalty": 2.0, "presence_penalty": 2.0}
    plain = drawn(logits, [row()])
    assert bits(drawn(logits, [row(**fields)]), 0) == bits(plain, 0)
    assert bits(drawn(logits, [row(output=[3], **fields)]), 0) != bits(
        drawn(logits, [row(output=[3])]), 0
    )


def test_min_tokens_ends():
    """S4: the stop id is held back before min_tokens, and no longer."""
    logits = [0.0, 50.0, 0.0, 0.0]
    assert one(logits, min_tokens=1).tokens[0] != 1
    assert one(logits, min_tokens=1, output=[2]).tokens[0] == 1


def test_stop_ids_outside_the_logits_are_of_no_matter():
    """L10: a model folder may name EOS ids that the model has no logit for."""
    edits = LogitEdits.build(SamplingParams(min_tokens=1), frozenset({1, -1, 4, 99}), None)
    assert edits is not None
    nothing = np.empty(0, np.int32)
    rows = dataclasses.replace(
        columns([row(), row()]), edited=[EditedRow(i, edits, nothing, nothing) for i in (1, 0)]
    )
    logits = torch.tensor([[0.0, 50.0, 0.0, 9.0], [9.0, 50.0, 0.0, 0.0]])
    assert not (sample(logits, rows).tokens == 1).any()
    greedy = dataclasses.replace(rows, greedy=np.array([True, True]))
    assert sample(logits, greedy).tokens.tolist() == [3, 0]  # edited rows come in any order


# ------------------------------------------------------------------ the order


def test_a_bias_revives_nothing_that_is_banned():
    """L3: allowed ids, bad words and min_tokens come before the bias."""
    logits, bias = [0.0, 1.0, 2.0, 3.0], {1: 90.0, 2: 90.0, 3: 90.0}
    fields = {"allowed_token_ids": [0, 1, 2], "bad_words": [[2]], "min_tokens": 1}
    assert one(logits, logit_bias=bias, temperature=0.0, **fields).tokens[0] == 0
    assert one(logits, logit_bias=bias, temperature=0.0).tokens[0] == 3


def test_the_bias_decides_on_which_side_of_zero_the_penalty_finds_a_logit():
    """L3: bias, then penalties: (-1 + 3) / 4 = 0.5 wins; -1 · 4 + 3 = -1 would not."""
    fields = {"logit_bias": {2: 3.0}, "repetition_penalty": 4.0, "output": [2]}
    assert one([0.0, 0.1, -1.0, 0.2, 0.3, -9.0, -9.0], temperature=0.0, **fields).tokens[0] == 2


def test_penalties_come_before_the_temperature():
    """L3: (1 - 1) / 0.5 = 0 against 0; 1 / 0.5 - 1 = 1 would not be even."""
    result = drawn(
        torch.tensor([[1.0, 0.0]]), [row(temperature=0.5, presence_penalty=1.0, output=[0])]
    )
    assert result.sampling_logprobs[0] == pytest.approx(-math.log(2))


def test_min_p_sees_the_tempered_distribution():
    """L3: a weight of e^-2 stays at T = 2, where it is e^-1."""
    assert support([2.0, 0.0], min_p=0.3, temperature=2.0) == {0, 1}
    assert support([2.0, 0.0], min_p=0.3) == {0}


def test_top_p_is_a_share_of_what_the_other_filters_left():
    """L3: probabilities 0.4, 0.3, 0.15, 0.15."""
    logits = [math.log(p) for p in (0.4, 0.3, 0.15, 0.15)]
    assert support(logits, top_p=0.55) == {0, 1}
    assert support(logits, top_p=0.55, top_k=2) == {0}  # 0.4 of 0.7 is enough
    assert support(logits, top_p=0.55, min_p=0.5) == {0}
    assert support(logits, top_k=3) == {0, 1, 2}
    assert support(logits, top_k=3, min_p=0.5) == {0, 1}


def test_filters_see_the_edited_logits():
    """L3: an id that is not allowed takes no place among the best k."""
    assert support([5.0, 1.0, 0.9, 0.8], allowed_token_ids=[1, 2, 3], top_k=2) == {1, 2}


# ------------------------------------------------------------------ no token


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_non_finite_rows_give_no_token(bad, kind):
    """L9: and do not disturb their neighbours, which are of every kind."""
    logits = logits_of(len(KINDS), 3000)
    rows = [row(i, output=[4], **fields) for i, fields in enumerate(KINDS)]
    clean = drawn(logits, rows)
    logits[kind, 7] = bad
    found = drawn(logits, rows)
    assert found.tokens[kind] == NOT_FINITE
    others = [i for i in range(len(KINDS)) if i != kind]
    assert [bits(found, i) for i in others] == [bits(clean, i) for i in others]
    assert (clean.tokens >= 0).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_that_contradicts_itself_has_nothing_left(temperature):
    """L9: distinct from logits that are not finite, which go before it."""
    rows = [
        row(temperature=temperature),
        row(temperature=temperature, allowed_token_ids=[2], bad_words=[[2]], top_p=0.5),
        row(temperature=temperature, allowed_token_ids=[1], min_tokens=3),
    ]
    logits = logits_of(3)
    result = drawn(logits, rows)
    assert result.tokens[0] >= 0
    assert result.tokens[1:].tolist() == [NOTHING_LEFT, NOTHING_LEFT]
    logits[1, 9] = math.nan
    assert drawn(logits, rows).tokens[1:].tolist() == [NOT_FINITE, NOTHING_LEFT]


def test_minus_infinity_is_a_logit_like_any_other():
    """L9: a model may rule a token out; a row that rules out all of them has no distribution."""
    logits = torch.tensor([[0.0, NEVER, 1.0], [NEVER, NEVER, NEVER]])
    result = drawn(logits, [row(), row()])
    assert result.tokens[0] in (0, 2)
    assert result.tokens[1] == NOT_FINITE


# ------------------------------------------------------------------ best tokens


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 60), st.booleans(), st.sampled_from([0.5, 1.0]))
def test_best_tokens(seed, k, ties, temperature):
    """L3: best first, the lower id first among equals, also for the last place."""
    logits = logits_of(3, 50, seed)
    logits = logits.round() if ties else logits
    rows = [row(0, logprobs=k, temperature=temperature), row(1, temperature=temperature), row(2)]
    result = drawn(logits, rows)
    assert result.top_ids is not None and result.top_logprobs is not None
    assert result.top_ids.shape == result.top_logprobs.shape == (3, min(k, 50))
    for i, r in enumerate(rows):
        t = torch.tensor([r.params.temperature])
        lse, _ = under_test[0].log_normalizers(logits[i : i + 1], t)
        expected = (tempered(logits[i : i + 1], t) - lse)[0].tolist()
        order = sorted(range(50), key=lambda t, e=expected: (-e[t], t))[:k]
        assert result.top_ids[i].tolist() == order
        assert result.top_logprobs[i].tolist() == [expected[t] for t in order]


def test_best_tokens_are_of_the_unedited_logits_and_share_their_bits():
    """L3: the sampled token's log-prob is found among them, to the bit."""
    logits = logits_of(1)
    fields = {"temperature": 0.7, "logprobs": 50, "bad_words": [[int(logits.argmax())]]}
    result = drawn(logits, [row(top_k=3, **fields)])
    assert result.top_ids is not None and result.top_logprobs is not None
    assert result.top_ids[0, 0] == logits.argmax()
    at = result.top_ids[0].tolist().index(result.tokens[0])
    assert at in (1, 2, 3)
    assert result.top_logprobs[0, at].tobytes() == result.logprobs[0].tobytes()


def test_best_tokens_of_flat_rows():
    flat = torch.zeros(2, 1000)
    ids, logprobs = best_tokens(flat, normalizer(flat), 4)
    assert ids.tolist() == [[0, 1, 2, 3]] * 2
    assert logprobs == pytest.approx(-math.log(1000))


def test_nobody_asks_for_best_tokens():
    assert drawn(logits_of(1), [row(logprobs=0)]).top_ids is None


# ------------------------------------------------------------------ what is off costs nothing


class Operations(TorchDispatchMode):
    """Names of the operations that touch a tensor of the size of the logits."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = [t for t in (*args, result) if isinstance(t, torch.Tensor)]
        if any(t.numel() >= self.size for t in tensors):
            self.names.append(func.__name__)
        return result


def operations(rows: SamplingRows) -> list[str]:
    logits = logits_of(len(rows.greedy))
    with Operations(logits.numel()) as seen:
        sample(logits, rows)
    return seen.names


def test_what_is_off_adds_no_pass_over_the_logits():
    """Filters and edits that are off, or have nothing to do in this step."""
    plain = operations(columns([row(i) for i in range(4)]))
    idle = columns(
        [row(i, output=[3], min_tokens=1, temperature=1.0) for i in range(3)]
        + [row(3, presence_penalty=1.0)]
    )
    off = Filters(np.ones(4), np.array([0, -1, 0, 0]), np.zeros(4))
    assert len(idle.edited) == 4
    assert operations(dataclasses.replace(idle, filters=off)) == plain
    on = operations(columns([row(i, min_tokens=1) for i in range(4)]))
    assert len(on) > len(plain)


def test_greedy_batches_compute_no_distribution():
    greedy = operations(columns([row(i, temperature=0.0, top_p=0.5) for i in range(4)]))
    under_test[:] = [VOCABULARIES["portable"]]  # of a kernel, no operation is seen
    drawing = operations(columns([row(i) for i in range(4)]))
    assert not {name for name in greedy if name.startswith(("cumsum", "exp", "searchsorted"))}
    assert any(name.startswith("cumsum") for name in drawing)


def test_only_ranks_need_a_sort():
    def sorts(**fields: object) -> int:
        names = operations(columns([row(i, **fields) for i in range(4)]))
        return sum(name.startswith("sort") for name in names)

    assert (sorts(min_p=0.1), sorts(top_k=2), sorts(top_p=0.5, min_p=0.1)) == (0, 1, 1)
    alone = operations(columns([row(i, min_p=0.1) for i in range(4)]))
    assert not any(name.startswith("index_copy") for name in alone)  # nor a copy for none
