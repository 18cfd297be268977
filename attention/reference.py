"""The oracle: attention written as its definition, one sequence at a time.

Slow, and its bits depend on the length of a sequence's row, as those of most attention do: it
serves the tests as the reference for values and as the control for exactness.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from attention.metadata import AttentionMetadata


@dataclass(frozen=True, slots=True)
class _Plan:
    starts: list[int]  # query_start_loc
    slots: list[Tensor]  # per sequence, [seq_len]
    group: int
    slot_mapping: Tensor  # [num_tokens] slot of each query token's own key and value


class ReferenceAttention:
    """softmax(q·k / sqrt(head_dim), causal) · v in plain torch operations."""

    name = "reference"
    exact = False

    def plan(self, metadata: AttentionMetadata, group: int, device: torch.device) -> _Plan:
        everyone = np.arange(len(metadata.seq_lens))
        table = metadata.slots(everyone, 0, int(metadata.seq_lens.max(initial=1)))
        slots = [
            torch.from_numpy(row[:length].copy()).to(device)
            for row, length in zip(table, metadata.seq_lens.tolist(), strict=True)
        ]
        mapping = torch.from_numpy(metadata.slot_mapping).to(device)
        return _Plan(metadata.query_start_loc.tolist(), slots, group, mapping)

    def store(self, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, plan: _Plan) -> None:
        keys.index_copy_(1, plan.slot_mapping, k.transpose(0, 1))
        values.index_copy_(1, plan.slot_mapping, v.transpose(0, 1))

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, plan: _Plan) -> Tensor:
        outputs = []
        for index, slots in enumerate(plan.slots):
            rows = q[plan.starts[index] : plan.starts[index + 1]].transpose(0, 1)
            k = keys.index_select(1, slots).repeat_interleave(plan.group, dim=0)
            v = values.index_select(1, slots).repeat_interleave(plan.group, dim=0)
            scores = rows @ k.transpose(1, 2) * q.shape[-1] ** -0.5
            queries, length = rows.shape[1], slots.shape[0]
            causal = torch.ones(queries, length, dtype=torch.bool, device=q.device)
            causal = causal.tril(diagonal=length - queries)
            scores = scores.masked_fill(~causal, float("-inf"))
            outputs.append((scores.softmax(-1) @ v).transpose(0, 1))
        return torch.cat(outputs)
