"""The block pool."""

from collections.abc import Iterator

import pytest

from kvcache import SCRATCH_BLOCK_ID, Block, BlockError, BlockPool, OutOfBlocks


@pytest.fixture
def pool() -> Iterator[BlockPool]:
    pool = BlockPool(num_blocks=7)
    yield pool
    pool.check_integrity()


def ids(blocks: list[Block]) -> list[int]:
    return [block.block_id for block in blocks]


def counts(pool: BlockPool) -> tuple[int, int, int]:
    return pool.num_free, pool.num_cached, pool.num_used


def take_published(pool: BlockPool, *keys: bytes) -> list[Block]:
    blocks = pool.take(len(keys))
    for block, key in zip(blocks, keys, strict=True):
        assert pool.publish(block, key, policy_version=0)
    return blocks


def test_blocks_come_in_id_order_and_run_out(pool: BlockPool) -> None:
    """K2, K3: ids 1, 2, ... are handed out; one too many raises and takes nothing."""
    assert ids(pool.take(4)) == [1, 2, 3, 4]
    with pytest.raises(OutOfBlocks, match="3 KV blocks needed, 2 can be taken") as caught:
        pool.take(3)
    assert (caught.value.needed, caught.value.free) == (3, 2)
    assert counts(pool) == (2, 0, 4)
    assert ids(pool.take(2)) == [5, 6]
    assert pool.take(0) == []


def test_scratch_block_is_left_alone(pool: BlockPool) -> None:
    """K3: the scratch block is never handed out, and cannot be held, freed or keyed."""
    scratch = pool.blocks[SCRATCH_BLOCK_ID]
    taken = take_published(pool, *(b"%d" % index for index in range(pool.num_available)))
    assert len(taken) == pool.num_total == 6
    assert scratch not in taken
    for misuse in (
        lambda: pool.retain([scratch]),
        lambda: pool.release([scratch]),
        lambda: pool.publish(scratch, b"key", 0),
    ):
        with pytest.raises(BlockError, match="block 0"):
            misuse()
    pool.unpublish(scratch)
    pool.release(reversed(taken))
    assert scratch not in pool.take(6)


def test_shared_block_is_free_when_the_last_holder_leaves(pool: BlockPool) -> None:
    """K4: two holders: 2; one leaves: 1; the last leaves: cached, or free if it has no key."""
    keyed, plain = pool.take(2)
    pool.publish(keyed, b"key", 0)
    pool.retain([keyed, plain])
    assert (keyed.ref_count, plain.ref_count) == (2, 2)
    pool.release([keyed, plain])
    assert (keyed.ref_count, plain.ref_count) == (1, 1)
    assert counts(pool) == (4, 0, 2)
    pool.release([keyed, plain])
    assert (keyed.ref_count, plain.ref_count) == (0, 0)
    assert counts(pool) == (5, 1, 0)
    assert pool.lookup(b"key") is keyed


def test_unkeyed_blocks_are_reused_first_then_the_longest_unused(pool: BlockPool) -> None:
    """K5: free blocks go before cached ones; of a sequence freed tail first the head goes last."""
    sequence = take_published(pool, b"head", b"middle", b"tail")
    plain = pool.take(1)
    pool.release(reversed(sequence))
    pool.release(plain)
    order = ids(pool.take(6))
    assert order[0] == plain[0].block_id
    assert order[1:3] == [5, 6]
    assert order[3:] == [3, 2, 1]


def test_touched_block_is_not_evicted(pool: BlockPool) -> None:
    """K5: a hit makes a block the latest used; while held it cannot be evicted at all."""
    old, new = take_published(pool, b"old", b"new")
    pool.release([old])
    pool.release([new])
    pool.retain([old])
    assert counts(pool) == (4, 1, 1)
    pool.release([old])
    pool.release(pool.take(5))
    assert pool.lookup(b"old") is old
    assert pool.lookup(b"new") is None
    pool.retain([old])
    assert old not in pool.take(5)
    assert pool.lookup(b"old") is old


def test_reused_block_loses_its_key(pool: BlockPool) -> None:
    """K6: whoever takes a cached block over, its old content is not found any more."""
    blocks = take_published(pool, *(b"%d" % index for index in range(6)))
    pool.release(reversed(blocks))
    assert counts(pool) == (0, 6, 0)
    (taken,) = pool.take(1)
    assert taken is blocks[5]
    assert (taken.key, taken.policy_version) == (None, None)
    assert pool.lookup(b"5") is None
    assert pool.publish(taken, b"other", 0)
    assert pool.lookup(b"other") is taken


