"""What the recipes' sampling has in common: rollouts, their rewards, and the numbers of both."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from recipes.algorithms import overlong_penalty
from recipes.episodes import sample_rows
from recipes.recipe import Run
from recipes.rewards import RewardTable, score_rollouts
from recipes.step_metrics import (
    StepClock,
    completion_metrics,
    engine_metrics,
    reward_metrics,
    turn_metrics,
)
from rollout import RolloutBatch, SamplingParams
from trainer_bridge.token_columns import advantages_per_token


def sample_and_score(
    run: Run, rows: list[dict[str, Any]], seed: int, clock: StepClock
) -> tuple[RolloutBatch, RewardTable]:
    """`group_size` completions of each row's prompt, and what they earn."""
    config, tokenizer = run.config.rollout, run.colocation.tokenizer
    params = SamplingParams(
        n=config.group_size,
        temperature=config.temperature,
        max_tokens=config.max_tokens,
        seed=seed,
    )
    batch, earned = sample_rows(
        run.colocation.pool.run_batch, tokenizer, run.task, rows, params, config.max_turns
    )
    clock.lap("rollout")

    _, rewards = score_rollouts(run.task.rewards, tokenizer, rows, batch, earned)
    clock.lap("reward")
    return batch, rewards


def sampled_metrics(
    run: Run, batch: RolloutBatch, rewards: RewardTable, clock: StepClock
) -> dict[str, float]:
    """Of all that was sampled for a step, what is dropped later included."""
    return {
        **reward_metrics(rewards, batch.prompt_index),
        **completion_metrics(
            batch.response_lengths, batch.finish_reasons, clock.seconds("rollout")
        ),
        **turn_metrics(batch),
        **engine_metrics(run.colocation.pool.get_stats()),
        "rewards/overlong_penalty": float(_penalty(run, batch).mean()),
    }


def shaped_rewards(
    run: Run, batch: RolloutBatch, rewards: RewardTable
) -> list[float | None]:
    """What advantages are made of: rewards less the penalty for length; None stays None."""
    penalty = _penalty(run, batch)
    return [
        None if reward is None else reward + lost
        for reward, lost in zip(rewards.total, penalty, strict=True)
    ]


def spread(batch: RolloutBatch, values: NDArray[np.float32]) -> NDArray[np.float32]:
    """One number per rollout `[N]`, or per token that the policy chose, to `[total tokens]`: 0 at
    tokens that it did not choose."""
    if values.shape != (len(batch),) and values.shape == (int(batch.response_mask.sum()),):
        chosen, values = values, np.zeros(batch.num_tokens, dtype=np.float32)
        values[batch.response_mask] = chosen
    return advantages_per_token(batch, values)


def _penalty(run: Run, batch: RolloutBatch) -> NDArray[np.float64]:
    """What each rollout loses for its length, at most 0; all 0 without such a penalty."""
    longest = run.config.rollout.max_tokens
    buffer = round(run.preset.overlong_share * longest)
    if not buffer:
        return np.zeros(len(batch))
    return overlong_penalty(batch.lengths, longest, buffer, run.config.algorithm.overlong_factor)
