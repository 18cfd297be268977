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

from collections.abc import Callable
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
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"dual_clip must be greater than 1 or None, got {dual_clip}")
    log_ratio = log_ratio_of(logprobs, old_logprobs)
    loss, metrics = _clipped_surrogate(log_ratio.exp(), advantages, clip_low, clip_high)
    metrics["actor/ppo_kl"] = -log_ratio.detach()
    if dual_clip is not None:
        ceiling = -dual_clip * advantages
        capped = (advantages < 0) & (loss > ceiling)
        metrics["actor/pg_clipfrac_lower"] = capped.to(loss.dtype)
        loss = torch.where(advantages < 0, torch.minimum(loss, ceiling), loss)
    return TokenLoss(loss, metrics)


def gspo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    sequence_index: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> TokenLoss:
    """The clipped surrogate with one ratio per sequence, s = exp(mean over its tokens of log r).

    Zheng et al. 2025, "Group Sequence Policy Optimization", arXiv:2507.18071, in its token form
    (GSPO-token, section 4.3): every token's ratio is sg(s) * p / sg(p) with p its probability, so
    its value is s and its gradient s grad(logprob). With equal weights within a sequence
    (`seq_mean_token_mean`) the gradient is that of the sequence form. The default bounds
    are the paper's: s lies far closer to 1 than the ratio of one token.

    All tokens of a sequence must be in one call, as the learner's micro-batches have them.
    """
    log_ratio = log_ratio_of(logprobs, old_logprobs)
    of_sequence = sequence_mean(log_ratio.detach(), sequence_index)
    ratio = (of_sequence + (logprobs - logprobs.detach())).exp()
    loss, metrics = _clipped_surrogate(ratio, advantages, clip_low, clip_high)
    return TokenLoss(loss, {**metrics, "actor/ppo_kl": -log_ratio.detach()})


def cispo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    sequence_index: Tensor,
    *,
    ratio_max: float = 5.0,
) -> TokenLoss:
    """L = -sg(min(r, ratio_max)) A logprob: the weight is bounded, no token loses its gradient.

    MiniMax 2025, "MiniMax-M1", arXiv:2506.13585, section 3.1; no lower bound, as there;
    `ratio_max` (epsilon_high elsewhere) bounds r itself: 5 in Khatri et al. 2025, "The Art of
    Scaling Reinforcement Learning Compute for LLMs", arXiv:2510.13786.
    """
    if not ratio_max > 0:
        raise ValueError(f"ratio_max must be positive, got {ratio_max}")
    log_ratio = log_ratio_of(logprobs, old_logprobs).detach()
    ratio = log_ratio.exp()
    metrics = {
        "actor/pg_clipfrac": ((ratio > ratio_max) & (advantages > 0)).to(ratio.dtype),
        "actor/ppo_kl": -log_ratio,
    }
    return TokenLoss(-ratio.clamp(max=ratio_max) * advantages * logprobs, metrics)


def sapo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    sequence_index: Tensor,
    *,
    temperature_positive: float = 1.0,
    temperature_negative: float = 1.05,
) -> TokenLoss:
    """L = -4/t sigmoid(t (r - 1)) A: a gate that closes smoothly where `clip` cuts off.

    Gao et al. 2025, "Soft Adaptive Policy Optimization", arXiv:2511.20347; t is
    `temperature_positive` for A > 0 and `temperature_negative` otherwise. At r = 1 the gradient
    is that of `clip`, -A grad(logprob); the loss itself is -2 A / t there.
    """
    for name, value in (("positive", temperature_positive), ("negative", temperature_negative)):
        if not value > 0:
            raise ValueError(f"temperature_{name} must be positive, got {value}")
    log_ratio = log_ratio_of(logprobs, old_logprobs)
    temperature = torch.where(advantages > 0, temperature_positive, temperature_negative)
    gate = torch.sigmoid(temperature * (log_ratio.exp() - 1)) * 4 / temperature
    return TokenLoss(-gate * advantages, {"actor/ppo_kl": -log_ratio.detach()})


def reinforce(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    sequence_index: Tensor,
) -> TokenLoss:
    """L = -A logprob. Williams 1992, "Simple Statistical Gradient-Following Algorithms".

    Unbiased only for tokens of the very policy being updated: one optimizer step per batch.
    """
    metrics = {"actor/ppo_kl": -log_ratio_of(logprobs, old_logprobs).detach()}
    return TokenLoss(-advantages * logprobs, metrics)


def sft(
    logprobs: Tensor,
    old_logprobs: Tensor | None = None,
    advantages: Tensor | None = None,
    sequence_index: Tensor | None = None,
) -> TokenLoss:
    """L = -logprob: maximum likelihood of demonstrations. Only `logprobs` is read."""
    return TokenLoss(-logprobs, {})


POLICY_LOSSES: dict[str, Callable[..., TokenLoss]] = {
    "clip": clip,
    "gspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
    "reinforce": reinforce,
}


def _clipped_surrogate(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), and where the bound took hold."""
    if clip_low < 0 or clip_low >= 1:
        raise ValueError(f"clip_low must lie in [0, 1), got {clip_low}")
    if clip_high < 0:
        raise ValueError(f"clip_high must be at least 0, got {clip_high}")
    free = -ratio * advantages
    clipped = -ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    loss = torch.maximum(free, clipped)
    return loss, {"actor/pg_clipfrac": (clipped > free).to(loss.dtype)}


def sequence_mean(values: Tensor, sequence_index: Tensor) -> Tensor:
    """The mean over each token's sequence, at every token `[T]`; summed in float64."""
    _, place, counts = torch.unique(sequence_index, return_inverse=True, return_counts=True)
    sums = torch.zeros(len(counts), dtype=torch.float64, device=values.device)
    sums.index_add_(0, place, values.double())
    means: Tensor = (sums / counts)[place]
    return means.to(values.dtype)


def log_ratio_of(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """log r `[T]`, clamped to +-20."""
    return (logprobs - old_logprobs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
