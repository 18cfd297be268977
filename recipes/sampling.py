"""What the recipes' sampling has in common: rollouts, their rewards, and the numbers of both."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recipes.algorithms import overlong_penalty
from recipes.algorithms.advantages import AdvantageFunction
from recipes.environment import Interactive
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
from rollout import Rollout, RolloutBatch, SamplingParams


def sample_and_score(
    run: Run, rows: list[dict[str, Any]], seed: int, clock: StepClock
) -> tuple[RolloutBatch, RewardTable]:
    """`group_size` completions of each row's prompt, and what they earn. With
    `task.score_each_prompt` those of a prompt are scored while others are still sampled."""
    config, tokenizer = run.config.rollout, run.colocation.tokenizer
    params = SamplingParams(
        n=config.group_size,
        temperature=config.temperature,
        max_tokens=config.max_tokens,
        seed=seed,
    )
    rewards, run_batch = run.task.rewards, run.colocation.pool.run_batch
    if run.config.task.score_each_prompt and not isinstance(run.task, Interactive):
        with ThreadPoolExecutor(1, "rewards") as scorer:
            scored: dict[int, Future[tuple[list[str], RewardTable]]] = {}

            def score(place: int, rollouts: list[Rollout]) -> None:
                one, row = RolloutBatch.from_rollouts(rollouts), [rows[place]]
                scored[place] = scorer.submit(score_rollouts, rewards, tokenizer, row, one)

            batch, _ = sample_rows(
                run_batch, tokenizer, run.task, rows, params, config.max_turns, score
            )
            clock.lap("rollout")
            table = RewardTable.concat([scored[place].result()[1] for place in range(len(rows))])
        clock.lap("reward")
        return batch, table
    batch, earned = sample_rows(run_batch, tokenizer, run.task, rows, params, config.max_turns)
    clock.lap("rollout")
    _, table = score_rollouts(rewards, tokenizer, rows, batch, earned)
    clock.lap("reward")
    return batch, table


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


def token_advantages(
    function: AdvantageFunction, rewards: list[float | None], batch: RolloutBatch
) -> NDArray[np.float32]:
    """What `function` gives each rollout or each token that the policy chose, as
    `[total tokens]`: 0 at tokens that it did not choose."""
    chosen = batch.response_lengths
    # One for a rollout without tokens: so N numbers are one for each, whatever they are meant for.
    lengths = np.maximum(chosen, 1)
    values = np.asarray(function(rewards, batch.prompt_index, lengths), dtype=np.float32)
    if values.shape == (len(batch),):
        values = np.repeat(values, lengths)
    if values.shape != (lengths.sum(),):
        raise ValueError(
            f"advantages have shape {values.shape} for {len(batch)} rollouts of {lengths.sum()} "
            "tokens; return one number per rollout or one per token"
        )
    per_token = np.zeros(batch.num_tokens, dtype=np.float32)
    per_token[batch.response_mask] = values[np.repeat(chosen > 0, lengths)]
    return per_token


def _penalty(run: Run, batch: RolloutBatch) -> NDArray[np.float64]:
    """What each rollout loses for its length, at most 0; all 0 without such a penalty."""
    longest = run.config.rollout.max_tokens
    buffer = round(run.preset.overlong_share * longest)
    if not buffer:
        return np.zeros(len(batch))
    return overlong_penalty(batch.lengths, longest, buffer, run.config.algorithm.overlong_factor)
