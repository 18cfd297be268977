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

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Layout of one step over `num_seqs` sequences and `num_tokens` query tokens (host arrays).

    query_start_loc `[num_seqs + 1]`: where each sequence's queries start among the flat tokens.
    seq_lens `[num_seqs]`: keys of each sequence including this step's; its queries are the last.
    block_table `[table rows, max_blocks]`: blocks of a sequence, in order; past its end anything
        that is a block. Not copied: the engine's table is persistent, a plan is made from it anew.
    block_size: tokens per block; slot = block * block_size + offset.
    table_rows `[num_seqs]`: the row of block_table that is each sequence's; None = 0, 1, 2, …

    Derived, computed once: query_lens `[num_seqs]`; positions and token_sequence `[num_tokens]`,
    the position of each query token in its sequence, and which sequence that is.
    """

    query_start_loc: IntArray
    seq_lens: IntArray
    block_table: IntArray
    block_size: int
    table_rows: IntArray | None = None
    query_lens: IntArray = field(init=False, repr=False, compare=False)
    positions: IntArray = field(init=False, repr=False, compare=False)
    token_sequence: IntArray = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {self.block_size}")
        sequences = len(self.seq_lens)
        if len(self.query_start_loc) != sequences + 1:
            raise ValueError(
                f"query_start_loc has {len(self.query_start_loc)} entries for "
                f"{sequences} sequences; it needs one more than there are sequences"
            )
        rows = sequences if self.table_rows is None else len(self.table_rows)
        if rows != sequences or len(self.block_table) < sequences:
            raise ValueError(
                f"{rows} table_rows and {len(self.block_table)} rows of block_table for "
                f"{sequences} sequences"
            )
        starts = self.query_start_loc
        lens = starts[1:] - starts[:-1]
        if (lens < 1).any() or (lens > self.seq_lens).any():
            raise ValueError("every sequence needs 1 <= queries <= seq_len")
        longest = int(self.seq_lens.max(initial=0))
        if self.block_table.shape[1] * self.block_size < longest:
            raise ValueError(
                f"block_table holds {self.block_table.shape[1] * self.block_size} tokens a row, "
                f"the longest sequence has {longest}"
            )
        first = self.seq_lens - starts[1:]
        if self.num_tokens == sequences:  # decodes only
            owner, positions = np.arange(sequences), self.seq_lens - 1
        else:
            owner = np.repeat(np.arange(sequences), lens)
            positions = np.arange(self.num_tokens) + first[owner]
        for name, value in (
            ("query_lens", lens), ("positions", positions), ("token_sequence", owner)
        ):
            object.__setattr__(self, name, value)

    @property
    def num_tokens(self) -> int:
        return int(self.query_start_loc[-1])

    def slots(self, sequences: IntArray, start: int, stop: int) -> IntArray:
        """Slots of positions [start, stop) of the named sequences `[n, stop - start]`.

        Past a sequence's end it is slot 0: what other slots hold there is of nobody's any more, and
        a NaN in it would come through a weight of zero. `sequences` may name one several times.
        """
        size = self.block_size
        rows = sequences if self.table_rows is None else self.table_rows[sequences]
        first, last = start // size, -(-stop // size)
        blocks = self.block_table[rows, first : min(last, self.block_table.shape[1])]
        if blocks.shape[1] < last - first:
            blocks = np.pad(blocks, ((0, 0), (0, last - first - blocks.shape[1])))
        slots = (blocks * size)[:, :, None] + np.arange(size)
        slots = slots.reshape(len(rows), -1)[:, start - first * size : stop - first * size]
        ends = self.seq_lens[sequences]
        if stop > ends.min(initial=stop):
            slots = np.where(np.arange(start, stop) < ends[:, None], slots, 0)
        return slots

    @property
    def slot_mapping(self) -> IntArray:
        """Slot in which each query token's own key and value are stored `[num_tokens]`."""
        block, offset = np.divmod(self.positions, self.block_size)
        rows = self.token_sequence
        if self.table_rows is not None:
            rows = self.table_rows[rows]
        mapping: IntArray = self.block_table[rows, block] * self.block_size + offset
        return mapping

    @staticmethod
    def packed(lengths: list[int]) -> AttentionMetadata:
        """Whole sequences laid end to end, each attending to itself."""
        seq_lens = np.asarray(lengths, dtype=np.int64)
        starts = np.concatenate(([0], np.cumsum(seq_lens)))
        width = int(seq_lens.max(initial=1))
        column = np.arange(width)
        table = np.where(column < seq_lens[:, None], starts[:-1, None] + column, 0)
        return AttentionMetadata(starts, seq_lens, table, 1)
