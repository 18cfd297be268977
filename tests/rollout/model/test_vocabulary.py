"""Log-normalizers, draws and gradients: right in value, and a row's bits its own."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention.native import BuildFailed, load_library
from rollout.model.native.library import SOURCES
from rollout.model.vocabulary import NativeVocabulary, PortableVocabulary
from rollout.sampling_rows import NOT_FINITE, NOTHING_LEFT

BOTH = {"native": NativeVocabulary(), "portable": PortableVocabulary()}
SIZES = (1, 2, 15, 16, 17, 100, 1023, 1024, 1025, 3000)
both = pytest.mark.parametrize("name", BOTH)


def case(rows: int, vocab: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=generator) * 4
    logits[torch.rand(rows, vocab, generator=generator) < 0.1] = -torch.inf
    logits[:, vocab // 2] = 1.0  # something is left
    temperature = torch.rand(rows, generator=generator) + 0.5
    temperature[::2] = 1.0
    uniforms = torch.rand(rows, generator=generator, dtype=torch.float64).numpy()
    return logits, temperature, uniforms


def dense(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """log softmax in float64 of the fp32 tempered logits."""
    return (logits / temperature.unsqueeze(1)).double().log_softmax(-1)


def no_greedy(rows: int) -> np.ndarray:
    return np.zeros(rows, np.bool_)


@both
@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 6), vocab=st.sampled_from(SIZES), seed=st.integers(0, 999))
def test_values(name, rows, vocab, seed):
    logits, temperature, uniforms = case(rows, vocab, seed)
    log_p = dense(logits, temperature)
    p = log_p.exp()
    lse, entropy = BOTH[name].log_normalizers(logits, temperature, entropy=True)
    wanted = (logits / temperature.unsqueeze(1)).double().logsumexp(-1)
    assert torch.allclose(lse.double(), wanted, atol=1e-5)
    surprise = torch.where(p > 0, -p * log_p, 0.0)
    assert torch.allclose(entropy.double(), surprise.sum(-1), atol=1e-4)
    draw = BOTH[name].sample(logits, temperature, no_greedy(rows), uniforms)
    assert torch.equal(draw.log_normalizers, lse)
    cumulative = p.cumsum(-1).numpy()
    for row in range(rows):
        token = int(draw.tokens[row])
        below = cumulative[row, token - 1] if token else 0.0
        assert p[row, token] > 0
        assert below - 1e-6 <= uniforms[row] <= cumulative[row, token] + 1e-6
        assert abs(float(draw.logprobs[row]) - float(log_p[row, token])) < 2e-5
    again = BOTH[name].gather(logits, temperature, draw.tokens, lse)
    assert torch.equal(again, draw.logprobs) and (again <= 0).all()
    greedy = BOTH[name].sample(logits, temperature, ~no_greedy(rows), uniforms)
    scaled = logits / temperature.unsqueeze(1)
    first = [(row == row.max()).nonzero()[0].item() for row in scaled]
    assert greedy.tokens.tolist() == first


@both
def test_a_row_alone_has_the_bits_it_has_among_others(name):
    """L5: whatever the number of rows and threads; torch's own sum of one row is the control."""
    before, control = torch.get_num_threads(), 0
    logits, temperature, uniforms = case(40, 151_936)
    try:
        torch.set_num_threads(2)
        whole = BOTH[name].sample(logits, temperature, no_greedy(40), uniforms)
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for row in range(40):
                at = slice(row, row + 1)
                alone = BOTH[name].sample(logits[at], temperature[at], no_greedy(1), uniforms[at])
                assert all(torch.equal(a, b[at]) for a, b in zip(alone, whole, strict=True))
        scaled = logits / temperature.unsqueeze(1)
        together = scaled.logsumexp(-1)
        for row in range(40):
            control += int(scaled[row : row + 1].logsumexp(-1)[0] != together[row])
    finally:
        torch.set_num_threads(before)
    assert control > 0


