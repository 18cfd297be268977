"""Per-request block tables."""


import pytest

from kvcache import (
    NEVER,
    BlockError,
    BlockPool,
    KVCacheManager,
    PrefixStats,
    block_keys,
    root_key,
)
from tests.kvcache.tables import PROMPT, findable, run


def counts(manager: KVCacheManager[str]) -> tuple[int, int, int]:
    return manager.pool.num_free, manager.pool.num_cached, manager.pool.num_used


def test_scratch_block_is_in_no_table(manager: KVCacheManager[str]) -> None:
    """K3: a request that takes the whole pool does not get the scratch block."""
    run(manager, "all", list(range(manager.max_tokens)))
    assert list(manager.block_ids("all")) == list(range(1, 21))
    assert manager.num_free_blocks == 0


def test_two_requests_share_a_prefix(manager: KVCacheManager[str]) -> None:
    """K4: shared blocks have two holders, then one, then none; own blocks are apart."""
    run(manager, "a", [*PROMPT, 1])
    assert run(manager, "b", [*PROMPT, 2]) == 48
    a, b = manager.block_ids("a"), manager.block_ids("b")
    assert a[:3] == b[:3]
    assert a[3] != b[3]
    shared = manager.pool.blocks[a[0]]
    assert shared.ref_count == 2
    manager.free("a")
    assert shared.ref_count == 1
    assert counts(manager) == (16, 0, 4)
    manager.free("b")
    assert shared.ref_count == 0
    assert counts(manager) == (17, 3, 0)


def test_heads_live_longest(manager: KVCacheManager[str]) -> None:
    """K5: under pressure a freed sequence loses its tail first, after all unkeyed blocks."""
    run(manager, "a", [*PROMPT, 1])
    manager.free("a")
    for num_blocks, left in ((17, 3), (18, 2), (19, 1), (20, 0)):
        manager.begin("other", [0], 0)
        assert manager.grow("other", num_blocks * 16)
        manager.free("other")
        assert findable(manager, PROMPT[: left * 16]) == left
        assert findable(manager, PROMPT) == left


def test_no_hit_with_caching_off() -> None:
    """K8: a repeated prompt computes all again; tables work. Control: caching on hits."""
    for enabled in (False, True):
        manager: KVCacheManager[str] = KVCacheManager(BlockPool(21, enabled), 16)
        run(manager, "a", [*PROMPT, 1])
        manager.free("a")
        assert run(manager, "b", [*PROMPT, 1]) == (48 if enabled else 0)
        assert len(manager.block_ids("b")) == 4
        assert manager.publish("b", [*PROMPT, 1], 49) == (64 if enabled else NEVER)
        assert manager.prefix_stats() == ({0: PrefixStats(98, 48)} if enabled else {})
        manager.free("b")
        manager.check_integrity()


