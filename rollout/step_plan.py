"""What one step is asked to compute, and what it came to."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollout.request import Request

IntColumn = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Row `rows[i]` of the running batch computes its next `num_new[i]` tokens, all >= 1.

    samples: whether that computes the row's last token, so that one is sampled. A plan is valid
    until the scheduler changes again.
    """

    rows: IntColumn
    num_new: IntColumn
    samples: NDArray[np.bool_]

    @property
    def num_tokens(self) -> int:
        return int(self.num_new.sum())

    @property
    def sampled_rows(self) -> IntColumn:
        return self.rows[self.samples]


@dataclass(frozen=True, slots=True)
class Committed:
    """What a step came to: requests that ended, and rows that got their first output token."""

    ended: list[Request]
    first_token_rows: IntColumn
    num_generated: int
