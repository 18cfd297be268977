"""Rollouts of one step with what they earned: between the engines and the trainer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from recipes.step_metrics import StepClock
from rollout import RolloutBatch
from rollout.model.weight_files import save_state

FILE = "sampled_ahead.pt"


@dataclass(frozen=True, slots=True)
class SampledStep:
    """teaching int64: the rollouts that the loss may use; advantages fp32 `[N]`."""

    batch: RolloutBatch
    advantages: NDArray[np.float32]
    teaching: NDArray[np.int64]
    metrics: dict[str, float]
    clock: StepClock

    def save(self, folder: Path) -> None:
        """Into a checkpoint: what was sampled under older weights cannot be sampled again."""
        columns = self.batch.columns()
        if columns.pop("extras"):
            raise ValueError("a batch with text or top log-probs is not stored")
        state = {
            "batch": {name: _plain(value) for name, value in columns.items()},
            "advantages": torch.from_numpy(self.advantages),
            "teaching": torch.from_numpy(self.teaching),
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
            state["advantages"].numpy(),
            state["teaching"].numpy(),
            state["metrics"],
            StepClock(),
        )


def _plain(value: Any) -> Any:
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else list(value)


def _unplain(value: Any) -> Any:
    return value.numpy() if isinstance(value, torch.Tensor) else tuple(value)
