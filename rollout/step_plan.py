"""What one step is asked to compute, and what it came to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvcache import BlockCopy
from rollout.request import Request

IntColumn = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Row `rows[i]` of the running batch computes its next `num_new[i]` tokens, all >= 1.

    samples: whether that computes the row's last token, so that one is sampled.
    forked: rows that compute nothing: their prompt is that of entry `leaders[i]` of the plan,
        which samples after it, and so do they, from the same logits.
    copies_before, copies_after: KV to be copied before and after the forward.

    A plan is valid until the scheduler changes again.
    """

    rows: IntColumn
    num_new: IntColumn
    samples: NDArray[np.bool_]
    forked: IntColumn
    leaders: IntColumn
    copies_before: Sequence[BlockCopy] = ()
    copies_after: Sequence[BlockCopy] = ()

    @property
    def num_tokens(self) -> int:
        return int(self.num_new.sum())

    @property
    def sampled_rows(self) -> IntColumn:
        rows = self.rows[self.samples]
        return np.concatenate((rows, self.forked)) if len(self.forked) else rows


@dataclass(frozen=True, slots=True)
class Committed:
    """What a step came to: requests that ended, and rows that got their first output token."""

    ended: list[Request]
    first_token_rows: IntColumn
    num_generated: int
