"""Estimators of KL(policy || reference) from sampled tokens, per token `[T]`, with gradient.

Schulman, "Approximating KL Divergence", 2020. With d = logprob - reference_logprob of a token
sampled from the policy: k1 is unbiased and noisy, k2 biased and never negative, k3 unbiased and
never negative. d is clamped to +-20 and the result to +-10, so one freak token stays harmless.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor

from recipes.algorithms.policy_losses import TokenLoss

KLEstimator: TypeAlias = Callable[[Tensor, Tensor], Tensor]

LOG_RATIO_BOUND = 20.0
KL_BOUND = 10.0


def k1(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """d"""
    return _bounded(_difference(logprobs, reference_logprobs))


def k2(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """d^2 / 2"""
    return _bounded(_difference(logprobs, reference_logprobs).square() / 2)


def k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """exp(-d) - 1 + d"""
    difference = _difference(logprobs, reference_logprobs)
    return _bounded((-difference).exp() - 1 + difference)


KL_ESTIMATORS: dict[str, KLEstimator] = {"k1": k1, "k2": k2, "k3": k3}


def kl_penalty(
    logprobs: Tensor,
    reference_logprobs: Tensor,
    *,
    coefficient: float,
    estimator: KLEstimator = k3,
) -> TokenLoss:
    """coefficient * KL, added to the policy's loss of each token: GRPO's beta, Shao et al. 2024,
    arXiv:2402.03300, eq. 3 and 4."""
    kl = estimator(logprobs, reference_logprobs)
    return TokenLoss(coefficient * kl, {"kl": kl.detach()})


def adaptive_coefficient(
    coefficient: float, kl: float, num_samples: int, *, target: float, horizon: int
) -> float:
    """The next coefficient of a KL penalty that is steered to `target` nats.

    beta (1 + clip(kl / target - 1, -0.2, 0.2) num_samples / horizon), Ziegler et al. 2019,
    "Fine-Tuning Language Models from Human Preferences", arXiv:1909.08593, section 2.2.
    """
    if not target > 0:
        raise ValueError(f"target must be positive, got {target}")
    if horizon < num_samples:
        raise ValueError(f"horizon must be at least num_samples ({num_samples}), got {horizon}")
    error = min(max(kl / target - 1.0, -0.2), 0.2)
    return coefficient * (1.0 + error * num_samples / horizon)


def _difference(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    return (logprobs - reference_logprobs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def _bounded(kl: Tensor) -> Tensor:
    return kl.clamp(-KL_BOUND, KL_BOUND)
