"""Log-probabilities: the one function that trainer and engine both call.

logprob(token) = logits[token] / T - logsumexp(logits / T), in fp32, a row at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rollout.model.fusion import matmul_rows

ROWS_PER_CHUNK = 256
"""Rows of logits held at a time while scoring; their number does not change any bit."""


def tempered(logits: Tensor, temperature: Tensor) -> Tensor:
    """fp32 logits `[rows, vocab]` divided by `temperature` `[rows]`."""
    return logits.float() / temperature.unsqueeze(1)


def normalizer(scaled: Tensor) -> Tensor:
    """log Σ exp of each row of `scaled` `[rows, vocab]` -> `[rows]`.

    A row's bits do not depend on the others: torch splits a single long row between threads,
    which changes the order of its sum, and never one of several rows; so one row becomes two.
    """
    if scaled.shape[0] == 1:
        return scaled.expand(2, -1).logsumexp(-1)[:1]
    return scaled.logsumexp(-1)


def gather_logprobs(scaled: Tensor, log_normalizer: Tensor, token_ids: Tensor) -> Tensor:
    """Log-probability `[rows]` of one token a row, given its tempered logits and normalizer."""
    return scaled.gather(1, token_ids.unsqueeze(1)).squeeze(1) - log_normalizer


class _ScoreRows(torch.autograd.Function):
    """hidden, output weight -> log-probs and entropies, a chunk of rows at a time.

    Logits are recomputed in backward: no more than `ROWS_PER_CHUNK` rows of them ever exist.
    With p = softmax(z), z = logits / T and H the entropy:
    d logprob / dz = onehot - p;  dH / dz = -p (log p + H);  d logits = dz / T.
    """

    @staticmethod
    def forward(ctx, hidden, weight, token_ids, temperature):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(hidden, weight, token_ids, temperature)
        logprobs = hidden.new_empty(hidden.shape[0], dtype=torch.float32)
        entropies = torch.empty_like(logprobs)
        for rows in _chunks(hidden.shape[0]):
            scaled = tempered(matmul_rows(hidden[rows], weight), temperature[rows])
            log_normalizer = normalizer(scaled)
            logprobs[rows] = gather_logprobs(scaled, log_normalizer, token_ids[rows])
            log_p = scaled - log_normalizer.unsqueeze(1)
            entropies[rows] = -(log_p.exp() * log_p).sum(-1)
        return logprobs, entropies

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropies):  # type: ignore[no-untyped-def]
        hidden, weight, token_ids, temperature = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        use_entropy = bool(grad_entropies.any())
        for rows in _chunks(hidden.shape[0]):
            scaled = tempered(matmul_rows(hidden[rows], weight), temperature[rows])
            log_p = scaled - normalizer(scaled).unsqueeze(1)
            p = log_p.exp()
            grad = p * -grad_logprobs[rows].unsqueeze(1)
            grad.scatter_add_(1, token_ids[rows].unsqueeze(1), grad_logprobs[rows].unsqueeze(1))
            if use_entropy:
                entropy = -(p * log_p).sum(-1, keepdim=True)
                grad -= p * (log_p + entropy) * grad_entropies[rows].unsqueeze(1)
            grad = (grad / temperature[rows].unsqueeze(1)).to(weight.dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = grad @ weight
            if grad_weight is not None:
                grad_weight.addmm_(grad.t(), hidden[rows])
        return grad_hidden, grad_weight, None, None


def _chunks(rows: int) -> list[slice]:
    return [slice(i, min(i + ROWS_PER_CHUNK, rows)) for i in range(0, rows, ROWS_PER_CHUNK)]


def score_rows(
    hidden: Tensor, output_weight: Tensor, token_ids: Tensor, temperature: Tensor
) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy (nats) of one token per row, differentiable in the first two.

    hidden `[rows, hidden_size]`, output_weight `[vocab, hidden_size]`, token_ids int64 `[rows]`,
    temperature fp32 `[rows]`, all > 0. Returns two fp32 tensors `[rows]`. The log-probs are bit
    for bit those the engine returned for these rows.
    """
    logprobs, entropies = _ScoreRows.apply(hidden, output_weight, token_ids, temperature)
    return logprobs, entropies
