"""Blocks and the free list."""

import pytest

from kvcache import Block, BlockError, FreeBlockList


def make_blocks(count: int) -> list[Block]:
    return [Block(block_id) for block_id in range(count)]


def ids(free: FreeBlockList) -> list[int]:
    return [block.block_id for block in free]


def test_new_block_has_no_key_and_takes_one_only() -> None:
    """K1: no key at first; a second key without a reset is an error and changes nothing."""
    block = Block(3)
    assert (block.key, block.policy_version, block.ref_count) == (None, None, 0)
    block.set_key(b"a", 4)
    with pytest.raises(BlockError, match="block 3 already has key 61"):
        block.set_key(b"b", 5)
    assert (block.key, block.policy_version) == (b"a", 4)
    block.reset_key()
    assert (block.key, block.policy_version) == (None, None)
    block.set_key(b"b", 5)
    assert (block.key, block.policy_version) == (b"b", 5)


def test_free_list_starts_in_order_and_ends_empty() -> None:
    """K2: popped in id order; a pop from the empty list raises."""
    free = FreeBlockList(make_blocks(4))
    assert [free.popleft().block_id for _ in range(4)] == [0, 1, 2, 3]
    assert len(free) == 0
    with pytest.raises(BlockError, match="no block left"):
        free.popleft()
    assert len(free) == 0


def test_remove_from_anywhere() -> None:
    """K2: first, middle and last block can be removed; the order of the others stays."""
    blocks = make_blocks(6)
    free = FreeBlockList(blocks)
    for block_id, left in ((3, [0, 1, 2, 4, 5]), (0, [1, 2, 4, 5]), (5, [1, 2, 4])):
        free.remove(blocks[block_id])
        assert ids(free) == left
        assert len(free) == len(left)
    free.append(blocks[0])
    free.appendleft(blocks[5])
    assert ids(free) == [5, 1, 2, 4, 0]


def test_remove_touches_the_neighbours_only() -> None:
    """K2: removal is O(1): of 1,000 blocks no link changes but those of the two neighbours."""
    blocks = make_blocks(1000)
    free = FreeBlockList(blocks)
    before = [(block.prev_free, block.next_free) for block in blocks]
    free.remove(blocks[500])
    changed = [
        index
        for index, block in enumerate(blocks)
        if (block.prev_free, block.next_free) != before[index]
    ]
    assert changed == [499, 500, 501]


def test_absent_and_double_blocks_are_refused() -> None:
    """K2: removing an absent block and inserting a present one raise and change nothing."""
    blocks = make_blocks(3)
    free = FreeBlockList(blocks)
    free.remove(blocks[1])
    with pytest.raises(BlockError, match="block 1 is not on the free list"):
        free.remove(blocks[1])
    with pytest.raises(BlockError, match="block 2 is already on the free list"):
        free.append(blocks[2])
    with pytest.raises(BlockError, match="block 0 is already on the free list"):
        free.appendleft(blocks[0])
    assert ids(free) == [0, 2]
    assert len(free) == 2
