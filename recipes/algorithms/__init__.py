"""Advantages, policy losses, aggregation and KL estimators as pure functions; presets by name."""

from recipes.algorithms.advantages import (
    ADVANTAGES,
    dr_grpo_advantages,
    frac_reward_zero_std,
    gae,
    group_rewards,
    grpo_advantages,
    reinforce_pp_advantages,
    reward_array,
    rloo_advantages,
    teaching_groups,
)
from recipes.algorithms.aggregation import AGGREGATIONS, Aggregation, token_weights
from recipes.algorithms.corrections import CORRECTIONS
from recipes.algorithms.kl import KL_ESTIMATORS, adaptive_coefficient, k1, k2, k3, kl_penalty
from recipes.algorithms.overlong import overlong_penalty
from recipes.algorithms.policy_losses import (
    POLICY_LOSSES,
    TokenLoss,
    cispo,
    clip,
    gspo,
    reinforce,
    sapo,
    sft,
)
from recipes.algorithms.value_losses import clipped_value_loss, explained_variance

__all__ = [
    "ADVANTAGES",
    "AGGREGATIONS",
    "CORRECTIONS",
    "KL_ESTIMATORS",
    "POLICY_LOSSES",
    "Aggregation",
    "TokenLoss",
    "adaptive_coefficient",
    "cispo",
    "clip",
    "clipped_value_loss",
    "dr_grpo_advantages",
    "explained_variance",
    "frac_reward_zero_std",
    "gae",
    "group_rewards",
    "grpo_advantages",
    "gspo",
    "k1",
    "k2",
    "k3",
    "kl_penalty",
    "overlong_penalty",
    "reinforce",
    "reinforce_pp_advantages",
    "reward_array",
    "rloo_advantages",
    "sapo",
    "sft",
    "teaching_groups",
    "token_weights",
]
