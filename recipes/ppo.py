"""Proximal policy optimization with a critic, one step from top to bottom.

    python -m recipes.ppo [--config FILE] [--field value ...]      --help explains every field

`loop.py` takes these steps one after another, from the command line to the report. The critic and
the reference policy lie in the trainer; rollout actors never load them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from recipes import loop
from recipes.algorithms import adaptive_coefficient, explained_variance, gae, k1, reward_array
from recipes.algorithms.advantages import whiten
from recipes.command_line import CONFIGS
from recipes.data import PromptCursor, sampling_seed
from recipes.lesson import Lesson
from recipes.recipe import Run
from recipes.rewards import teaching_samples
from recipes.sampled_step import SampledStep
from recipes.sampling import sample_and_score, sampled_metrics, shaped_rewards
from recipes.step_metrics import StepClock
from rollout import RolloutBatch


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from command-line arguments; returns the exit code and never raises."""
    return loop.main("recipes.ppo", CONFIGS / "ppo_embedded.yaml", arguments)


def sample(run: Run, prompts_drawn: int, step: int) -> SampledStep:
    """Prompts to rollouts and rewards."""
    config, clock = run.config, StepClock()
    count = config.rollout.prompts_per_step
    cursor = PromptCursor(len(run.task.train), config.seed)
    rows = [run.task.train[index] for index in cursor.rows(prompts_drawn, count)]
    batch, rewards = sample_and_score(run, rows, sampling_seed(config.seed, step, 0), clock)
    metrics = sampled_metrics(run, batch, rewards, clock)
    return SampledStep(batch, rewards, prompts_drawn + count, metrics, clock)


def lesson(run: Run, sample: SampledStep) -> Lesson:
    """Rewards to advantages and returns: KL penalty per token, values of the critic, GAE.

    The reward is that of a rollout's last token; nothing is expected after it, of a truncated
    rollout neither. Tokens that the policy did not choose are passed over. In the first
    `critic.warmup_steps` steps only the critic learns.
    """
    settings, carried = run.config.ppo, dict(run.record.carried)
    earned = reward_array(shaped_rewards(run, sample.batch, sample.rewards))
    teaches = teaching_samples(sample.batch.finish_reasons, run.config.algorithm.mask_truncated)
    rollouts = np.flatnonzero(teaches & ~np.isnan(earned) & (sample.batch.response_lengths > 0))
    batch, algorithm = sample.batch.select(rollouts), run.algorithm
    critic_alone = run.record.steps_done < run.config.critic.warmup_steps
    if critic_alone:
        algorithm = replace(algorithm, policy_loss=None)
    if not len(batch):
        return Lesson(rollouts, batch, np.zeros(0, np.float32), algorithm, carried=carried)

    columns = run.colocation.trainer.score_tokens(batch)
    sample.clock.lap("values")
    assert columns.values is not None, "the trainer has a critic: trainer_settings.py"
    mask, rewards = batch.response_mask, np.zeros(batch.num_tokens)
    rewards[batch.offsets[1:] - 1] = earned[rollouts]
    penalty = {}
    if settings.kl_coefficient:
        assert columns.reference_logprobs is not None
        coefficient = carried.get("kl_coefficient", settings.kl_coefficient)
        kl = k1(torch.from_numpy(batch.logprobs), torch.from_numpy(columns.reference_logprobs))
        rewards -= np.where(mask, coefficient * kl.numpy(), 0.0)
        mean_kl = _mean_over_rollouts(kl.numpy(), batch)
        penalty = {"kl": mean_kl, "kl_coefficient": coefficient}
        if settings.kl_target is not None and not critic_alone:
            carried["kl_coefficient"] = adaptive_coefficient(
                coefficient, mean_kl, len(batch),
                target=settings.kl_target, horizon=settings.kl_horizon,
            )  # fmt: skip
    estimated = gae(
        rewards, columns.values, batch.lengths, mask, gamma=settings.gamma, lam=settings.lam
    )
    advantages = whiten(np.where(mask, estimated.advantages.astype(np.float64), np.nan))
    values, returns = columns.values[mask], estimated.returns[mask]
    metrics = {
        **penalty,
        "critic/values/mean": float(values.mean()),
        "critic/returns/mean": float(returns.mean()),
        "critic/vf_explained_var": explained_variance(values, returns),
    }
    sample.clock.lap("advantage")
    columns = replace(columns, returns=estimated.returns)
    return Lesson(rollouts, batch, advantages, algorithm, columns, metrics, carried)


def _mean_over_rollouts(per_token: NDArray[np.float32], batch: RolloutBatch) -> float:
    """The mean over rollouts of the mean over the tokens that the policy chose, at least one."""
    chosen = np.where(batch.response_mask, per_token.astype(np.float64), 0.0)
    sums = np.add.reduceat(chosen, batch.offsets[:-1])
    return float((sums / batch.response_lengths).mean())


if __name__ == "__main__":
    sys.exit(main())
