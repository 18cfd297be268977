"""Rollouts as the trainer reads them: packed micro-batches, each group's prompt computed once.

    rollouts of one prompt      P P P P a a a        one pack     P P P P a a b b b
                                P P P P b b b b      reads        ^ shared, once

A response token t_j is scored at the row of the token before it: t_0 at the prompt's last token,
shared by the whole group. The last token of a response is only ever a target, never an input.
Tokens that the policy did not choose (`RolloutBatch.response_mask`) are inputs, never targets.
Attention's bits depend on a token's own prefix alone, so sharing changes nothing in the forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attention import AttentionMetadata
from rollout.rollout_batch import RolloutBatch

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward and backward.

    input_ids `[num_tokens]`, metadata: packed, block size 1, slots are the pack's own tokens.
    T counts the response tokens that the policy chose. rows `[T]`: flat input row that scores each
    of them; targets `[T]`: the token ids.
    token_index `[T]`: place of each response token in the batch's flat columns.
    rollout_index `[T]`: the rollout it belongs to.
    """

    input_ids: IntArray
    metadata: AttentionMetadata
    rows: IntArray
    targets: IntArray
    token_index: IntArray
    rollout_index: IntArray


def micro_batches(
    batch: RolloutBatch, rollouts: Sequence[int] | IntArray, max_tokens: int
) -> Iterator[MicroBatch]:
    """Pack the given rollouts, in order, into micro-batches of at most `max_tokens` input tokens.

    A rollout that alone is longer gets a micro-batch of its own. Rollouts in which the policy chose
    no token have nothing to score and are passed over. A group that does not fit is continued in
    the next micro-batch, where its prompt is computed again.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
    pending: list[int] = []
    size, prompt = 0, -1
    chosen = batch.response_lengths
    for index in map(int, rollouts):
        length = int(batch.offsets[index + 1] - batch.offsets[index])
        if chosen[index] == 0:
            continue
        own_prompt = int(batch.prompt_index[index])
        prompt_length = len(batch.prompt(own_prompt))
        added = length - 1 + (prompt_length if own_prompt != prompt else 0)
        if pending and size + added > max_tokens:
            yield _pack(batch, pending)
            pending, size = [], 0
            added = length - 1 + prompt_length
        pending.append(index)
        size, prompt = size + added, own_prompt
    if pending:
        yield _pack(batch, pending)


def _pack(batch: RolloutBatch, rollouts: list[int]) -> MicroBatch:
    input_ids: list[NDArray[np.int32]] = []
    query_lens: list[int] = []
    slots: list[IntArray] = []  # one row per sequence
    rows: list[IntArray] = []
    size, prompt, prompt_slots = 0, -1, np.empty(0, dtype=np.int64)
    for index in rollouts:
        own_prompt = int(batch.prompt_index[index])
        if own_prompt != prompt:
            prompt = own_prompt
            ids = batch.prompt(prompt)
            prompt_slots = np.arange(size, size + len(ids))
            input_ids.append(ids)
            query_lens.append(len(ids))
            slots.append(prompt_slots)
            size += len(ids)
        inputs = batch.tokens(index)[:-1]
        own_slots = np.arange(size, size + len(inputs))
        rows.append(np.concatenate((prompt_slots[-1:], own_slots)))
        if len(inputs):
            input_ids.append(inputs)
            query_lens.append(len(inputs))
            slots.append(np.concatenate((prompt_slots, own_slots)))
            size += len(inputs)
    block_table = np.zeros((len(slots), max(map(len, slots))), dtype=np.int64)
    for row, own in zip(block_table, slots, strict=True):
        row[: len(own)] = own
    metadata = AttentionMetadata(
        np.concatenate(([0], np.cumsum(query_lens))).astype(np.int64),
        np.array([len(own) for own in slots], dtype=np.int64),
        block_table,
        1,
    )
    token_index = np.concatenate(
        [np.arange(batch.offsets[i], batch.offsets[i + 1]) for i in rollouts]
    )
    rollout_index = np.repeat(
        np.asarray(rollouts, dtype=np.int64), [batch.lengths[i] for i in rollouts]
    )
    chosen = batch.response_mask[token_index]
    token_index = token_index[chosen]
    return MicroBatch(
        np.concatenate(input_ids).astype(np.int64),
        metadata,
        np.concatenate(rows)[chosen],
        batch.token_ids[token_index].astype(np.int64),
        token_index,
        rollout_index[chosen],
    )