def test_publishing_step_by_step_equals_at_once(manager: KVCacheManager[str]) -> None:
    """K9: keys made one step at a time, in chunks of any size, are those of the whole sequence."""
    tokens = [token % 37 for token in range(100)]
    expected = block_keys(root_key(0), tokens, 16)
    for chunk in (1, 7, 16, 33, 100):
        manager.begin("a", tokens, 0)
        for end in [*range(chunk, 100, chunk), 100]:
            assert manager.grow("a", end) is not None
            assert manager.publish("a", tokens, end) == (end // 16 + 1) * 16
        keys = [manager.pool.blocks[block_id].key for block_id in manager.block_ids("a")]
        assert keys == [*expected, None]
        manager.free("a")
        manager.reset()


def test_other_version_or_salt_hits_nothing(manager: KVCacheManager[str]) -> None:
    """K10: neither the first nor any later block. Control: the same version and salt hit all."""
    tokens = [*PROMPT, 1]
    run(manager, "a", tokens, version=3, salt="x")
    others = [(3, "y"), (3, None), (4, "x"), (4, "y")]
    for version, salt in [(3, "x"), *others]:
        cached = manager.begin("b", tokens, version, salt)
        assert cached == (0 if (version, salt) in others else 48)
        manager.free("b")


@pytest.mark.parametrize("block_size", [1, 4, 16, 64])
def test_full_hit_computes_the_last_token(block_size: int) -> None:
    """K11, K18: whatever the block size, whole blocks and at most n - 1 tokens are cached."""
    manager: KVCacheManager[str] = KVCacheManager(BlockPool(300), block_size)
    tokens = [token % 11 for token in range(130)]
    run(manager, "a", tokens)
    for length in range(1, 131):
        cached = manager.begin("b", tokens[:length], 0)
        assert cached == (length - 1) // block_size * block_size
        manager.free("b")
    manager.check_integrity()


def test_only_crossing_a_block_takes_one(manager: KVCacheManager[str]) -> None:
    """K12: growing inside a block takes none, crossing takes exactly one, never shrinking."""
    manager.begin("a", [1], 0)
    for num_tokens in range(1, 65):
        taken = manager.grow("a", num_tokens)
        assert taken is not None
        assert len(taken) == (num_tokens % 16 == 1)
        assert len(manager.block_ids("a")) == (num_tokens + 15) // 16
    room = manager.grow("a", 3)
    assert room is not None and len(room) == 0
    assert len(manager.block_ids("a")) == 4
    assert counts(manager) == (16, 0, 4)


def test_growing_too_far_takes_nothing(manager: KVCacheManager[str]) -> None:
    """K12, K16: a refused grow changes nothing, and what fits is still granted."""
    run(manager, "a", PROMPT)
    before = list(manager.block_ids("a"))
    assert manager.grow("a", manager.max_tokens + 1) is None
    assert list(manager.block_ids("a")) == before
    assert manager.num_free_blocks == 17
    assert manager.grow("a", manager.max_tokens)
    assert manager.num_free_blocks == 0
    assert manager.grow("a", manager.max_tokens) == ()


def test_matched_blocks_are_not_evicted_for_their_own_request(
    manager: KVCacheManager[str],
) -> None:
    """K13: a hit on cached blocks holds them before the rest is taken, even from a full pool."""
    run(manager, "a", [*PROMPT, 1])
    manager.free("a")
    prompt = [*PROMPT, *range(17 * 16)]
    assert manager.begin("b", prompt, 0) == 48
    assert manager.num_free_blocks == 17
    assert not manager.grow("b", 20 * 16 + 1)
    assert manager.grow("b", 20 * 16)
    assert len(set(manager.block_ids("b"))) == 20
    assert findable(manager, PROMPT) == 3


def test_identical_prompts_in_one_step_share(manager: KVCacheManager[str]) -> None:
    """K14: the second request planned in a step computes only what is left."""
    prompt = [*PROMPT, 1, 2]
    assert [run(manager, request_id, prompt) for request_id in "abc"] == [0, 48, 48]
    assert counts(manager) == (14, 0, 6)
    assert manager.prefix_stats() == {0: PrefixStats(queries=150, hits=96)}


def test_output_of_turn_1_is_prefix_of_turn_2(manager: KVCacheManager[str]) -> None:
    """K15: tokens generated one by one are found as part of the next prompt."""
    tokens = PROMPT[:20]
    run(manager, "turn 1", tokens)
    while len(tokens) < 60:
        tokens = [*tokens, len(tokens)]
        assert manager.grow("turn 1", len(tokens)) is not None
        manager.publish("turn 1", tokens, len(tokens))
    manager.free("turn 1")
    assert manager.begin("turn 2", [*tokens, 7, 8, 9], 0) == 48


def test_sampled_token_is_not_published(manager: KVCacheManager[str]) -> None:
    """K17: a block that only the sampled token fills has no key until that token is computed."""
    prompt, sampled = PROMPT[:15], 5
    run(manager, "a", prompt)
    tokens = [*prompt, sampled]
    manager.publish("a", tokens, num_tokens=15)
    assert findable(manager, tokens) == 0
    assert manager.grow("a", 16) == ()
    manager.publish("a", tokens, num_tokens=16)
    assert findable(manager, tokens) == 1
    with pytest.raises(ValueError, match="num_tokens must be at most the 31 token_ids, got 32"):
        manager.publish("a", PROMPT[:31], num_tokens=32)


def test_republished_prefix_detaches_nothing(manager: KVCacheManager[str]) -> None:
    """K19: a second copy of a prefix (the last full block is always recomputed) changes nothing."""
    run(manager, "a", PROMPT)
    a = list(manager.block_ids("a"))
    assert run(manager, "b", PROMPT[:16]) == 0
    assert run(manager, "c", PROMPT) == 32
    copies = [manager.block_ids("b")[0], manager.block_ids("c")[2]]
    assert all(manager.pool.blocks[block_id].key is None for block_id in copies)
    manager.free("b")
    manager.free("c")
    assert manager.begin("d", [*PROMPT, 1], 0) == 48
    assert list(manager.block_ids("d")) == a


def test_copy_of_a_prefix_carries_its_own_continuation(manager: KVCacheManager[str]) -> None:
    """K19: blocks published behind an unkeyed copy are found behind the first publisher's."""
    run(manager, "a", PROMPT[:16])
    run(manager, "b", PROMPT[:16])
    assert manager.grow("b", 48)
    manager.publish("b", PROMPT, 48)
    assert manager.begin("c", [*PROMPT, 1], 0) == 48
    assert list(manager.block_ids("c")) == [
        *manager.block_ids("a"),
        *manager.block_ids("b")[1:],
    ]


def test_sealed_request_publishes_nothing_more(manager: KVCacheManager[str]) -> None:
    """K20: what was computed before the seal stays found, later blocks are never keyed."""
    run(manager, "a", PROMPT[:20])
    manager.seal("a")
    assert manager.grow("a", 48)
    assert manager.publish("a", PROMPT, 48) == NEVER
    assert findable(manager, PROMPT) == 1
    manager.unpublish_from("a", 20)
    assert manager.publish("a", PROMPT, 48) == NEVER
    assert findable(manager, PROMPT) == 1
    manager.free("a")
    assert counts(manager) == (19, 1, 0)


def test_withdrawn_step_is_not_published(manager: KVCacheManager[str]) -> None:
    """K21: an aborted or preempted request's planned blocks are not found, computed ones are."""
    manager.begin("a", PROMPT, 0)
    assert manager.grow("a", 20)
    manager.publish("a", PROMPT, 20)
    assert manager.grow("a", 48)
    manager.publish("a", PROMPT, 48)
    assert findable(manager, PROMPT) == 3
    manager.unpublish_from("a", 20)
    assert findable(manager, PROMPT) == 1
    manager.free("a")
    assert counts(manager) == (19, 1, 0)
    assert manager.begin("b", [*PROMPT, 1], 0) == 16


def test_withdrawn_blocks_are_published_when_computed_after_all(
    manager: KVCacheManager[str],
) -> None:
    """K21: a request that stays after a failed step publishes the same blocks again."""
    run(manager, "a", PROMPT)
    manager.unpublish_from("a", 0)
    assert findable(manager, PROMPT) == 0
    for end in (10, 40, 48):
        manager.publish("a", PROMPT, end)
        assert findable(manager, PROMPT) == end // 16


def test_withdrawn_blocks_stay_with_who_matched_them(manager: KVCacheManager[str]) -> None:
    """K14, K21: nobody finds a block of a failed step any more; its holders keep it till freed."""
    run(manager, "old", PROMPT[:16])
    run(manager, "failed", [*PROMPT, 1])
    run(manager, "matched", [*PROMPT, 2])
    manager.unpublish_from("failed", 16)
    manager.unpublish_from("matched", 48)
    assert findable(manager, PROMPT) == 1
    shared = manager.block_ids("failed")[:3]
    assert manager.block_ids("matched")[:3] == shared
    manager.free("failed")
    assert all(manager.pool.blocks[i].ref_count >= 1 for i in shared)
    manager.free("matched")
    assert manager.begin("matched", [*PROMPT, 2], 0) == 16


def test_matched_blocks_are_not_withdrawn(manager: KVCacheManager[str]) -> None:
    """K21: a failed step takes back its own blocks only, not the prefix it had matched."""
    run(manager, "a", [*PROMPT, 1])
    run(manager, "b", [*PROMPT, *range(16)])
    manager.unpublish_from("b", 0)
    assert findable(manager, [*PROMPT, *range(16)]) == 3


def test_unadmitted_request_is_not_counted(manager: KVCacheManager[str]) -> None:
    """K11: statistics count an admission once, however often it was tried or grown."""
    run(manager, "a", [*PROMPT, 1])
    for _ in range(3):
        assert manager.begin("b", [*PROMPT, 2], 0) == 48
        assert not manager.grow("b", manager.max_tokens + 1)
        manager.free("b")
    assert manager.prefix_stats() == {0: PrefixStats(49, 0)}
    run(manager, "b", [*PROMPT, 2])
    assert manager.grow("b", 100)
    run(manager, "c", [*PROMPT, 2], version=1)
    assert manager.prefix_stats() == {0: PrefixStats(98, 48), 1: PrefixStats(49, 0)}


def test_reset_is_refused_while_a_table_is_open(manager: KVCacheManager[str]) -> None:
    """K7: refused even for a table without blocks; afterwards nothing is found."""
    run(manager, "a", PROMPT)
    manager.free("a")
    manager.begin("b", [1], 0)
    with pytest.raises(BlockError, match="cannot be reset with 1 tables open"):
        manager.reset()
    assert findable(manager, PROMPT) == 3
    manager.free("b")
    manager.reset()
    assert findable(manager, PROMPT) == 0
    assert counts(manager) == (20, 0, 0)


def test_misuse_is_named_and_changes_nothing(manager: KVCacheManager[str]) -> None:
    """K16: unknown and doubled ids, empty prompts and blocks not held are refused by name."""
    run(manager, "a", PROMPT)
    for misuse in (
        lambda: manager.grow("x", 1),
        lambda: manager.publish("x", PROMPT, 1),
        lambda: manager.unpublish_from("x", 0),
        lambda: manager.seal("x"),
        lambda: manager.free("x"),
        lambda: manager.block_ids("x"),
    ):
        with pytest.raises(BlockError, match="request 'x' has no block table"):
            misuse()
    with pytest.raises(BlockError, match="request 'a' has a block table already"):
        manager.begin("a", PROMPT, 0)
    with pytest.raises(ValueError, match="token_ids of request 'b' must not be empty"):
        manager.begin("b", [], 0)
    with pytest.raises(ValueError, match="policy_version must be an int, got True"):
        manager.begin("b", PROMPT, True)
    with pytest.raises(BlockError, match="request 'a' publishes 4 blocks, holds 3"):
        manager.publish("a", [*PROMPT, *range(16)], 64)
    with pytest.raises(ValueError, match="block_size must be at least 1, got 0"):
        KVCacheManager(manager.pool, 0)
    assert manager.num_requests == 1
    assert counts(manager) == (17, 0, 3)


def test_integrity_check_has_power(manager: KVCacheManager[str]) -> None:
    """K16, control: a block held behind the tables' back is found."""
    run(manager, "a", PROMPT)
    block = manager.pool.blocks[manager.block_ids("a")[0]]
    manager.pool.retain([block])
    with pytest.raises(BlockError, match="1 tables hold it"):
        manager.check_integrity()
    manager.pool.release([block])
