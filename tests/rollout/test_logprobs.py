"""The log-prob function of both sides."""

from __future__ import annotations

import pytest
import torch

from rollout import logprobs as module
from rollout.logprobs import score_rows
from rollout.model.operators import NAMES, select_operators
from rollout.model.vocabulary import normalizer

OPERATORS = [select_operators(name, torch.device("cpu"), torch.float32) for name in NAMES]
by_operators = pytest.mark.parametrize("ops", OPERATORS, ids=NAMES)


def case(rows: int = 37, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, 24, generator=generator, dtype=dtype)
    weight = torch.randn(301, 24, generator=generator, dtype=dtype)
    tokens = torch.randint(0, 301, (rows,), generator=generator)
    temperature = torch.rand(rows, generator=generator) + 0.5
    return hidden, weight, tokens, temperature


@pytest.mark.parametrize("chunk", [1, 2, 10, 256])
@pytest.mark.parametrize("ops", [ops for ops in OPERATORS if ops.exact], ids=lambda ops: ops.name)
def test_bits_are_those_of_the_engines_path(ops, chunk, monkeypatch):
    """L6: chunks of any size, against logits of all rows at once."""
    monkeypatch.setattr(module, "ROWS_PER_CHUNK", chunk)
    hidden, weight, tokens, temperature = case()
    logits = ops.matmul(hidden, weight)
    lse, _ = ops.vocabulary.log_normalizers(logits, temperature)
    expected = ops.vocabulary.gather(logits, temperature, tokens, lse)
    assert torch.equal(score_rows(hidden, weight, tokens, temperature, ops)[0], expected)


@by_operators
def test_values_and_entropy(ops):
    hidden, weight, tokens, temperature = case()
    logprobs, entropy = score_rows(hidden, weight, tokens, temperature, ops)
    log_p = ((hidden @ weight.t()) / temperature[:, None]).log_softmax(-1)
    assert torch.allclose(logprobs, log_p.gather(1, tokens[:, None])[:, 0], atol=1e-4)
    assert torch.allclose(entropy, -(log_p.exp() * log_p).sum(-1), atol=1e-4)
    assert (logprobs <= 0).all()


@by_operators
@pytest.mark.parametrize("use_entropy", [False, True])
def test_gradients(ops, use_entropy):
    hidden, weight, tokens, temperature = case()
    coefficient = torch.randn(37, generator=torch.Generator().manual_seed(1))

    def gradients(function, dtype):
        h = hidden.to(dtype).requires_grad_()
        w = weight.to(dtype).requires_grad_()
        logprobs, entropy = function(h, w)
        loss = (logprobs * coefficient.to(dtype)).sum()
        if use_entropy:
            loss = loss + (entropy * coefficient.flip(0).to(dtype)).sum()
        return torch.autograd.grad(loss, (h, w))

    def dense(h, w):
        log_p = ((h @ w.t()) / temperature[:, None].double()).log_softmax(-1)
        return log_p.gather(1, tokens[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)

    own = gradients(lambda h, w: score_rows(h, w, tokens, temperature, ops), torch.float32)
    for got, exact in zip(own, gradients(dense, torch.float64), strict=True):
        assert torch.allclose(got.double(), exact, atol=1e-4, rtol=1e-4)


def test_a_row_alone_has_the_bits_it_has_among_others():
    """L5: a long row's normalizer, two threads; torch's own sum differs (the control)."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    generator, differ = torch.Generator().manual_seed(0), 0
    try:
        for _ in range(60):
            scaled = torch.randn(4, 151_936, generator=generator)
            together = normalizer(scaled)
            alone = torch.cat([normalizer(row.unsqueeze(0)) for row in scaled])
            assert torch.equal(alone, together)
            plain = torch.cat([row.unsqueeze(0).logsumexp(-1) for row in scaled])
            differ += int((plain != together).sum())
    finally:
        torch.set_num_threads(before)
    assert differ > 0
