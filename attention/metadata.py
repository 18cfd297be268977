"""What one step attends to: a frozen description, shared by all layers of the step.

Queries lie flat; keys and values lie in *slots*. A row of `block_table` lists, in order of
position, the blocks that hold one sequence. The trainer's packed rows are the same thing with a
block size of one and slots that are the packed tokens themselves, so a prompt shared by a group
is simply a run of slots that several rows name.

    tokens of the step   | a a a | b | c c c c |          query_start_loc = 0 3 4 8
    sequence a           [ cached ........ a a a ]        seq_lens counts cached + new
                                            ^ queries are always the last tokens of a sequence
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Layout of one step over `num_seqs` sequences and `num_tokens` query tokens (host arrays).

    query_start_loc `[num_seqs + 1]`: where each sequence's queries start among the flat tokens.
    seq_lens `[num_seqs]`: keys of each sequence including this step's; its queries are the last.
    block_table `[num_seqs, max_blocks]`: blocks of each sequence; entries past its end are 0.
    block_size: tokens per block; slot = block * block_size + offset.
    """

    query_start_loc: IntArray
    seq_lens: IntArray
    block_table: IntArray
    block_size: int

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {self.block_size}")
        if len(self.query_start_loc) != len(self.seq_lens) + 1:
            raise ValueError(
                f"query_start_loc has {len(self.query_start_loc)} entries for "
                f"{len(self.seq_lens)} sequences; it needs one more than there are sequences"
            )
        if np.any(self.query_lens < 1) or np.any(self.query_lens > self.seq_lens):
            raise ValueError("every sequence needs 1 <= queries <= seq_len")
        if self.block_table.shape[1] * self.block_size < int(self.seq_lens.max(initial=0)):
            raise ValueError(
                f"block_table holds {self.block_table.shape[1] * self.block_size} tokens a row, "
                f"the longest sequence has {int(self.seq_lens.max())}"
            )

    @property
    def num_tokens(self) -> int:
        return int(self.query_start_loc[-1])

    @property
    def query_lens(self) -> IntArray:
        return np.diff(self.query_start_loc)

    @property
    def positions(self) -> IntArray:
        """Position of each query token in its own sequence `[num_tokens]`."""
        starts = self.seq_lens - self.query_start_loc[1:]
        return np.arange(self.num_tokens) + np.repeat(starts, self.query_lens)

    @property
    def token_sequence(self) -> IntArray:
        """Index of the sequence each query token belongs to `[num_tokens]`."""
        return np.repeat(np.arange(len(self.seq_lens)), self.query_lens)

    def slot_table(self, width: int) -> IntArray:
        """Slot of every position `[num_seqs, width]`; past a sequence's end some finite slot."""
        blocks = -(-width // self.block_size)
        table = self.block_table[:, :blocks]
        if table.shape[1] < blocks:
            table = np.pad(table, ((0, 0), (0, blocks - table.shape[1])))
        slots = table[:, :, None] * self.block_size + np.arange(self.block_size)
        return slots.reshape(len(table), -1)[:, :width]

    @property
    def slot_mapping(self) -> IntArray:
        """Slot in which each query token's own key and value are stored `[num_tokens]`."""
        positions = self.positions
        blocks = self.block_table[self.token_sequence, positions // self.block_size]
        return blocks * self.block_size + positions % self.block_size

    @staticmethod
    def packed(lengths: list[int]) -> AttentionMetadata:
        """Whole sequences laid end to end, each attending to itself."""
        seq_lens = np.asarray(lengths, dtype=np.int64)
        starts = np.concatenate(([0], np.cumsum(seq_lens)))
        width = int(seq_lens.max(initial=1))
        column = np.arange(width)
        table = np.where(column < seq_lens[:, None], starts[:-1, None] + column, 0)
        return AttentionMetadata(starts, seq_lens, table, 1)
