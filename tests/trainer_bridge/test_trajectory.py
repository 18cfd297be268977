"""Packing of rollouts into micro-batches."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout import RolloutBatch
from rollout.request import Rollout
from trainer_bridge.trajectory import MicroBatch, micro_batches

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
        table = metadata.slots(np.arange(len(metadata.seq_lens)), 0, int(metadata.seq_lens.max()))
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


def naive_packs(batch: RolloutBatch, order: list[int], budget: int) -> list[list[int]]:
    """Rollouts of each pack, by the docstring's words: in order, until the next would not fit."""
    packs: list[list[int]] = []
    for index in order:
        if not batch.lengths[index]:
            continue
        if packs and len(naive_inputs(batch, [*packs[-1], index])) <= budget:
            packs[-1].append(index)
        else:
            packs.append([index])
    return packs


def naive_inputs(batch: RolloutBatch, pack: list[int]) -> list[int]:
    """Prompt, then the responses without their last tokens; no prompt twice in a row."""
    found: list[int] = []
    previous = None
    for index in pack:
        rollout = batch[index]
        if rollout.prompt_index != previous:
            found += rollout.prompt_token_ids
            previous = rollout.prompt_index
        found += rollout.token_ids[:-1]
    return found


def naive_rows(batch: RolloutBatch, pack: list[int]) -> list[int]:
    """Input row of the token before each response token."""
    rows: list[int] = []
    size, last, previous = 0, -1, None
    for index in pack:
        rollout = batch[index]
        if rollout.prompt_index != previous:
            size += len(rollout.prompt_token_ids)
            last, previous = size - 1, rollout.prompt_index
        inputs = len(rollout.token_ids) - 1
        rows += [last, *range(size, size + inputs)]
        size += inputs
    return rows


@given(
    st.lists(st.tuples(PROMPT, RESPONSES), min_size=1, max_size=4),
    st.integers(1, 60),
    st.randoms(use_true_random=False),
)
def test_packs_equal_a_naive_construction(groups, budget, random):
    """Any subset in any order: a minibatch that cuts through groups, or a shuffled one."""
    batch = batch_of(groups)
    order = random.sample(range(len(batch)), random.randint(1, len(batch)))
    expected = naive_packs(batch, order, budget)
    for micro, pack in zip(micro_batches(batch, order, budget), expected, strict=True):
        assert micro.input_ids.tolist() == naive_inputs(batch, pack)
        assert micro.rows.tolist() == naive_rows(batch, pack)
        assert micro.targets.tolist() == [t for i in pack for t in batch[i].token_ids]
        assert micro.rollout_index.tolist() == [i for i in pack for _ in batch[i].token_ids]
        assert micro.token_index.tolist() == [
            t for i in pack for t in range(batch.offsets[i], batch.offsets[i + 1])
        ]
        assert micro.metadata.num_tokens == len(micro.input_ids)
        slots = micro.metadata.slot_mapping
        assert slots.tolist() == list(range(len(micro.input_ids)))  # stored where it lies


def sizes(micros: list[MicroBatch]) -> list[int]:
    return [len(micro.input_ids) for micro in micros]


def test_a_group_is_continued_with_its_prompt_again():
    """The border is exact: 4 + 2 + 2 tokens fit a budget of 8 and not one of 7."""
    batch = batch_of([([5, 6, 7, 8], [[10, 11, 12], [20, 21, 22], [30, 31, 32]])])
    assert sizes(list(micro_batches(batch, range(3), 10))) == [10]
    assert sizes(list(micro_batches(batch, range(3), 8))) == [8, 6]
    assert sizes(list(micro_batches(batch, range(3), 7))) == [6, 6, 6]
    last = list(micro_batches(batch, range(3), 8))[1]
    assert last.input_ids.tolist() == [5, 6, 7, 8, 30, 31]
    assert last.rows.tolist() == [3, 4, 5]
    assert last.token_index.tolist() == [6, 7, 8]


def test_a_rollout_longer_than_the_budget_goes_alone():
    batch = batch_of([([5], [[7]]), ([6] * 9, [[8] * 5]), ([5], [[9]])])
    assert sizes(list(micro_batches(batch, range(3), 4))) == [1, 13, 1]


def test_empty_rollouts_are_passed_over():
    """R6: a rejected one, its empty prompt included, leaves the packs as they are without it."""
    groups = [([5, 6], [[7, 8], [], [9]]), ([], [[]]), ([3], [[4]])]
    packed = list(micro_batches(batch_of(groups), range(5), 100))
    (micro,) = packed
    assert micro.input_ids.tolist() == [5, 6, 7, 3]
    assert micro.rows.tolist() == [1, 2, 1, 3]
    assert micro.rollout_index.tolist() == [0, 0, 2, 4]
    assert micro.token_index.tolist() == [0, 1, 2, 3]


def test_equal_prompts_of_two_groups_are_computed_each():
    """Only rollouts with the same prompt index share; ids alone do not merge groups."""
    (micro,) = micro_batches(batch_of([([5, 6], [[7]]), ([5, 6], [[7]])]), [0, 1], 100)
    assert micro.input_ids.tolist() == [5, 6, 5, 6]
    assert micro.rows.tolist() == [1, 3]
