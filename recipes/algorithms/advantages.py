"""Advantages: what a sample's reward is worth beside the other samples of its prompt.

All functions are pure NumPy and share one contract:

- `rewards[N]`: one number per rollout; `None` where nothing could be scored. A sample without a
  reward is left out of its group's baseline and gets advantage 0.
- `group_index[N]`: the prompt each rollout belongs to (`RolloutBatch.prompt_index`), any integers.
- `lengths[N]`: tokens of each rollout. Most have one advantage for all tokens of a rollout and do
  not read it.
- The result is `float32[N]`, one per rollout, or `float32[lengths.sum()]`, one per token, rollouts
  end to end; computed in float64, finite. Where there is a group baseline, a group whose scored
  rewards are all equal gets exactly 0: it has nothing to teach, and rounding must not be amplified
  by 1/std.
- `ValueError` naming the sample for a NaN or infinite reward, for a wrong shape, and for a group
  of a single rollout, which no group baseline can judge.

With a critic the advantage of a token comes from `gae`, which has a signature of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Rewards: TypeAlias = Sequence[float | None] | NDArray[np.floating]
Lengths: TypeAlias = NDArray[np.integer] | None
AdvantageFunction: TypeAlias = Callable[
    [Rewards, NDArray[np.integer], Lengths], NDArray[np.float32]
]

STD_EPSILON = 1e-4
WHITEN_EPSILON = 1e-8


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


def grpo_advantages(
    rewards: Rewards, group_index: NDArray[np.integer], lengths: Lengths = None
) -> NDArray[np.float32]:
    """A = (R - mean_G) / (std_G + 1e-4), std with one degree of freedom taken.

    Group-relative advantage of Shao et al. 2024, "DeepSeekMath", arXiv:2402.03300, section 4.1.
    """
    table = _judgeable(rewards, group_index)
    return _finish(table, (table.values - _of(table, "mean")) / (_of(table, "std") + STD_EPSILON))


def dr_grpo_advantages(
    rewards: Rewards, group_index: NDArray[np.integer], lengths: Lengths = None
) -> NDArray[np.float32]:
    """A = R - mean_G: no division by the standard deviation.

    Dividing by std weighs easy and hard prompts more than middling ones; Liu et al. 2025,
    "Understanding R1-Zero-Like Training", arXiv:2503.20783, section 3.
    """
    table = _judgeable(rewards, group_index)
    return _finish(table, table.values - _of(table, "mean"))


def rloo_advantages(
    rewards: Rewards, group_index: NDArray[np.integer], lengths: Lengths = None
) -> NDArray[np.float32]:
    """A = (R - mean_G) * G / (G - 1): the reward less the mean of the *other* samples.

    G counts the samples that have a reward. Leave-one-out baseline of Kool et al. 2019, "Buy 4
    REINFORCE Samples, Get a Baseline for Free!"; Ahmadian et al. 2024, arXiv:2402.14740.
    """
    table = _judgeable(rewards, group_index)
    scored = _of(table, "scored")
    others = np.maximum(scored - 1, 1)
    return _finish(table, (table.values - _of(table, "mean")) * scored / others)


def reinforce_pp_advantages(
    rewards: Rewards,
    group_index: NDArray[np.integer],
    lengths: Lengths = None,
    *,
    gamma: float = 1.0,
    baseline: bool = False,
) -> NDArray[np.float32]:
    """Per token: the discounted return to go, whitened over all tokens of the batch.

    The reward is that of the last token: G_t = gamma^(n - 1 - t) R for token t of n; then
    A_t = (G_t - mean) / std, std with one degree of freedom taken. With `baseline` R - mean_G
    stands for R. Hu et al. 2025, "REINFORCE++", arXiv:2501.03262, section 3. A rollout without a
    reward gets 0 and is not counted; a batch whose returns are all equal gets 0 everywhere.
    """
    if lengths is None:
        raise ValueError("reinforce_pp has an advantage per token and needs lengths[N]")
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma must lie in [0, 1], got {gamma}")
    if baseline:
        table = _judgeable(rewards, group_index)
        values = table.values - _of(table, "mean")
    else:
        values = group_rewards(rewards, group_index).values
    counts = np.asarray(lengths, dtype=np.int64)
    if counts.shape != values.shape:
        raise ValueError(f"lengths has shape {counts.shape}, but there are {len(values)} rewards")
    to_go = [gamma ** np.arange(n - 1, -1, -1.0) * r for r, n in zip(values, counts, strict=True)]
    return whiten(np.concatenate([np.empty(0), *to_go]))


def whiten(values: NDArray[np.float64]) -> NDArray[np.float32]:
    """(x - mean) / std over what is not NaN, `float32` of the same shape; NaN becomes 0.

    std with one degree of freedom taken. All 0 if the values are all equal or fewer than two.
    """
    scored = values[~np.isnan(values)]
    if len(scored) < 2 or scored.min() == scored.max():
        return np.zeros(values.shape, dtype=np.float32)
    white = (values - scored.mean()) / (scored.std(ddof=1) + WHITEN_EPSILON)
    return np.where(np.isnan(values), 0.0, white).astype(np.float32)


class TokenAdvantages(NamedTuple):
    """Of `gae`, flat: `advantages float32[T]`, not whitened, and `returns float32[T]`, what the
    critic is to predict."""

    advantages: NDArray[np.float32]
    returns: NDArray[np.float32]


def gae(
    rewards: NDArray[np.floating],
    values: NDArray[np.floating],
    lengths: NDArray[np.integer],
    mask: NDArray[np.bool_] | None = None,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> TokenAdvantages:
    """Generalized advantage estimation, Schulman et al. 2016, arXiv:1506.02438, eq. 16.

    delta_t = r_t + gamma V_{t+1} - V_t;  A_t = delta_t + gamma lam A_{t+1};  return_t = A_t + V_t,
    with V and A 0 after the last token of a rollout.

    rewards, values `[T]`: of each token, rollouts end to end; lengths `[N]` sums to T. mask
    `bool[T]`: False at tokens that the policy did not choose (a tool's answer). They are passed
    over: V and A of the next chosen token are carried to the one before, their own are 0, and a
    reward that lies on one is the chosen token's before it.
    """
    reward, value = np.asarray(rewards, np.float64), np.asarray(values, np.float64)
    counts = np.asarray(lengths, dtype=np.int64)
    chosen = np.ones(reward.shape, np.bool_) if mask is None else np.asarray(mask, np.bool_)
    if not reward.shape == value.shape == chosen.shape == (int(counts.sum()),):
        raise ValueError(
            f"rewards {reward.shape}, values {value.shape} and mask {chosen.shape} must have one "
            f"entry for each of the {int(counts.sum())} tokens"
        )
    for name, factor in (("gamma", gamma), ("lam", lam)):
        if not 0 <= factor <= 1:
            raise ValueError(f"{name} must lie in [0, 1], got {factor}")
    for name, column in (("reward", reward), ("value", value)):
        if not np.isfinite(column).all():
            token = int(np.flatnonzero(~np.isfinite(column))[0])
            raise ValueError(f"the {name} of token {token} is {column[token]}; it must be finite")
    advantages = np.zeros(len(reward))
    end = 0
    for count in counts:
        start, end = end, end + int(count)
        next_value = next_advantage = pending = 0.0
        for t in range(end - 1, start - 1, -1):
            pending += reward[t]
            if not chosen[t]:
                continue
            delta = pending + gamma * next_value - value[t]
            advantages[t] = delta + gamma * lam * next_advantage
            next_value, next_advantage, pending = value[t], advantages[t], 0.0
    returns = np.where(chosen, advantages + value, 0.0)
    return TokenAdvantages(advantages.astype(np.float32), returns.astype(np.float32))


ADVANTAGES: dict[str, AdvantageFunction] = {
    "grpo": grpo_advantages,
    "dr_grpo": dr_grpo_advantages,
    "rloo": rloo_advantages,
    "reinforce_pp": reinforce_pp_advantages,
    "reinforce_pp_baseline": partial(reinforce_pp_advantages, baseline=True),
}


def frac_reward_zero_std(rewards: Rewards, group_index: NDArray[np.integer]) -> float:
    """Fraction of groups whose scored rewards are all equal: prompts that taught nothing."""
    table = group_rewards(rewards, group_index)
    return float(table.uniform.mean()) if len(table.uniform) else 0.0


def teaching_groups(
    rewards: Rewards, group_index: NDArray[np.integer]
) -> NDArray[np.bool_]:
    """Which rollouts are of a group whose scored rewards differ, `bool[N]`: dynamic sampling keeps
    these and replaces the others. Yu et al. 2025 (DAPO), arXiv:2503.14476, eq. 11."""
    table = group_rewards(rewards, group_index)
    return ~table.uniform[table.group]


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
