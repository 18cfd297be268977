"""What a recipe is, and what it is given: `Recipe`, `Run`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from recipes.algorithms.presets import Preset
from recipes.checkpoints import Checkpoints
from recipes.config import RunConfig
from recipes.lesson import Lesson
from recipes.metrics import MetricsLog
from recipes.report import RunRecord
from recipes.sampled_step import SampledStep
from recipes.samples import SampleLog
from recipes.tasks.task import Task
from trainer_bridge import Colocation
from trainer_bridge.algorithm import Algorithm


@dataclass(frozen=True, slots=True)
class Run:
    """One run: its settings, its processes, and where it writes. `record` says how far it is."""

    config: RunConfig
    preset: Preset
    task: Task
    colocation: Colocation
    metrics: MetricsLog
    samples: SampleLog
    record: RunRecord
    checkpoints: Checkpoints

    @property
    def algorithm(self) -> Algorithm:
        """The trainer's part of the preset."""
        return self.preset.algorithm(self.config.rollout.max_tokens)


class Recipe(Protocol):
    """A module that `Preset.recipe` names. The loop calls `sample`, then `lesson`, once per step.

    Both change nothing, so that a step may be taken again: what they depend on beside their
    arguments is `run.record`.
    """

    def sample(self, run: Run, prompts_drawn: int, step: int) -> SampledStep:
        """Prompts to rollouts and rewards. With `rollout.overlap` it runs on another thread, while
        the trainer computes the step before."""

    def lesson(self, run: Run, sample: SampledStep) -> Lesson:
        """Rewards to advantages, under the weights that the step will change."""
