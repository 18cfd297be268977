"""Rollouts of one step with what they earned: between the engines and the trainer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recipes.rewards import RewardTable
from recipes.step_metrics import StepClock
from rollout import RolloutBatch
from rollout.model.weight_files import save_state

FILE = "sampled_ahead.pt"


@dataclass(frozen=True, slots=True)
class SampledStep:
    """rewards: what each rollout earned. prompts_drawn: from the data, since the run began, this
    step's included."""

    batch: RolloutBatch
    rewards: RewardTable
    prompts_drawn: int
    metrics: dict[str, float]
    clock: StepClock

    def save(self, folder: Path) -> None:
        """Into a checkpoint: what was sampled under older weights cannot be sampled again."""
        columns = self.batch.columns()
        if columns.pop("extras"):
            raise ValueError("a batch with text or top log-probs is not stored")
        state = {
            "batch": {name: _plain(value) for name, value in columns.items()},
            "rewards": {
                "total": self.rewards.total,
                "columns": {n: torch.from_numpy(c) for n, c in self.rewards.columns.items()},
            },
            "prompts_drawn": self.prompts_drawn,
            "metrics": self.metrics,
        }
        save_state(state, folder / FILE)

    @staticmethod
    def load(folder: Path) -> SampledStep | None:
        """What `save` wrote; None if nothing was sampled ahead."""
        if not (folder / FILE).exists():
            return None
        state = torch.load(folder / FILE, weights_only=True)
        columns = {name: _unplain(value) for name, value in state["batch"].items()}
        return SampledStep(
            RolloutBatch(**columns, extras={}),
            RewardTable(
                state["rewards"]["total"],
                {name: column.numpy() for name, column in state["rewards"]["columns"].items()},
            ),
            state["prompts_drawn"],
            state["metrics"],
            StepClock(),
        )


def _plain(value: Any) -> Any:
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else list(value)


def _unplain(value: Any) -> Any:
    return value.numpy() if isinstance(value, torch.Tensor) else tuple(value)
