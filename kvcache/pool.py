"""The pool of KV blocks: who is free, who is held, and which block holds which content.

Every block but the scratch block is in exactly one of three states:

    state    holders   content
    FREE     none      no key: nothing to find. Or STALE: a key of retired weights, never found
    CACHED   none      found by its key, computed under the live version of the weights
    USED     1 or more keyed or not

              take                       release: no key, or a key of retired weights (dropped)
    FREE ----------------> USED ------------------------------------------------------> FREE
    CACHED --------------> USED ------------------------------------------------------> CACHED
       take = eviction           release: key of the live version
       retain = prefix hit
    CACHED -----------------------------------------> FREE (STALE)
               advance_version: all at once, no block is visited

    free list:  | no key | STALE | CACHED, longest unused ... CACHED, latest used |
                ^ taken first                                        taken last ^
                '-- num_free ----'------------------ num_cached ------------------'

A new version needs no walk: cached blocks are the end of the list, so setting num_cached to 0
turns all of them into stale ones where they stand. Their keys go when the blocks are taken.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvcache.block import SCRATCH_BLOCK_ID, Block, BlockError, FreeBlockList
from kvcache.keys import check_policy_version

_NO_KEY_RANK, _STALE_RANK, _CACHED_RANK = range(3)


class OutOfBlocks(RuntimeError):
    """More blocks were asked for than are held by no request; nothing was taken."""

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(f"{needed} KV blocks needed, {free} can be taken")
        self.needed = needed
        self.free = free


class BlockPool:
    """Owns the Block records of one KV storage of num_blocks blocks, the scratch block included.

    Not thread-safe: one scheduler mutates it. The counters may be read from any thread.
    Blocks handed out stay owned by the pool: a holder may read them, and changes them through it.
    """

    __slots__ = (
        "_by_key",
        "_free",
        "_num_cached",
        "_policy_version",
        "blocks",
        "enable_prefix_caching",
    )

    def __init__(self, num_blocks: int, enable_prefix_caching: bool = True) -> None:
        if num_blocks < 2:
            raise ValueError(
                f"num_blocks must be at least 2 (one is the scratch block), got {num_blocks}"
            )
        self.blocks = tuple(Block(block_id) for block_id in range(num_blocks))
        self.enable_prefix_caching = enable_prefix_caching
        self._free = FreeBlockList(self.blocks[SCRATCH_BLOCK_ID + 1 :])
        self._by_key: dict[bytes, Block] = {}
        self._num_cached = 0
        self._policy_version = 0

    @property
    def policy_version(self) -> int:
        """The live version of the weights: content of older ones is retired."""
        return self._policy_version

    @property
    def num_total(self) -> int:
        """Blocks that can be handed out: all but the scratch block."""
        return len(self.blocks) - 1

    @property
    def num_available(self) -> int:
        """Blocks that take() can hand out now: free (stale ones included) and cached ones."""
        return len(self._free)

    @property
    def num_free(self) -> int:
        """Blocks without holder and without key, or with a key of retired weights."""
        return len(self._free) - self._num_cached

    @property
    def num_cached(self) -> int:
        """Blocks without holder that a lookup can still find."""
        return self._num_cached

    @property
    def num_used(self) -> int:
        """Blocks that some request holds, each counted once."""
        return self.num_total - len(self._free)

    def take(self, num_blocks: int) -> list[Block]:
        """Hand out num_blocks blocks with one holder and no key.

        Free blocks come first, then stale ones, then those longest unused among the cached.
        OutOfBlocks if fewer can be taken; then nothing changes.
        """
        if num_blocks < 0:
            raise ValueError(f"num_blocks must be at least 0, got {num_blocks}")
        if num_blocks > len(self._free):
            raise OutOfBlocks(num_blocks, len(self._free))
        taken: list[Block] = []
        for _ in range(num_blocks):
            block = self._free.popleft()
            if block.key is not None:
                if block.policy_version == self._policy_version:
                    self._num_cached -= 1
                self._drop_key(block)
            block.ref_count = 1
            taken.append(block)
        return taken

    def lookup(self, key: bytes) -> Block | None:
        """The block published under key by the live version, if any.

        It may be evicted by the next take: retain it.
        """
        block = self._by_key.get(key)
        if block is None or block.policy_version != self._policy_version:
            return None
        return block

    def retain(self, blocks: Iterable[Block]) -> None:
        """Add one holder to each block; a cached one thereby leaves the free list.

        BlockError for the scratch block and for a free one, stale or without key: it has no
        content that anybody could want.
        """
        for block in blocks:
            if block.ref_count == 0:
                if block.key is None or block.policy_version != self._policy_version:
                    raise BlockError(f"block {block.block_id} has no content to retain")
                self._free.remove(block)
                self._num_cached -= 1
            block.ref_count += 1

    def release(self, blocks: Iterable[Block]) -> None:
        """Take one holder off each block, in the given order; give a sequence's tail first.

        A keyed block without holders becomes the latest used of the cached ones, so of one
        sequence the head, given last, lives longest. A block without key is taken next of all;
        so is one of retired weights, which loses its key here.
        BlockError for a block nobody holds; the blocks given before it are released then.
        """
        for block in blocks:
            if block.ref_count == 0:
                raise BlockError(f"block {block.block_id} is released but nobody holds it")
            block.ref_count -= 1
            if block.ref_count > 0:
                continue
            if block.key is not None and block.policy_version == self._policy_version:
                self._free.append(block)
                self._num_cached += 1
            else:
                self._drop_key(block)
                self._free.appendleft(block)

    def publish(self, block: Block, key: bytes, policy_version: int) -> bool:
        """Make a held block findable under key; True if lookup(key) now gives this block.

        The first publisher of a key keeps it: a second block with the same content stays without
        key, so that holders and finders of the first see no change. False too with caching off
        and for content of retired weights. BlockError for a block that nobody holds or that
        already has a key, ValueError for a version that advance_version() has not reached.
        """
        if block.ref_count == 0:
            raise BlockError(f"block {block.block_id} is published but nobody holds it")
        if policy_version > self._policy_version:
            raise ValueError(
                f"policy_version must be at most the live {self._policy_version}, "
                f"got {policy_version}; call advance_version first"
            )
        if block.key is None:
            if not self.enable_prefix_caching or policy_version < self._policy_version:
                return False
            owner = self._by_key.get(key)
            if owner is not None:
                if owner.policy_version == self._policy_version:
                    return False
                self.unpublish(owner)
        block.set_key(key, policy_version)
        self._by_key[key] = block
        return True

    def unpublish(self, block: Block) -> None:
        """Make a block unfindable; its holders keep it. Does nothing to a block without key."""
        if block.key is None:
            return
        if block.ref_count == 0:
            if block.policy_version == self._policy_version:
                self._num_cached -= 1
            self._free.remove(block)
            self._free.appendleft(block)
        self._drop_key(block)

    def advance_version(self, policy_version: int) -> None:
        """Make policy_version the live one: no block of an older version is found any more.

        O(1). Cached blocks become stale, at once and where they stand; held ones lose their key
        when the last holder releases them. The live version again: nothing happens.
        ValueError for a lower version, or one that is not an int ≥ 0.
        """
        check_policy_version(policy_version)
        if policy_version < self._policy_version:
            raise ValueError(
                f"policy_version must be at least the live {self._policy_version}, "
                f"got {policy_version}"
            )
        if policy_version > self._policy_version:
            self._policy_version = policy_version
            self._num_cached = 0

    def reset(self) -> None:
        """Forget all content and put the free list back in id order; the version stays.

        O(number of blocks). BlockError while any block is held; then nothing changes.
        """
        if self.num_used:
            raise BlockError(f"the pool cannot be reset while {self.num_used} blocks are held")
        self.clear()

    def clear(self) -> None:
        """Forget everything, who holds what included; the version stays.

        For whoever cannot tell any more how far an interrupted call came. Blocks handed out
        before are no one's from now on.
        """
        for block in self.blocks:
            block.reset_key()
            block.ref_count = 0
            block.prev_free = block.next_free = None
        self._free = FreeBlockList(self.blocks[SCRATCH_BLOCK_ID + 1 :])
        self._by_key.clear()
        self._num_cached = 0

    def check_integrity(self) -> None:
        """BlockError naming what is inconsistent; O(number of blocks), for tests and idle times."""
        listed = list(self._free)
        listed_ids = {block.block_id for block in listed}
        if not len(listed) == len(listed_ids) == len(self._free):
            raise BlockError(f"the free list holds {len(listed)} blocks, not {len(self._free)}")
        for block in self.blocks:
            fault = self._fault(block, block.block_id in listed_ids)
            if fault:
                raise BlockError(f"{block}: {fault}")
        num_keyed = sum(block.key is not None for block in self.blocks)
        if num_keyed != len(self._by_key):
            raise BlockError(f"{len(self._by_key)} keys are known for {num_keyed} keyed blocks")
        order = [self._rank(block) for block in listed]
        num_cached = order.count(_CACHED_RANK)
        if num_cached != self._num_cached:
            raise BlockError(f"num_cached is {self._num_cached}, but {num_cached} blocks are")
        if order != sorted(order):
            raise BlockError("the free list is not: no key, then stale, then cached")
        if self.num_free + self.num_cached + self.num_used != self.num_total:
            raise BlockError("free + cached + used is not the number of blocks")

    def _drop_key(self, block: Block) -> None:
        if block.key is not None:
            del self._by_key[block.key]
            block.reset_key()

    def _rank(self, block: Block) -> int:
        """Which part of the free list a block without holder belongs in."""
        if block.key is None:
            return _NO_KEY_RANK
        return _CACHED_RANK if block.policy_version == self._policy_version else _STALE_RANK

    def _fault(self, block: Block, is_listed: bool) -> str | None:
        if block.block_id == SCRATCH_BLOCK_ID:
            touched = is_listed or block.ref_count != 0 or block.key is not None
            return "the scratch block is free, held or keyed" if touched else None
        if block.ref_count < 0:
            return "fewer than no holders"
        if (block.ref_count == 0) != is_listed:
            return "held and on the free list, or neither"
        if (block.key is None) != (block.policy_version is None):
            return "a key without version, or a version without key"
        if block.policy_version is not None and block.policy_version > self._policy_version:
            return f"of a version later than the live {self._policy_version}"
        if block.key is not None and self._by_key.get(block.key) is not block:
            return "not found under its own key"
        return None