def test_reset_is_refused_while_blocks_are_held(pool: BlockPool) -> None:
    """K7: refused, nothing changed; then it forgets all and starts again in id order."""
    first, second = take_published(pool, b"first", b"second")
    pool.release([first])
    with pytest.raises(BlockError, match="cannot be reset while 1 blocks are held"):
        pool.reset()
    assert pool.lookup(b"first") is first
    assert pool.lookup(b"second") is second
    assert counts(pool) == (4, 1, 1)
    pool.release([second])
    pool.reset()
    assert counts(pool) == (6, 0, 0)
    assert pool.lookup(b"first") is None
    assert ids(pool.take(6)) == [1, 2, 3, 4, 5, 6]


def test_no_hit_with_caching_off() -> None:
    """K8: nothing is published, allocation works. Control: the same with caching on hits."""
    for enabled in (False, True):
        pool = BlockPool(4, enable_prefix_caching=enabled)
        blocks = pool.take(3)
        assert pool.publish(blocks[0], b"key", 0) is enabled
        pool.release(blocks)
        assert (pool.lookup(b"key") is blocks[0]) is enabled
        assert pool.num_cached == enabled
        assert len(pool.take(3)) == 3
        pool.check_integrity()


def test_double_free_is_refused(pool: BlockPool) -> None:
    """K16: a block that nobody holds cannot be released, published or, without key, retained."""
    (block,) = pool.take(1)
    pool.release([block])
    with pytest.raises(BlockError, match="block 1 is released but nobody holds it"):
        pool.release([block])
    with pytest.raises(BlockError, match="block 1 is published but nobody holds it"):
        pool.publish(block, b"key", 0)
    with pytest.raises(BlockError, match="block 1 has no content to retain"):
        pool.retain([block])
    assert counts(pool) == (6, 0, 0)


def test_first_publisher_keeps_the_key(pool: BlockPool) -> None:
    """K19: a second block with the same content stays without key and changes nothing."""
    first, second = pool.take(2)
    assert pool.publish(first, b"key", 0)
    assert not pool.publish(second, b"key", 0)
    assert pool.lookup(b"key") is first
    assert second.key is None
    pool.release([second])
    assert counts(pool) == (5, 0, 1)
    assert pool.lookup(b"key") is first


@pytest.mark.parametrize("other_key", [b"key", b"other"])
def test_keyed_block_is_not_published_again(pool: BlockPool, other_key: bytes) -> None:
    """K1: a block has one key at a time."""
    (block,) = take_published(pool, b"key")
    with pytest.raises(BlockError, match="block 1 already has key"):
        pool.publish(block, other_key, 0)
    assert pool.lookup(b"key") is block


def test_unpublish_leaves_the_holders(pool: BlockPool) -> None:
    """K21: a block whose key is taken back stays held; a cached one is free and taken next."""
    held, cached = take_published(pool, b"held", b"cached")
    pool.release([cached])
    pool.unpublish(held)
    pool.unpublish(cached)
    pool.unpublish(cached)
    assert pool.lookup(b"held") is None
    assert pool.lookup(b"cached") is None
    assert held.ref_count == 1
    assert counts(pool) == (5, 0, 1)
    assert pool.take(1) == [cached]


def test_bad_sizes_are_named() -> None:
    """K3: a pool needs a block beside the scratch block; a count cannot be negative."""
    with pytest.raises(ValueError, match=r"num_blocks must be at least 2.*got 1"):
        BlockPool(1)
    with pytest.raises(ValueError, match="num_blocks must be at least 0, got -1"):
        BlockPool(2).take(-1)


@pytest.mark.parametrize(
    ("attribute", "value"),
    [
        ("ref_count", 0),
        ("ref_count", -1),
        ("key", b"other"),
        ("key", None),
        ("policy_version", None),
        ("policy_version", 1),
    ],
)
def test_integrity_check_has_power(attribute: str, value: object) -> None:
    """K16, control: damage to any field of a block is found."""
    pool = BlockPool(4)
    (block,) = take_published(pool, b"key")
    pool.check_integrity()
    setattr(block, attribute, value)
    with pytest.raises(BlockError):
        pool.check_integrity()
