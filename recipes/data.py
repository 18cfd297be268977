"""Which prompts and which noise a step uses: pure functions of the run seed and the step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class PromptCursor:
    """Walks rows 0..num_rows-1 in a fresh seeded permutation per epoch.

    Stateless: `rows(position, count)` needs no earlier call, so a resumed run that knows how many
    prompts were drawn reads those the uninterrupted one would have read. What is drawn may
    straddle epochs; no row is ever skipped.
    """

    num_rows: int
    seed: int

    def __post_init__(self) -> None:
        if self.num_rows < 1:
            raise ValueError(f"num_rows must be at least 1, got {self.num_rows}")
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0, got {self.seed}")

    def rows(self, position: int, count: int) -> list[int]:
        """Indices of `count` rows, after `position` rows have been drawn since the beginning."""
        if position < 0 or count < 1:
            raise ValueError(
                f"position must be at least 0 and count at least 1, got {position} and {count}"
            )
        last = position + count - 1
        epochs = {
            epoch: np.random.default_rng([self.seed, epoch]).permutation(self.num_rows)
            for epoch in range(position // self.num_rows, last // self.num_rows + 1)
        }
        return [
            int(epochs[at // self.num_rows][at % self.num_rows])
            for at in range(position, last + 1)
        ]


def sampling_seed(run_seed: int, step: int, round_index: int = 0) -> int:
    """The engine's seed for one step and one of its rounds of sampling, in [0, 2^32).

    A rollout's noise depends on the seed and the prompt, not on the policy version: with one seed
    for the whole run, a prompt met again an epoch later would meet the same noise again.
    """
    return int(np.random.SeedSequence([run_seed, step, round_index]).generate_state(1)[0])
