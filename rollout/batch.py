"""The inputs of one step: what its plan picks from the persistent columns, laid flat."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from attention import AttentionMetadata
from rollout.running import RunningBatch
from rollout.sampling_rows import EditedRow, Filters, SamplingRows
from rollout.step_plan import IntColumn, StepPlan


@dataclass(frozen=True, slots=True)
class ScoredPrompt:
    """Tokens [first, last) of a request's prompt whose log-probs this step can tell.

    Those of token p are at the flat index of token p - 1, so `flat_start` belongs to `first`.
    """

    row: int
    first: int
    last: int
    flat_start: int


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Flat inputs of a mixed step; entries lie in the order of the plan.

        plan            A: 3 new (chunk)   B: 1 new (decode)   C: 4 new (last chunk)
        input_ids       a a a              b                   c c c c
        positions       5 6 7              40                  0 1 2 3
        sampled                            ^ 3                       ^ 7  ^ 7
        sampling        row 0 of its columns: B, row 1: C, row 2: D, which is forked from C

    input_ids int64 `[num_tokens]`; sampled int64 `[num_sampled]` into the flat tokens.
    `metadata` reads the batch's block table where it lies: inputs are valid for this step only.
    """

    input_ids: IntColumn
    metadata: AttentionMetadata
    sampled: IntColumn
    sampling: SamplingRows
    scored: list[ScoredPrompt]

    @staticmethod
    def build(plan: StepPlan, batch: RunningBatch) -> StepInputs:
        rows = plan.rows
        starts = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(plan.num_new, out=starts[1:])
        metadata = AttentionMetadata(
            starts,
            batch.num_computed[rows] + plan.num_new,
            batch.block_table,
            batch.block_size,
            rows,
        )
        input_ids = batch.tokens[rows[metadata.token_sequence], metadata.positions]
        last = starts[1:] - 1
        sampled = last[plan.samples]
        if len(plan.forked):
            sampled = np.concatenate((sampled, last[plan.leaders]))
        return StepInputs(
            input_ids.astype(np.int64),
            metadata,
            sampled,
            _sampling_rows(plan.sampled_rows, batch),
            _scored_prompts(plan, batch, starts),
        )


def _sampling_rows(rows: IntColumn, batch: RunningBatch) -> SamplingRows:
    filters = None
    if batch.filtered[rows].any():
        filters = Filters(batch.top_p[rows], batch.top_k[rows], batch.min_p[rows])
    edited = []
    for index in np.flatnonzero(batch.edited[rows]).tolist():
        row = int(rows[index])
        edits = batch.request(row).edits
        assert edits is not None
        prompt, total = int(batch.num_prompt_tokens[row]), int(batch.num_tokens[row])
        tokens = batch.tokens[row]
        edited.append(EditedRow(index, edits, tokens[:prompt], tokens[prompt:total]))
    return SamplingRows(
        batch.temperature[rows],
        batch.greedy[rows],
        batch.noise_keys[rows],
        batch.num_tokens[rows],
        filters,
        edited,
        int(batch.num_top[rows].max(initial=0)),
    )


def _scored_prompts(
    plan: StepPlan, batch: RunningBatch, starts: IntColumn
) -> list[ScoredPrompt]:
    scored = []
    for index in np.flatnonzero(batch.scored[plan.rows]).tolist():
        row = int(plan.rows[index])
        first = int(batch.num_computed[row]) + 1
        last = min(first + int(plan.num_new[index]), int(batch.num_prompt_tokens[row]))
        if first < last:
            scored.append(ScoredPrompt(row, first, last, int(starts[index])))
    return scored
