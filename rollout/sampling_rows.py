"""What the sampler is given and gives back: one entry per sampled row of a step, in columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollout.logit_edits import LogitEdits

NOT_FINITE = -1
"""In place of a token: the logits hold NaN or +inf."""

NOTHING_LEFT = -2
"""In place of a token: the request's edits leave no token to sample."""


class EditedRow(NamedTuple):
    """A row whose logits are edited before the temperature."""

    row: int  # index into the sampled rows
    edits: LogitEdits
    prompt: NDArray[np.int32]  # these two are views, valid during the step
    output: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Filters:
    """Columns `[rows]`; a filter that is off for a row is 1.0, 0 (or below) and 0.0."""

    top_p: NDArray[np.float64]
    top_k: NDArray[np.int64]
    min_p: NDArray[np.float64]

    @property
    def on(self) -> NDArray[np.bool_]:
        """Rows that have a filter on."""
        return (self.top_p < 1) | (self.top_k > 0) | (self.min_p > 0)

    def select(self, rows: NDArray[np.int64]) -> Filters:
        """The entries of some rows, copied."""
        return Filters(self.top_p[rows], self.top_k[rows], self.min_p[rows])


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Columns `[rows]` of the sampled rows. The sampler reads them and keeps nothing.

    temperature: 1.0 for greedy rows. positions: tokens before the one drawn, prompt and output.
    filters: None if no row has one on; those of greedy rows are not looked at. edited: rows with
    edits, usually none, each row once. num_top: most best tokens any row asks for; 0 = none.
    """

    temperature: NDArray[np.float32]
    greedy: NDArray[np.bool_]
    noise_keys: NDArray[np.uint64]
    positions: NDArray[np.int64]
    filters: Filters | None
    edited: Sequence[EditedRow]
    num_top: int


@dataclass(frozen=True, slots=True)
class SampledRows:
    """Columns `[rows]`; where `tokens` is negative, the other columns of the row mean nothing.

    tokens: ids, `NOT_FINITE` or `NOTHING_LEFT`.
    logprobs: log softmax(logits / T)[token], of the logits as the model gave them.
    sampling_logprobs: under the distribution sampled, after edits and filters; bit for bit
        `logprobs` where neither was on; 0.0 for greedy rows.
    top_ids, top_logprobs: `[rows, min(num_top, vocab)]`, best first, the lower id first among
        equals; of the same distribution as `logprobs`. None if no row asks.
    """

    tokens: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    sampling_logprobs: NDArray[np.float32]
    top_ids: NDArray[np.int64] | None
    top_logprobs: NDArray[np.float32] | None

    @classmethod
    def none(cls) -> SampledRows:
        """Of a step that samples no row."""
        no_logprobs = np.empty(0, np.float32)
        return cls(np.empty(0, np.int64), no_logprobs, no_logprobs, None, None)
