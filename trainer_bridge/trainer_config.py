"""The settings of the training step: of the policy's optimizer, and of a critic."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CriticConfig:
    """A value head, and whose hidden states it reads.

    trunk: "own", a second decoder that starts as a copy of the policy and is trained by the value
    loss alone; or "shared", the policy's own, which then gets the gradient of both losses, the
    value loss times `coefficient`. The critic lies in the trainer's private memory and is never
    published. learning_rate: constant, of an AdamW of its own. max_grad_norm: of its gradient.
    """

    trunk: str = "own"
    learning_rate: float = 1e-5
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    max_grad_norm: float | None = 1.0
    coefficient: float = 0.1

    def __post_init__(self) -> None:
        if self.trunk not in ("own", "shared"):
            raise ValueError(f"CriticConfig.trunk must be own or shared, got {self.trunk!r}")
        for name in ("learning_rate", "weight_decay", "coefficient"):
            if not getattr(self, name) >= 0:
                raise ValueError(
                    f"CriticConfig.{name} must be 0 or more, got {getattr(self, name)}"
                )


@dataclass(frozen=True, slots=True)
class TrainerConfig:
    """AdamW on the shared weights.

    learning_rate: peak. lr_schedule: "constant", "linear" or "cosine" (to 0 at `total_steps`),
    after `warmup_steps` of linear warm-up; all in optimizer steps.
    max_grad_norm: gradients are scaled to this norm at most; None = not clipped.
    minibatch_size: rollouts per optimizer step; None = the whole batch. num_iterations: passes
    over a batch. micro_batch_tokens: input tokens per forward; bounds memory, changes no result.
    gradient_checkpointing: keep no more of a forward than what enters each layer, and compute the
    rest again for the backward: less memory, about a third more time, the same gradient.
    num_threads: CPU threads of the trainer; None = all cores.
    undo: keep a copy of the weights during an update, so that one that raises leaves the old ones;
    None = while there is plenty of memory (`GateSettings`).
    critic: what predicts returns, for PPO; None = none. reference: keep a frozen copy of the policy
    to measure a KL divergence from.
    """

    learning_rate: float = 1e-6
    lr_schedule: str = "constant"
    warmup_steps: int = 0
    total_steps: int | None = None
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    max_grad_norm: float | None = 1.0
    minibatch_size: int | None = None
    num_iterations: int = 1
    micro_batch_tokens: int = 8192
    gradient_checkpointing: bool = False
    num_threads: int | None = None
    undo: bool | None = None
    critic: CriticConfig | None = None
    reference: bool = False

    def __post_init__(self) -> None:
        if self.lr_schedule not in ("constant", "linear", "cosine"):
            raise ValueError(
                f"TrainerConfig.lr_schedule must be constant, linear or cosine, "
                f"got {self.lr_schedule!r}"
            )
        if self.lr_schedule != "constant" and not self.total_steps:
            raise ValueError(f"TrainerConfig.lr_schedule={self.lr_schedule!r} needs total_steps")
        if not self.learning_rate >= 0:
            raise ValueError(
                f"TrainerConfig.learning_rate must be 0 or more, got {self.learning_rate}"
            )
        for name in ("num_iterations", "micro_batch_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"TrainerConfig.{name} must be at least 1, got {getattr(self, name)}"
                )
        if self.minibatch_size is not None and self.minibatch_size < 1:
            raise ValueError(
                f"TrainerConfig.minibatch_size must be at least 1, got {self.minibatch_size}"
            )

    def learning_rate_factor(self, step: int) -> float:
        """Of the peak, at an optimizer step: linear warm-up, then the schedule."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.lr_schedule == "constant" or self.total_steps is None:
            return 1.0
        span = max(self.total_steps - self.warmup_steps, 1)
        left = max(0.0, 1.0 - (step - self.warmup_steps) / span)
        return left if self.lr_schedule == "linear" else 0.5 * (1 - math.cos(math.pi * left))
