"""Weights for tokens that an older policy sampled than the one that trains on them.

Every function is

    correction(proximal_logprobs[T], behaviour_logprobs[T], sequence_index[T], *, ...) -> weight[T]

with rho = exp(proximal - behaviour): `proximal` is what the trainer's weights say before the
step, `behaviour` what the weights said that sampled the token. The policy loss of a corrected
token takes `proximal` for its old log-prob and is multiplied by the weight, which carries no
gradient: the decoupled objective of Hilton et al. 2022, "Batch size-invariance for policy
optimization", arXiv:2110.00641, eq. 6; for asynchronous rollouts Fu et al. 2025 (AReaL),
arXiv:2505.24298.

A token of weight 0 still counts in the denominator of the aggregation.

The learner asks for a correction only where a token's version is not its own; where it is, rho
is 1 to the bit and the weight 1 without being computed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from recipes.algorithms.policy_losses import log_ratio_of, sequence_mean


def decoupled(proximal: Tensor, behaviour: Tensor, sequence_index: Tensor) -> Tensor:
    """rho, unbounded."""
    return log_ratio_of(proximal, behaviour).exp()


def tis(
    proximal: Tensor, behaviour: Tensor, sequence_index: Tensor, *, cap: float = 2.0
) -> Tensor:
    """min(rho, cap): truncated importance sampling, Ionides 2008; Yao et al. 2025."""
    if not cap > 0:
        raise ValueError(f"cap must be positive, got {cap}")
    return log_ratio_of(proximal, behaviour).exp().clamp(max=cap)


def mis(
    proximal: Tensor,
    behaviour: Tensor,
    sequence_index: Tensor,
    *,
    low: float = 0.5,
    high: float = 5.0,
) -> Tensor:
    """rho within [low, high], else 0: masked importance sampling, as IcePop of Ling Team
    2025, arXiv:2510.18855."""
    _check_range(low, high)
    ratio = log_ratio_of(proximal, behaviour).exp()
    return torch.where((ratio >= low) & (ratio <= high), ratio, 0.0)


def sequence_rejection(
    proximal: Tensor,
    behaviour: Tensor,
    sequence_index: Tensor,
    *,
    low: float = 0.99,
    high: float = 1.01,
) -> Tensor:
    """1 for every token of a sequence whose geometric mean of rho lies within [low, high], else 0.

    The length-normalized trust region of Liu et al. 2025, "When Speed Kills Stability".
    """
    _check_range(low, high)
    ratio = sequence_mean(log_ratio_of(proximal, behaviour), sequence_index).exp()
    return ((ratio >= low) & (ratio <= high)).to(ratio.dtype)


CORRECTIONS: dict[str, Callable[..., Tensor]] = {
    "decoupled": decoupled,
    "tis": tis,
    "mis": mis,
    "sequence_rejection": sequence_rejection,
}


def _check_range(low: float, high: float) -> None:
    if not 0 <= low <= 1 <= high:
        raise ValueError(f"[low, high] must contain 1 and lie above 0, got [{low}, {high}]")
