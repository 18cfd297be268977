"""What a caller needs who keeps block tables as rows of an array and asks at block borders only."""

import sys

import numpy as np
import pytest

from kvcache import NEVER, BlockPool, KVCacheManager, PrefixStats
from tests.kvcache.tables import PROMPT, findable, run


def test_grow_gives_the_ids_that_extend_the_table(manager: KVCacheManager[str]) -> None:
    """K12: matched ids and what every grow() gave, one after the other, are the block table."""
    run(manager, "a", [*PROMPT, 1])
    assert manager.begin("b", [*PROMPT, 2], 0) == 48
    row = list(manager.block_ids("b"))
    for num_tokens in (49, 60, 64, 65, 200, 199, 201):
        taken = manager.grow("b", num_tokens)
        assert taken is not None
        row += taken
        assert row == list(manager.block_ids("b"))
    assert len(row) == 13


def test_unmatched_request_publishes_and_is_not_counted(manager: KVCacheManager[str]) -> None:
    """K14, K19: match=False computes every position, beside a cached copy and before others."""
    tokens = [*PROMPT, 1]
    assert manager.begin("first", tokens, 0, match=False) == 0
    assert manager.grow("first", 49)
    assert manager.publish("first", tokens, 49) == 64
    assert manager.prefix_stats() == {}
    assert run(manager, "b", tokens) == 48
    assert manager.begin("again", tokens, 0, match=False) == 0
    assert manager.grow("again", 49)
    manager.publish("again", tokens, 49)
    assert set(manager.block_ids("again")).isdisjoint(manager.block_ids("b"))
    assert all(manager.pool.blocks[i].key is None for i in manager.block_ids("again"))
    assert manager.prefix_stats() == {0: PrefixStats(49, 48)}


def test_array_tokens_are_those_of_lists(manager: KVCacheManager[str]) -> None:
    """K9, K15: arrays, also a row with room to spare, find what lists published and vice versa."""
    row = np.full(64, -1, np.int32)
    row[:48] = PROMPT
    manager.begin("array", row[:20], 0)
    assert manager.grow("array", 48)
    assert manager.publish("array", row, 20) == 32
    assert findable(manager, PROMPT) == 1
    assert manager.publish("array", row[:48], 48) == 64
    assert findable(manager, PROMPT) == 3
    assert manager.begin("list", [*PROMPT, 1], 0) == 48
    assert manager.begin("array 2", row, 0) == 48
    with pytest.raises(ValueError, match="token_ids of request 'b' must not be empty"):
        manager.begin("b", row[:0], 0)


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_asking_at_borders_only_is_asking_always(block_size: int) -> None:
    """K9, K12, K18: a caller that waits for the border each call named misses no block."""
    tokens = np.arange(100, dtype=np.int32) % 7
    always, borders = (KVCacheManager[int](BlockPool(101), block_size) for _ in range(2))
    for manager in (always, borders):
        manager.begin(0, tokens[:5], 0)
    row: list[int] = []
    publish_at, num_calls = 0, 0
    for end in range(5, 101):
        assert always.grow(0, end) is not None
        always.publish(0, tokens[:end], end)
        if end > len(row) * block_size:
            taken = borders.grow(0, end)
            assert taken
            row += taken
        if end >= publish_at:
            num_calls += 1
            publish_at = borders.publish(0, tokens[:end], end)
            assert publish_at > end
    assert row == list(always.block_ids(0)) == list(borders.block_ids(0))
    assert [b.key for b in borders.pool.blocks] == [b.key for b in always.pool.blocks]
    assert num_calls <= 100 // block_size + 1


def test_never_is_out_of_reach(manager: KVCacheManager[str]) -> None:
    """K20: the answer of a sealed request is a number that no count of tokens reaches."""
    assert NEVER == sys.maxsize
    assert np.int64(NEVER) == NEVER  # a column of int64 can hold it
    manager.begin("a", PROMPT, 0)
    manager.seal("a")
    assert manager.publish("a", PROMPT, 0) == NEVER
