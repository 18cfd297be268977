"""From the fields of a run to the settings of its trainer."""

from __future__ import annotations

import math
from dataclasses import asdict

import trainer_bridge
from recipes.algorithms.presets import Preset
from recipes.config import RunConfig
from trainer_bridge import TrainerConfig


def trainer_config(config: RunConfig, preset: Preset) -> TrainerConfig:
    """The optimizer, with a critic and a reference policy if the algorithm has them.

    The learning-rate schedule spans the steps that change the policy: those of the warm start and
    the training steps, without those that train the critic alone.
    """
    critic = None
    if preset.value_loss is not None:
        settings = asdict(config.critic)
        del settings["warmup_steps"]
        critic = trainer_bridge.CriticConfig(**settings)
    steps = config.steps - (config.critic.warmup_steps if critic else 0)
    rollouts = config.rollout.prompts_per_step * config.rollout.group_size
    minibatches = math.ceil(rollouts / (config.optimizer.minibatch_size or rollouts))
    return TrainerConfig(
        **asdict(config.optimizer),
        total_steps=config.warm_start.steps + steps * minibatches * config.optimizer.num_iterations,
        critic=critic,
        reference=preset.beta > 0 or (critic is not None and config.ppo.kl_coefficient > 0),
    )
