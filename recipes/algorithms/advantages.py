"""Advantages: what a sample's reward is worth beside the other samples of its prompt.

All functions are pure NumPy and share one contract:

- `rewards[N]`: one number per rollout; `None` where nothing could be scored. A sample without a
  reward is left out of its group's baseline and gets advantage 0.
- `group_index[N]`: the prompt each rollout belongs to (`RolloutBatch.prompt_index`), any integers.
- The result is `float32[N]`, computed in float64, finite. A group whose scored rewards are all
  equal gets exactly 0: it has nothing to teach, and rounding must not be amplified by 1/std.
- `ValueError` naming the sample for a NaN or infinite reward, for a wrong shape, and for a group
  of a single rollout, which no group baseline can judge.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Rewards: TypeAlias = Sequence[float | None] | NDArray[np.floating]
AdvantageFunction: TypeAlias = Callable[[Rewards, NDArray[np.integer]], NDArray[np.float32]]

STD_EPSILON = 1e-4


class GroupedRewards(NamedTuple):
    """Validated rewards, with the statistics of the group of every sample beside it.

    `values` is NaN where a sample has no reward; `group[N]` numbers the groups 0..G-1; `mean`,
    `std` (one degree of freedom taken, as `torch.std`), `scored` (samples with a reward) and
    `uniform` (all scored rewards equal, or fewer than two) are `[G]`.
    """

    values: NDArray[np.float64]
    group: NDArray[np.intp]
    mean: NDArray[np.float64]
    std: NDArray[np.float64]
    scored: NDArray[np.int64]
    uniform: NDArray[np.bool_]


def reward_array(rewards: Rewards) -> NDArray[np.float64]:
    """`rewards` as float64[N] with NaN for None. ValueError naming a sample that is not finite."""
    if isinstance(rewards, np.ndarray) and rewards.ndim != 1:
        raise ValueError(f"rewards must have one dimension [rollouts], got shape {rewards.shape}")
    values = np.full(len(rewards), np.nan)
    for sample, reward in enumerate(rewards):
        if reward is None:
            continue
        try:
            values[sample] = float(reward)
        except (TypeError, ValueError):
            raise ValueError(
                f"reward of sample {sample} must be a number or None, got {reward!r}"
            ) from None
        if not np.isfinite(values[sample]):
            raise ValueError(f"reward of sample {sample} is {values[sample]}; it must be finite")
    return values


def group_rewards(rewards: Rewards, group_index: NDArray[np.integer]) -> GroupedRewards:
    """Validate rewards and take the statistics of each group. Groups may have any sizes."""
    values = reward_array(rewards)
    index = np.asarray(group_index)
    if index.shape != values.shape:
        raise ValueError(
            f"group_index has shape {index.shape}, but there are {len(values)} rewards"
        )
    _, group = np.unique(index, return_inverse=True)
    num_groups = int(group.max()) + 1 if len(group) else 0
    mean, std = np.zeros(num_groups), np.zeros(num_groups)
    scored = np.zeros(num_groups, dtype=np.int64)
    uniform = np.ones(num_groups, dtype=np.bool_)
    has_reward = ~np.isnan(values)
    for g in range(num_groups):
        members = values[(group == g) & has_reward]
        scored[g] = len(members)
        if len(members) == 0:
            continue
        mean[g] = members.mean()
        uniform[g] = members.min() == members.max()
        if not uniform[g]:
            std[g] = members.std(ddof=1)
    return GroupedRewards(values, group, mean, std, scored, uniform)


def grpo_advantages(rewards: Rewards, group_index: NDArray[np.integer]) -> NDArray[np.float32]:
    """A = (R - mean_G) / (std_G + 1e-4), std with one degree of freedom taken.

    Group-relative advantage of Shao et al. 2024, "DeepSeekMath", arXiv:2402.03300, section 4.1.
    """
    table = _judgeable(rewards, group_index)
    return _finish(table, (table.values - _of(table, "mean")) / (_of(table, "std") + STD_EPSILON))


def dr_grpo_advantages(rewards: Rewards, group_index: NDArray[np.integer]) -> NDArray[np.float32]:
    """A = R - mean_G: no division by the standard deviation.

    Dividing by std weighs easy and hard prompts more than middling ones; Liu et al. 2025,
    "Understanding R1-Zero-Like Training", arXiv:2503.20783, section 3.
    """
    table = _judgeable(rewards, group_index)
    return _finish(table, table.values - _of(table, "mean"))


def rloo_advantages(rewards: Rewards, group_index: NDArray[np.integer]) -> NDArray[np.float32]:
    """A = (R - mean_G) * G / (G - 1): the reward less the mean of the *other* samples.

    G counts the samples that have a reward. Leave-one-out baseline of Kool et al. 2019, "Buy 4
    REINFORCE Samples, Get a Baseline for Free!"; Ahmadian et al. 2024, arXiv:2402.14740.
    """
    table = _judgeable(rewards, group_index)
    scored = _of(table, "scored")
    others = np.maximum(scored - 1, 1)
    return _finish(table, (table.values - _of(table, "mean")) * scored / others)


ADVANTAGES: dict[str, AdvantageFunction] = {
    "grpo": grpo_advantages,
    "dr_grpo": dr_grpo_advantages,
    "rloo": rloo_advantages,
}


def frac_reward_zero_std(rewards: Rewards, group_index: NDArray[np.integer]) -> float:
    """Fraction of groups whose scored rewards are all equal: prompts that taught nothing."""
    table = group_rewards(rewards, group_index)
    return float(table.uniform.mean()) if len(table.uniform) else 0.0


def _judgeable(rewards: Rewards, group_index: NDArray[np.integer]) -> GroupedRewards:
    table = group_rewards(rewards, group_index)
    lone = np.flatnonzero(np.bincount(table.group, minlength=len(table.mean)) == 1)
    if len(lone):
        sample = int(np.flatnonzero(table.group == lone[0])[0])
        raise ValueError(
            f"sample {sample} is alone in group {int(np.asarray(group_index)[sample])}; "
            "a group baseline needs at least 2 samples of each prompt (set n >= 2)"
        )
    return table


def _of(table: GroupedRewards, statistic: str) -> NDArray[np.float64]:
    """A group statistic spread to its samples, [N]."""
    spread: NDArray[np.float64] = getattr(table, statistic)[table.group].astype(np.float64)
    return spread


def _finish(table: GroupedRewards, advantages: NDArray[np.float64]) -> NDArray[np.float32]:
    teaches = ~np.isnan(table.values) & ~table.uniform[table.group]
    return np.where(teaches, advantages, 0.0).astype(np.float32)
