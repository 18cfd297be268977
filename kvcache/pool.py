"""The pool of KV blocks: who is free, who is held, and which block holds which content.

Every block but the scratch block is in exactly one of three states:

              take                      release, no key
    FREE ---------------> USED -----------------------------> FREE     no holder, no key
    CACHED -------------> USED -----------------------------> CACHED   no holder, findable by key
       take = eviction          release, keyed
       retain = prefix hit

    free list:  | FREE blocks | CACHED, longest unused ... CACHED, latest used |
                ^ taken first                                    taken last ^
"""

from __future__ import annotations

from collections.abc import Iterable

from kvcache.block import SCRATCH_BLOCK_ID, Block, BlockError, FreeBlockList


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

    __slots__ = ("_by_key", "_free", "_num_cached", "blocks", "enable_prefix_caching")

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

    @property
    def num_total(self) -> int:
        """Blocks that can be handed out: all but the scratch block."""
        return len(self.blocks) - 1

    @property
    def num_available(self) -> int:
        """Blocks that take() can hand out now: free and cached ones."""
        return len(self._free)

    @property
    def num_free(self) -> int:
        """Blocks without holder and without key."""
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
        """Hand out num_blocks blocks with one holder and no key, evicting the longest unused.

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
                del self._by_key[block.key]
                block.reset_key()
                self._num_cached -= 1
            block.ref_count = 1
            taken.append(block)
        return taken

    def lookup(self, key: bytes) -> Block | None:
        """The block published under key, if any. It may be evicted by the next take: retain it."""
        return self._by_key.get(key)

    def retain(self, blocks: Iterable[Block]) -> None:
        """Add one holder to each block; a cached one thereby leaves the free list.

        BlockError for the scratch block, and for a free block without key: its content is unknown.
        """
        for block in blocks:
            if block.ref_count == 0:
                if block.key is None:
                    raise BlockError(f"block {block.block_id} has no content to retain")
                self._free.remove(block)
                self._num_cached -= 1
            block.ref_count += 1

    def release(self, blocks: Iterable[Block]) -> None:
        """Take one holder off each block, in the given order; give a sequence's tail first.

        A keyed block without holders becomes the latest used of the cached ones, so of one
        sequence the head, given last, lives longest. A block without key is taken next of all.
        BlockError for a block nobody holds; the blocks given before it are released then.
        """
        for block in blocks:
            if block.ref_count == 0:
                raise BlockError(f"block {block.block_id} is released but nobody holds it")
            block.ref_count -= 1
            if block.ref_count > 0:
                continue
            if block.key is None:
                self._free.appendleft(block)
            else:
                self._free.append(block)
                self._num_cached += 1

    def publish(self, block: Block, key: bytes, policy_version: int) -> bool:
        """Make a held block findable under key; True if lookup(key) now gives this block.

        The first publisher of a key keeps it: a second block with the same content stays without
        key, so that holders and finders of the first see no change. False too with caching off.
        BlockError for a block that nobody holds or that already has a key.
        """
        if block.ref_count == 0:
            raise BlockError(f"block {block.block_id} is published but nobody holds it")
        if block.key is None and (not self.enable_prefix_caching or key in self._by_key):
            return False
        block.set_key(key, policy_version)
        self._by_key[key] = block
        return True

    def unpublish(self, block: Block) -> None:
        """Make a block unfindable; its holders keep it. Does nothing to a block without key."""
        if block.key is None:
            return
        del self._by_key[block.key]
        block.reset_key()
        if block.ref_count == 0:
            self._num_cached -= 1
            self._free.remove(block)
            self._free.appendleft(block)

    def unpublish_older(self, policy_version: int) -> int:
        """Make every block of weights older than policy_version unfindable; how many there were."""
        stale = [
            block
            for block in self._by_key.values()
            if block.policy_version is not None and block.policy_version < policy_version
        ]
        for block in stale:
            self.unpublish(block)
        return len(stale)

    def reset(self) -> None:
        """Forget all content and put the free list back in id order.

        BlockError while any block is held; then nothing changes.
        """
        if self.num_used:
            raise BlockError(f"the pool cannot be reset while {self.num_used} blocks are held")
        for block in self._by_key.values():
            block.reset_key()
        self._by_key.clear()
        self._num_cached = 0
        for block in self.blocks[SCRATCH_BLOCK_ID + 1 :]:
            self._free.remove(block)
            self._free.append(block)

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
        num_cached = sum(block.key is not None for block in listed)
        if num_cached != self._num_cached:
            raise BlockError(f"num_cached is {self._num_cached}, but {num_cached} blocks are")
        if any(block.key is not None for block in listed[: self.num_free]):
            raise BlockError("a cached block would be evicted before a free one is taken")
        if self.num_free + self.num_cached + self.num_used != self.num_total:
            raise BlockError("free + cached + used is not the number of blocks")

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
        if block.key is not None and self._by_key.get(block.key) is not block:
            return "not found under its own key"
        return None
