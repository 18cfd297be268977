"""Packing of rollouts into micro-batches."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout import RolloutBatch
from rollout.request import Rollout
from trainer_bridge.trajectory import micro_batches

PROMPT = st.lists(st.integers(2, 90), min_size=1, max_size=9)
RESPONSES = st.lists(st.lists(st.integers(2, 90), max_size=7), min_size=1, max_size=4)


def batch_of(groups: list[tuple[list[int], list[list[int]]]]) -> RolloutBatch:
    return RolloutBatch.from_rollouts(
        [
            Rollout(
                g, s, prompt, tokens, [0.0] * len(tokens), [0.0] * len(tokens), (),
                "stop", None, None, None, 0, 1.0,
            )
            for g, (prompt, responses) in enumerate(groups)
            for s, tokens in enumerate(responses)
        ]
    )


@given(st.lists(st.tuples(PROMPT, RESPONSES), min_size=1, max_size=4), st.integers(1, 60))
def test_every_response_token_is_scored_once_at_the_token_before_it(groups, budget):
    batch = batch_of(groups)
    covered: list[int] = []
    for micro in micro_batches(batch, range(len(batch)), budget):
        metadata = micro.metadata
        table = metadata.slot_table(int(metadata.seq_lens.max()))
        sequence = metadata.token_sequence
        for row, target, place, index in zip(
            micro.rows, micro.targets, micro.token_index, micro.rollout_index, strict=True
        ):
            offset = place - batch.offsets[index]
            whole = [*batch.prompt(batch.prompt_index[index]), *batch.tokens(index)]
            context = whole[: len(batch.prompt(batch.prompt_index[index])) + offset]
            assert target == whole[len(context)]
            position = metadata.positions[row]
            assert position == len(context) - 1
            seen = micro.input_ids[table[sequence[row], : position + 1]]
            assert seen.tolist() == context  # what this row attends to is its own context
        lengths = {int(batch.prompt_index[i]) for i in micro.rollout_index}
        if len(set(micro.rollout_index.tolist())) > 1:
            assert len(micro.input_ids) <= budget
        unshared = sum(len(batch.prompt(p)) for p in lengths) + sum(
            int(batch.lengths[i]) - 1 for i in set(micro.rollout_index.tolist())
        )
        assert len(micro.input_ids) == unshared  # each prompt once
        covered += micro.token_index.tolist()
    assert covered == list(range(batch.num_tokens))


def test_nothing_to_score():
    assert list(micro_batches(batch_of([([5], [[]])]), [0], 100)) == []
    with pytest.raises(ValueError, match="max_tokens"):
        list(micro_batches(batch_of([([5], [[1]])]), [0], 0))


def test_a_response_of_one_token_needs_only_the_prompt():
    (micro,) = micro_batches(batch_of([([5, 6], [[7], [8]])]), [0, 1], 100)
    assert micro.input_ids.tolist() == [5, 6]
    assert micro.rows.tolist() == [1, 1]
    assert micro.targets.tolist() == [7, 8]
    assert np.array_equal(micro.metadata.seq_lens, [2])
