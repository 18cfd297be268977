"""What the recipes' sampling has in common: rollouts, their rewards, and the numbers of both."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from recipes.algorithms import overlong_penalty
from recipes.recipe import Run
from recipes.rewards import RewardTable, score_rollouts
from recipes.step_metrics import StepClock, completion_metrics, engine_metrics, reward_metrics
from recipes.tasks.task import encode_prompt
from rollout import RolloutBatch, SamplingParams


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
    prompts = [encode_prompt(tokenizer, row["prompt"]) for row in rows]
    batch = run.colocation.pool.run_batch(prompts, params)
    clock.lap("rollout")

    _, rewards = score_rollouts(run.task.rewards, tokenizer, rows, batch)
    clock.lap("reward")
    return batch, rewards


def sampled_metrics(
    run: Run, batch: RolloutBatch, rewards: RewardTable, clock: StepClock
) -> dict[str, float]:
    """Of all that was sampled for a step, what is dropped later included."""
    return {
        **reward_metrics(rewards, batch.prompt_index),
        **completion_metrics(batch.lengths, batch.finish_reasons, clock.seconds("rollout")),
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


def _penalty(run: Run, batch: RolloutBatch) -> NDArray[np.float64]:
    """What each rollout loses for its length, at most 0; all 0 without such a penalty."""
    longest = run.config.rollout.max_tokens
    buffer = round(run.preset.overlong_share * longest)
    if not buffer:
        return np.zeros(len(batch))
    return overlong_penalty(batch.lengths, longest, buffer, run.config.algorithm.overlong_factor)