@both
@pytest.mark.parametrize("vocab", [1, 40, 1500])
def test_what_is_not_finite_is_told(name, vocab):
    """L9: NaN or +inf anywhere, in a full vector or a tail, and nothing left at all."""
    for place in {0, vocab // 2, vocab - 1}:
        logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(0))
        logits[0, place], logits[1, place] = torch.nan, torch.inf
        logits[2] = -torch.inf
        for greedy in (no_greedy(4), ~no_greedy(4)):
            draw = BOTH[name].sample(logits, torch.ones(4), greedy, np.full(4, 0.5))
            assert draw.tokens[:3].tolist() == [NOT_FINITE, NOT_FINITE, NOTHING_LEFT]
            assert draw.tokens[3] >= 0
        lse, _ = BOTH[name].log_normalizers(logits, torch.ones(4))
        assert torch.isfinite(lse).tolist() == [False, False, False, True]
        assert lse[2] == -torch.inf
        logits[0], logits[0, place] = -torch.inf, torch.nan
        assert BOTH[name].sample(logits, torch.ones(4), no_greedy(4), np.full(4, 0.5)).tokens[0] < 0


@both
def test_the_ends_of_the_distribution(name):
    """L13: the least and the greatest uniform find tokens of positive probability."""
    for vocab in SIZES:
        logits = torch.full((2, vocab), -torch.inf)
        logits[:, vocab // 2] = 0.0
        ends = np.array([2.0**-53, 1 - 2.0**-53])
        draw = BOTH[name].sample(logits, torch.ones(2), no_greedy(2), ends)
        assert draw.tokens.tolist() == [vocab // 2] * 2
        assert draw.logprobs.tolist() == [0.0, 0.0]


@both
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("vocab", [1, 17, 1500])
def test_gradient(name, with_entropy, vocab):
    """Against autograd in float64, which is itself held against finite differences."""
    logits, temperature, _ = case(5, vocab, 3)
    logits = logits.nan_to_num(neginf=-30.0)
    tokens = torch.arange(5) * 7 % vocab
    generator = torch.Generator().manual_seed(1)
    by_logprob, by_entropy = torch.randn(2, 5, generator=generator)

    def loss(wide: torch.Tensor) -> torch.Tensor:
        log_p = (wide / temperature.double().unsqueeze(1)).log_softmax(-1)
        total = (log_p.gather(1, tokens.unsqueeze(1))[:, 0] * by_logprob.double()).sum()
        if with_entropy:
            total = total - ((log_p.exp() * log_p).sum(-1) * by_entropy.double()).sum()
        return total

    wide = logits.double().requires_grad_()
    (exact,) = torch.autograd.grad(loss(wide), wide)
    direction = torch.randn(logits.shape, generator=generator, dtype=torch.float64)
    slope = (loss(wide + 1e-6 * direction) - loss(wide - 1e-6 * direction)) / 2e-6
    assert abs(slope.item() - float((exact * direction).sum())) < 1e-5
    lse, entropy = BOTH[name].log_normalizers(logits, temperature, entropy=True)
    got = BOTH[name].score_gradient(
        logits.clone(), temperature, tokens, lse, entropy, by_logprob,
        by_entropy if with_entropy else None,
    )  # fmt: skip
    assert torch.allclose(got.double(), exact, atol=2e-5)


@pytest.mark.parametrize("flags", [["-mavx2", "-mfma"], []], ids=["avx2", "scalar"])
def test_every_instruction_set_gives_the_same_bits(flags, tmp_path):
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        pytest.skip("the other builds are for x86")
    try:
        other = load_library("decoder", SOURCES, flags=flags, cache=tmp_path)
    except BuildFailed as error:
        pytest.skip(f"this compiler does not make it: {error}")
    logits, temperature, _ = case(7, 3001)
    wanted = BOTH["native"].log_normalizers(logits, temperature, entropy=True)
    got = torch.empty(7), torch.empty(7)
    addresses = [ctypes.c_void_p(t.data_ptr()) for t in (logits, temperature, *got)]
    sizes = ctypes.c_int64(7), ctypes.c_int64(3001)
    other.log_normalizers(addresses[0], *sizes, *addresses[1:])
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
