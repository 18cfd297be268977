"""A new version of the weights: what is found, taken and published before and after."""

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from kvcache import (
    NEVER,
    Block,
    BlockError,
    BlockPool,
    KVCacheManager,
    PrefixStats,
)
from tests.kvcache.tables import PROMPT, findable, run


@pytest.fixture
def pool() -> Iterator[BlockPool]:
    pool = BlockPool(num_blocks=9)
    yield pool
    pool.check_integrity()


def take_published(pool: BlockPool, version: int, *keys: bytes) -> list[Block]:
    blocks = pool.take(len(keys))
    for block, key in zip(blocks, keys, strict=True):
        assert pool.publish(block, key, version)
    return blocks


def counts(pool: BlockPool) -> tuple[int, int, int]:
    return pool.num_free, pool.num_cached, pool.num_used


def lines_run(call: Callable[[], object]) -> int:
    """Lines of Python executed by call: what it does, counted instead of timed."""
    lines = 0

    def count(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        call()
    finally:
        sys.settrace(before)
    return lines


def test_old_versions_leave_nothing_findable(pool: BlockPool) -> None:
    """K10, W12: cached and held blocks of older weights are not found; newer ones are."""
    held, cached = take_published(pool, 0, b"held", b"cached")
    pool.release([cached])
    pool.advance_version(3)
    (new,) = take_published(pool, 3, b"new")
    assert [pool.lookup(key) for key in (b"held", b"cached", b"new")] == [None, None, new]
    assert counts(pool) == (6, 0, 2)
    assert held.ref_count == 1


def test_versions_only_rise(pool: BlockPool) -> None:
    """W2, K10: the live version again changes nothing; lower or no version at all is refused."""
    pool.advance_version(5)
    (block,) = take_published(pool, 5, b"key")
    pool.release([block])
    pool.advance_version(5)
    assert pool.lookup(b"key") is block
    for version in (4, 0, -1, True, 6.0, "6", None):
        with pytest.raises(ValueError, match="policy_version must be"):
            pool.advance_version(version)  # type: ignore[arg-type]
    assert pool.policy_version == 5
    assert pool.lookup(b"key") is block
    assert counts(pool) == (7, 1, 0)


def test_taken_in_order_no_key_stale_cached(pool: BlockPool) -> None:
    """K5, K6: blocks of retired weights go after those without key, before all live content."""
    stale = take_published(pool, 0, b"s0", b"s1", b"s2")
    plain = pool.take(2)
    pool.release(stale)
    pool.advance_version(1)
    live = take_published(pool, 1, b"l0", b"l1", b"l2")  # the last three without key
    pool.release(reversed(live))
    pool.release(plain)
    assert counts(pool) == (5, 3, 0)
    order = pool.take(8)
    assert order == [*reversed(plain), *stale, *reversed(live)]
    assert all(block.key is None for block in order)
    assert all(pool.lookup(key) is None for key in (b"s0", b"s1", b"s2", b"l0", b"l1", b"l2"))


def test_held_block_of_old_weights_comes_back_first(pool: BlockPool) -> None:
    """K5, K20: released by its last holder it has no key and is the next to be taken."""
    shared, cached = take_published(pool, 0, b"shared", b"cached")
    pool.retain([shared])
    pool.release([cached])
    pool.advance_version(1)
    (live,) = take_published(pool, 1, b"live")
    pool.release([live])
    pool.release([shared])
    assert shared.key == b"shared"
    pool.release([shared])
    assert (shared.key, shared.policy_version) == (None, None)
    assert counts(pool) == (7, 1, 0)
    assert pool.take(1) == [shared]
    assert pool.lookup(b"live") is live


def test_stale_block_has_no_content(pool: BlockPool) -> None:
    """K10: a block found before the new version can not be held for its content after it."""
    (block,) = take_published(pool, 0, b"key")
    pool.release([block])
    pool.advance_version(1)
    with pytest.raises(BlockError, match="block 1 has no content to retain"):
        pool.retain([block])
    pool.unpublish(block)
    assert counts(pool) == (8, 0, 0)
    assert pool.take(1) == [block]


@pytest.mark.parametrize("is_held", [True, False])
def test_key_of_a_retired_block_can_be_published_again(pool: BlockPool, is_held: bool) -> None:
    """K19: a live block takes a key over from a retired one, which is left without."""
    (old,) = take_published(pool, 0, b"key")
    if not is_held:
        pool.release([old])
    pool.advance_version(1)
    (new,) = take_published(pool, 1, b"key")
    assert pool.lookup(b"key") is new
    assert (old.key, old.ref_count) == (None, int(is_held))
    pool.check_integrity()
    pool.release([new])
    assert counts(pool) == (7 - is_held, 1, int(is_held))


def test_publishing_under_another_version_says_no(pool: BlockPool) -> None:
    """K20: retired weights publish nothing; a version not reached yet is the caller's bug."""
    (block,) = pool.take(1)
    pool.advance_version(2)
    assert not pool.publish(block, b"key", 1)
    assert block.key is None
    with pytest.raises(ValueError, match="at most the live 2, got 3; call advance_version"):
        pool.publish(block, b"key", 3)
    assert pool.publish(block, b"key", 2)


def test_reset_clears_stale_and_cached_blocks(pool: BlockPool) -> None:
    """K7: after a reset there is no key left, ids come in order, and the version stands."""
    pool.release(take_published(pool, 0, b"s0", b"s1", b"s2"))
    pool.advance_version(4)
    (live,) = take_published(pool, 4, b"live")
    pool.release([live])
    pool.reset()
    assert counts(pool) == (8, 0, 0)
    assert all(block.key is None for block in pool.blocks)
    assert [block.block_id for block in pool.take(8)] == list(range(1, 9))
    assert pool.policy_version == 4


def test_request_that_spans_versions_is_never_found(manager: KVCacheManager[str]) -> None:
    """K20, W12: what goes on under new weights is not found under either version."""
    run(manager, "old", PROMPT)
    run(manager, "done", [*range(32), 1])
    manager.free("done")
    manager.advance_version(1)
    longer = [*PROMPT, *range(16)]
    assert manager.grow("old", 64)
    assert manager.publish("old", longer, 50) == NEVER
    assert manager.publish("old", longer, 64) == NEVER
    for version in (0, 1):
        assert findable(manager, longer, version) == findable(manager, [*range(32)], version) == 0
    with pytest.raises(ValueError, match="policy_version must be at least the live 1, got 0"):
        manager.begin("late", PROMPT, 0)
    assert run(manager, "new", PROMPT, version=1) == 0
    assert manager.begin("newer", [*PROMPT, 1], 1) == 48
    manager.free("old")
    assert findable(manager, longer, 1) == 3
    assert counts(manager.pool) == (17, 0, 3)


def test_failed_step_of_a_retired_request(manager: KVCacheManager[str]) -> None:
    """K20, K21: taking blocks back works across a new version and publishes none again."""
    run(manager, "old", [*PROMPT, 1])
    run(manager, "finder", [*PROMPT, 2])
    manager.advance_version(1)
    manager.unpublish_from("old", 16)
    assert manager.publish("old", [*PROMPT, 1], 49) == NEVER
    manager.free("old")
    manager.free("finder")
    assert counts(manager.pool) == (20, 0, 0)


def test_begin_under_newer_weights_retires_the_older(manager: KVCacheManager[str]) -> None:
    """K10, K20: there is one set of weights, so a first request of a new version ends the old."""
    run(manager, "old", PROMPT)
    assert run(manager, "new", PROMPT, version=7) == 0
    assert manager.pool.policy_version == 7
    assert manager.publish("old", PROMPT, 48) == NEVER
    with pytest.raises(ValueError, match="policy_version must be at least the live 7, got 6"):
        manager.advance_version(6)


def test_statistics_are_bounded_by_version(manager: KVCacheManager[str]) -> None:
    """W10: hundreds of versions leave the latest 64 counters, and no blocks."""
    for version in range(200):
        manager.advance_version(version)
        run(manager, "a", PROMPT, version)
        assert run(manager, "b", PROMPT, version) == 32
        manager.free("a")
        manager.free("b")
        assert counts(manager.pool) == (17, 3, 0)
    stats = manager.prefix_stats()
    assert sorted(stats) == list(range(136, 200))
    assert set(stats.values()) == {PrefixStats(96, 32)}


def test_cost_does_not_depend_on_blocks_or_tables() -> None:
    """K2, K16: no call of the hot loop visits other blocks or tables than its own."""

    def cost_of_a_life(num_others: int) -> list[int]:
        manager: KVCacheManager[int] = KVCacheManager(BlockPool(16 + 6 * num_others), 16)
        for index in range(num_others):
            tokens = [index] * 48
            manager.begin(index, tokens, 0)
            manager.grow(index, 48)
            manager.publish(index, tokens, 48)
            if index % 2:
                manager.free(index)
        tokens = [*PROMPT, 1]
        return [
            lines_run(call)
            for version in (0, 1)
            for call in (
                lambda version=version: manager.advance_version(version),
                lambda version=version: manager.begin(-1, tokens, version),
                lambda: manager.grow(-1, 49),
                lambda: manager.publish(-1, tokens, 49),
                lambda version=version: manager.begin(-2, [*PROMPT, 2], version),
                lambda: manager.unpublish_from(-1, 16),
                lambda: manager.free(-2),
                lambda: manager.seal(-1),
                lambda: manager.free(-1),
            )
        ]

    assert cost_of_a_life(400) == cost_of_a_life(4)
    assert lines_run(lambda: [None for _ in range(400)]) > lines_run(lambda: [None])  # it counts
