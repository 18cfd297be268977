"""The numbers of one step that come from its rollouts and rewards."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recipes.algorithms.advantages import group_rewards
from recipes.rewards import RewardTable
from rollout import RolloutBatch


class StepClock:
    """Laps of one step, reported as `timing_s/<lap>` and `timing_s/step`."""

    def __init__(self) -> None:
        self._started = self._last = time.monotonic()
        self._laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """End the lap `name`, or one more of that name."""
        now = time.monotonic()
        self._laps[name] = self.seconds(name) + now - self._last
        self._last = now

    def seconds(self, name: str) -> float:
        """Of all laps of that name together."""
        return self._laps.get(name, 0.0)

    def skip(self) -> None:
        """What passed since the last lap belongs to none and does not count."""
        idle = time.monotonic() - self._last
        self._last += idle
        self._started += idle

    def metrics(self) -> dict[str, float]:
        total = self._last - self._started
        timings = {f"timing_s/{name}": seconds for name, seconds in self._laps.items()}
        return {**timings, "timing_s/step": total, "step_time": total}


def reward_metrics(rewards: RewardTable, group_index: NDArray[np.integer]) -> dict[str, float]:
    """`reward` (mean of scored samples), `reward_std` (mean over groups of the std within),
    `frac_reward_zero_std`, `rewards/unscored`, and the mean and std of each reward function."""
    table = group_rewards(rewards.total, group_index)
    scored = table.values[~np.isnan(table.values)]
    return {
        "reward": float(scored.mean()) if len(scored) else float("nan"),
        "reward_std": float(table.std.mean()) if len(table.std) else 0.0,
        "frac_reward_zero_std": float(table.uniform.mean()) if len(table.uniform) else 0.0,
        "rewards/unscored": float(np.isnan(table.values).sum()),
        **rewards.metrics(),
    }


def completion_metrics(
    lengths: NDArray[np.integer], finish_reasons: Sequence[str], rollout_seconds: float
) -> dict[str, float]:
    """Lengths in tokens, shares of samples by how they ended, tokens and tokens per second."""
    num_samples = max(len(finish_reasons), 1)
    num_tokens = int(np.sum(lengths))

    def share(*reasons: str) -> float:
        return sum(reason in reasons for reason in finish_reasons) / num_samples

    return {
        "completions/mean_length": float(np.mean(lengths)) if len(lengths) else 0.0,
        "completions/min_length": float(np.min(lengths)) if len(lengths) else 0.0,
        "completions/max_length": float(np.max(lengths)) if len(lengths) else 0.0,
        "completions/clipped_ratio": share("length"),
        "rollout/truncated_ratio": share("length"),
        "rollout/aborted_ratio": share("aborted"),
        "rollout/failed_ratio": share("rejected", "error"),
        "rollout/tokens_per_second": num_tokens / max(rollout_seconds, 1e-9),
        "num_tokens": float(num_tokens),
    }


def turn_metrics(batch: RolloutBatch) -> dict[str, float]:
    """How often the policy spoke per rollout; nothing where it spoke once everywhere."""
    turns = batch.num_turns
    if len(turns) == 0 or turns.max() <= 1:
        return {}
    return {"rollout/turns_mean": float(turns.mean()), "rollout/turns_max": float(turns.max())}


def version_metrics(batch: RolloutBatch) -> dict[str, float]:
    """The newest policy version that produced a token, and the most versions in one rollout."""
    if len(batch.spans) == 0:
        return {}
    rollout = np.repeat(np.arange(len(batch)), np.diff(batch.span_offsets))
    distinct = np.unique(np.stack((rollout, batch.spans[:, 0])), axis=1)
    return {
        "rollout/policy_version": float(batch.spans[:, 0].max()),
        "rollout/version_spans_max": float(np.bincount(distinct[0]).max()),
    }


def versions_behind(batch: RolloutBatch, live_version: int) -> dict[str, float]:
    """How many publications lie between the oldest token and the weights it is about to train."""
    if len(batch.spans) == 0:
        return {}
    return {"rollout/versions_behind": float(live_version - batch.spans[:, 0].min())}


def engine_metrics(stats: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Of `RolloutPool.get_stats()`, over all engines since they started: the share of prompt
    tokens found in the prefix cache, and preemptions."""
    queries = sum(engine.get("prefix_query_tokens", 0) for engine in stats)
    hits = sum(engine.get("prefix_hit_tokens", 0) for engine in stats)
    return {
        "rollout/prefix_hit_rate": hits / queries if queries else 0.0,
        "rollout/preemptions": float(sum(engine.get("preemptions", 0) for engine in stats)),
    }
