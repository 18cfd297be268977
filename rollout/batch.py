"""The inputs of one step, built from the scheduler's plan."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attention import AttentionMetadata
from kvcache import KVCacheManager
from rollout.request import Request
from rollout.scheduler import Scheduled


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Flat inputs of a mixed step; entries lie in the order of the plan.

        plan            A: 3 new (chunk)   B: 1 new (decode)   C: 4 new (last chunk)
        input_ids       a a a              b                   c c c c
        sampled rows                       ^ 3                       ^ 7
        requests        B, C: those that sample

    input_ids int64 `[num_tokens]`; rows int64 `[num_sampled]` into the flat tokens.
    """

    input_ids: NDArray[np.int64]
    metadata: AttentionMetadata
    rows: NDArray[np.int64]
    requests: list[Request]

    @staticmethod
    def build(plan: list[Scheduled], kv: KVCacheManager[int], block_size: int) -> StepInputs:
        input_ids: list[int] = []
        starts, seq_lens, tables = [0], [], []
        rows: list[int] = []
        requests: list[Request] = []
        for request, new in plan:
            computed = request.num_computed_tokens
            input_ids += request.tokens[computed : computed + new]
            starts.append(len(input_ids))
            seq_lens.append(computed + new)
            tables.append(kv.block_ids(request.request_id))
            if computed + new == len(request.tokens):
                rows.append(len(input_ids) - 1)
                requests.append(request)
        block_table = np.zeros((len(plan), max(map(len, tables))), dtype=np.int64)
        for row, table in zip(block_table, tables, strict=True):
            row[: len(table)] = table
        metadata = AttentionMetadata(
            np.asarray(starts, dtype=np.int64),
            np.asarray(seq_lens, dtype=np.int64),
            block_table,
            block_size,
        )
        return StepInputs(
            np.asarray(input_ids, dtype=np.int64),
            metadata,
            np.asarray(rows, dtype=np.int64),
            requests,
        )
