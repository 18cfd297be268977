"""Policy losses per token. Shapes: T = response tokens of a micro-batch, laid flat.

Every loss has the signature

    loss(logprobs[T], old_logprobs[T], advantages[T], sequence_index[T], *, ...) -> TokenLoss

`logprobs` carries the gradient; `old_logprobs` is what the policy that sampled the token gave it;
`advantages` is the sequence's advantage at each of its tokens; `sequence_index` says which
sequence a token belongs to, for losses with a ratio per sequence. Nothing is summed here: the
learner weighs each token by `token_weights` (aggregation.py), computed over the whole minibatch,
so that micro-batches simply add up. Inputs are not modified.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0


class TokenLoss(NamedTuple):
    """A loss and its detached metrics, each `[T]`; the learner averages metrics over tokens."""

    loss: Tensor
    metrics: dict[str, Tensor]


def clip(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    sequence_index: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> TokenLoss:
    """L = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = exp(logprob - old_logprob).

    Clipped surrogate of Schulman et al. 2017 (PPO), arXiv:1707.06347, eq. 7; a higher upper bound
    is the "clip-higher" of Yu et al. 2025 (DAPO), arXiv:2503.14476. With `dual_clip` c > 1 the
    loss of a token with A < 0 is min(L, -c A), so that one token whose ratio exploded cannot
    dominate: Ye et al. 2020, arXiv:1912.09729, eq. 7. log r is clamped to +-20.

    Exactly on-policy r is exactly 1, the loss is -A, and its gradient -A grad(logprob).
    """
    if clip_low < 0 or clip_low >= 1:
        raise ValueError(f"clip_low must lie in [0, 1), got {clip_low}")
    if clip_high < 0:
        raise ValueError(f"clip_high must be at least 0, got {clip_high}")
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"dual_clip must be greater than 1 or None, got {dual_clip}")

    log_ratio = _log_ratio(logprobs, old_logprobs)
    ratio = log_ratio.exp()
    free = -ratio * advantages
    clipped = -ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    loss = torch.maximum(free, clipped)
    metrics = {
        "actor/pg_clipfrac": (clipped > free).to(loss.dtype),
        "actor/ppo_kl": -log_ratio.detach(),
    }
    if dual_clip is not None:
        ceiling = -dual_clip * advantages
        capped = (advantages < 0) & (loss > ceiling)
        metrics["actor/pg_clipfrac_lower"] = capped.to(loss.dtype)
        loss = torch.where(advantages < 0, torch.minimum(loss, ceiling), loss)
    return TokenLoss(loss, metrics)


def reinforce(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    sequence_index: Tensor,
) -> TokenLoss:
    """L = -A logprob. Williams 1992, "Simple Statistical Gradient-Following Algorithms".

    Unbiased only for tokens of the very policy being updated: one optimizer step per batch.
    """
    metrics = {"actor/ppo_kl": -_log_ratio(logprobs, old_logprobs).detach()}
    return TokenLoss(-advantages * logprobs, metrics)


def sft(
    logprobs: Tensor,
    old_logprobs: Tensor | None = None,
    advantages: Tensor | None = None,
    sequence_index: Tensor | None = None,
) -> TokenLoss:
    """L = -logprob: maximum likelihood of demonstrations. Only `logprobs` is read."""
    return TokenLoss(-logprobs, {})


def _log_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    return (logprobs - old_logprobs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
