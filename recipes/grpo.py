"""Group-relative policy optimization and its family, one step from top to bottom.

    python -m recipes.grpo [--config FILE] [--field value ...]      --help explains every field

`loop.py` takes these steps one after another, from the command line to the report.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np

from recipes import loop
from recipes.algorithms import teaching_groups
from recipes.command_line import CONFIGS
from recipes.data import PromptCursor, sampling_seed
from recipes.errors import RunError
from recipes.lesson import Lesson
from recipes.recipe import Run
from recipes.rewards import RewardTable, teaching_samples
from recipes.sampled_step import SampledStep
from recipes.sampling import sample_and_score, sampled_metrics, shaped_rewards, token_advantages
from recipes.step_metrics import StepClock
from rollout import RolloutBatch
from trainer_bridge import TokenColumns


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from command-line arguments; returns the exit code and never raises."""
    return loop.main("recipes.grpo", CONFIGS / "grpo_embedded.yaml", arguments)


def sample(run: Run, prompts_drawn: int, step: int) -> SampledStep:
    """Prompts to rollouts and rewards.

    With dynamic sampling in rounds: what a round brought of groups whose rewards differ is kept,
    and the next one samples as many other prompts as are still missing.
    """
    config, task, clock = run.config, run.task, StepClock()
    cursor = PromptCursor(len(task.train), config.seed)
    dynamic, limit = run.preset.dynamic_sampling, config.algorithm.max_sampling_rounds
    batches: list[RolloutBatch] = []
    tables: list[RewardTable] = []
    missing = config.rollout.prompts_per_step
    while missing and len(batches) < (limit if dynamic else 1):
        rows = [task.train[index] for index in cursor.rows(prompts_drawn, missing)]
        prompts_drawn += missing
        seed = sampling_seed(config.seed, step, len(batches))
        batch, rewards = sample_and_score(run, rows, seed, clock)
        batches.append(batch)
        tables.append(rewards)
        kept = teaching_groups(rewards.total, batch.prompt_index)
        missing -= len(np.unique(batch.prompt_index[kept]))
    batch, rewards = RolloutBatch.concat(batches), RewardTable.concat(tables)
    metrics = {
        **sampled_metrics(run, batch, rewards, clock),
        "rollout/sampling_rounds": float(len(batches)),
    }
    if dynamic:
        kept = teaching_groups(rewards.total, batch.prompt_index)
        if not kept.any():
            raise RunError(
                f"step {step}: in each of the {batch.num_prompts} groups sampled, all rewards were "
                "equal; there is nothing to learn from (raise rollout.group_size, change the task, "
                "or set algorithm.dynamic_sampling to false)"
            )
        index = np.flatnonzero(kept)
        batch, rewards = batch.select(index), rewards.select(index)
    return SampledStep(batch, rewards, prompts_drawn, metrics, clock)


def lesson(run: Run, sample: SampledStep) -> Lesson:
    """Rewards to advantages, over whole groups; then without the rollouts that may not teach, or
    that have no reward."""
    batch = sample.batch
    shaped = shaped_rewards(run, batch, sample.rewards)
    assert run.preset.advantages is not None
    advantages = token_advantages(run.preset.advantages, shaped, batch)
    teaches = teaching_samples(batch.finish_reasons, run.config.algorithm.mask_truncated)
    teaches &= np.array([reward is not None for reward in shaped], dtype=np.bool_)
    rollouts = np.flatnonzero(teaches)
    if not teaches.all():
        advantages = advantages[np.repeat(teaches, batch.lengths)]
        batch = batch.select(rollouts)
    sample.clock.lap("advantage")

    algorithm, columns = run.algorithm, TokenColumns()
    if algorithm.reference_penalty is not None and len(batch):
        columns = run.colocation.trainer.score_tokens(batch)
        sample.clock.lap("reference")
    return Lesson(rollouts, batch, advantages, algorithm, columns)


if __name__ == "__main__":
    sys.exit(main())
