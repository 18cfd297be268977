"""Advantages, policy losses, aggregation and KL estimators as pure functions; presets by name."""

from recipes.algorithms.advantages import (
    ADVANTAGES,
    dr_grpo_advantages,
    frac_reward_zero_std,
    group_rewards,
    grpo_advantages,
    reward_array,
    rloo_advantages,
)
from recipes.algorithms.aggregation import AGGREGATIONS, Aggregation, token_weights
from recipes.algorithms.kl import KL_ESTIMATORS, k1, k2, k3
from recipes.algorithms.policy_losses import TokenLoss, clip, reinforce, sft

__all__ = [
    "ADVANTAGES",
    "AGGREGATIONS",
    "KL_ESTIMATORS",
    "Aggregation",
    "TokenLoss",
    "clip",
    "dr_grpo_advantages",
    "frac_reward_zero_std",
    "group_rewards",
    "grpo_advantages",
    "k1",
    "k2",
    "k3",
    "reinforce",
    "reward_array",
    "rloo_advantages",
    "sft",
    "token_weights",
]
