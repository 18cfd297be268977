"""What one step of the trainer learns from: between a recipe and the trainer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rollout import RolloutBatch
from trainer_bridge import Algorithm, TokenColumns


@dataclass(frozen=True, slots=True)
class Lesson:
    """The arguments of `trainer.step`, and what a recipe says about them.

    rollouts int64: which of the sampled ones `batch` holds, in order; without any, no step is
    taken. advantages fp32 `[total tokens]` of `batch`. carried: plain numbers that the next step's
    lesson finds in `run.record.carried`, after a resume too.
    """

    rollouts: NDArray[np.int64]
    batch: RolloutBatch
    advantages: NDArray[np.float32]
    algorithm: Algorithm
    columns: TokenColumns = field(default_factory=TokenColumns)
    metrics: Mapping[str, float] = field(default_factory=dict)
    carried: Mapping[str, float] = field(default_factory=dict)
