"""Which prompts and which noise a step uses: pure functions of the run seed and the step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class PromptCursor:
    """Walks rows 0..num_rows-1 in a fresh seeded permutation per epoch, `batch_size` per step.

    Stateless: `rows(step)` needs no earlier call, so a resumed run reads the prompts the
    uninterrupted one would have read. A batch may straddle two epochs; no row is ever skipped.
    """

    num_rows: int
    batch_size: int
    seed: int

    def __post_init__(self) -> None:
        if self.num_rows < 1:
            raise ValueError(f"num_rows must be at least 1, got {self.num_rows}")
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.batch_size}")
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0, got {self.seed}")

    def rows(self, step: int) -> list[int]:
        """Row indices of step 0, 1, 2, ... in order."""
        if step < 0:
            raise ValueError(f"step must be at least 0, got {step}")
        first = step * self.batch_size
        last = first + self.batch_size - 1
        epochs = {
            epoch: np.random.default_rng([self.seed, epoch]).permutation(self.num_rows)
            for epoch in range(first // self.num_rows, last // self.num_rows + 1)
        }
        return [
            int(epochs[position // self.num_rows][position % self.num_rows])
            for position in range(first, last + 1)
        ]

    def epoch(self, step: int) -> float:
        """Passes over the data completed before `step`."""
        return step * self.batch_size / self.num_rows


def sampling_seed(run_seed: int, step: int) -> int:
    """The engine's seed for one step, in [0, 2^32).

    A rollout's noise depends on the seed and the prompt, not on the policy version: with one seed
    for the whole run, a prompt met again an epoch later would meet the same noise again.
    """
    return int(np.random.SeedSequence([run_seed, step]).generate_state(1)[0])
