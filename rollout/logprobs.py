"""Log-probabilities of given tokens, differentiable: what the trainer calls.

logprob(token) = logits[token] / T - logsumexp(logits / T), in fp32, a row at a time, by the same
`Vocabulary` that the engine's sampler uses.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rollout.model.operators import Operators

ROWS_PER_CHUNK = 256
"""Rows of logits held at a time while scoring; their number does not change any bit."""


class _ScoreRows(torch.autograd.Function):
    """hidden, output weight -> log-probs and entropies, a chunk of rows at a time.

    Logits are recomputed in backward: no more than `ROWS_PER_CHUNK` rows of them ever exist.
    """

    @staticmethod
    def forward(ctx, hidden, weight, token_ids, temperature, ops):  # type: ignore[no-untyped-def]
        logprobs = hidden.new_empty(hidden.shape[0], dtype=torch.float32)
        entropies, normalizers = torch.empty_like(logprobs), torch.empty_like(logprobs)
        memory = _workspace(ops, hidden, weight)
        for rows in _chunks(hidden.shape[0]):
            logits, t = ops.matmul(hidden[rows], weight, out=memory), temperature[rows]
            lse, entropies[rows] = ops.vocabulary.log_normalizers(logits, t, entropy=True)
            logprobs[rows] = ops.vocabulary.gather(logits, t, token_ids[rows], lse)
            normalizers[rows] = lse
        ctx.save_for_backward(hidden, weight, token_ids, temperature, normalizers, entropies)
        ctx.ops = ops
        return logprobs, entropies

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropies):  # type: ignore[no-untyped-def]
        hidden, weight, token_ids, temperature, normalizers, entropies = ctx.saved_tensors
        ops = ctx.ops
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        use_entropy = bool(grad_entropies.any())
        memory = _workspace(ops, hidden, weight)
        for rows in _chunks(hidden.shape[0]):
            grad = ops.vocabulary.score_gradient(
                ops.matmul(hidden[rows], weight, out=memory), temperature[rows],
                token_ids[rows], normalizers[rows], entropies[rows], grad_logprobs[rows],
                grad_entropies[rows] if use_entropy else None,
            )  # fmt: skip
            if grad_hidden is not None:
                grad_hidden[rows] = grad @ weight
            if grad_weight is not None:
                grad_weight.addmm_(grad.t(), hidden[rows])
        return grad_hidden, grad_weight, None, None, None


def _workspace(ops: Operators, hidden: Tensor, weight: Tensor) -> Tensor | None:
    return ops.workspace(min(ROWS_PER_CHUNK, hidden.shape[0]), weight)


def _chunks(rows: int) -> list[slice]:
    return [slice(i, min(i + ROWS_PER_CHUNK, rows)) for i in range(0, rows, ROWS_PER_CHUNK)]


def score_rows(
    hidden: Tensor,
    output_weight: Tensor,
    token_ids: Tensor,
    temperature: Tensor,
    operators: Operators,
) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy (nats) of one token per row, differentiable in the first two.

    hidden `[rows, hidden_size]`, output_weight `[vocab, hidden_size]`, token_ids int64 `[rows]`,
    temperature fp32 `[rows]`, all > 0, operators: the model's. Returns two fp32 tensors `[rows]`.
    The log-probs are bit for bit those the engine returned for these rows.
    """
    logprobs, entropies = _ScoreRows.apply(
        hidden, output_weight, token_ids, temperature, operators
    )
    return logprobs, entropies
