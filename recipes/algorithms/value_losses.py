"""The critic's loss per token, and how well it predicts. Shapes: T = tokens the policy chose."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recipes.algorithms.policy_losses import TokenLoss


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, *, clip_range: float | None = 0.5
) -> TokenLoss:
    """L = 1/2 max((V - R)^2, (V_old + clip(V - V_old, -c, c) - R)^2), each `[T]`.

    `values` carries the gradient; `old_values` are the critic's before the update, which `gae`
    used; c is `clip_range`, None for the plain squared error. Schulman's PPO implementation
    (openai/baselines, ppo2), item 9 of Huang et al. 2022, "The 37 Implementation Details of PPO".
    """
    if clip_range is None:
        return TokenLoss((values - returns).square() / 2, {})
    if not clip_range > 0:
        raise ValueError(f"clip_range must be positive or None, got {clip_range}")
    near = old_values + (values - old_values).clamp(-clip_range, clip_range)
    free, clipped = (values - returns).square(), (near - returns).square()
    metrics = {"critic/vf_clipfrac": (clipped > free).to(values.dtype)}
    return TokenLoss(torch.maximum(free, clipped) / 2, metrics)


def explained_variance(values: NDArray[np.floating], returns: NDArray[np.floating]) -> float:
    """1 - Var(R - V) / Var(R): 1 for a perfect critic, 0 for a constant one.

    NaN if the returns are all equal.
    """
    target = np.asarray(returns, dtype=np.float64)
    variance = float(target.var()) if len(target) else 0.0
    if variance == 0:
        return float("nan")
    return 1.0 - float((target - np.asarray(values, dtype=np.float64)).var()) / variance
