"""A KV block's bookkeeping record, and the list of blocks that no request holds.

Blocks carry their own list links, so that taking one out of the middle of the free list (a cached
block that is hit again) costs the same few pointer writes at any pool size, and allocates nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

SCRATCH_BLOCK_ID = 0
"""The block that padding rows write to. It is never handed out, keyed or evicted."""


class BlockError(RuntimeError):
    """The bookkeeping was used against its contract: a bug in the caller, never a full cache."""


@dataclass(slots=True, eq=False)
class Block:
    """State of one fixed-size slice of the KV storage; owned and mutated by its `BlockPool` only.

    block_id        index of the slice in the storage, fixed for life
    ref_count       requests that hold it; 0 means it is on the free list
    key             content key under which it can be found, None if it cannot be found
    policy_version  weights that computed the keyed content; None exactly when key is None
    """

    block_id: int
    ref_count: int = 0
    key: bytes | None = None
    policy_version: int | None = None
    prev_free: Block | None = field(default=None, repr=False)
    next_free: Block | None = field(default=None, repr=False)

    def set_key(self, key: bytes, policy_version: int) -> None:
        """Name the content. BlockError if it already has a name: reset_key() comes first."""
        if self.key is not None:
            raise BlockError(f"block {self.block_id} already has key {self.key.hex()}")
        self.key = key
        self.policy_version = policy_version

    def reset_key(self) -> None:
        """Forget the content's name; without a name it does nothing."""
        self.key = None
        self.policy_version = None


class FreeBlockList:
    """Doubly linked list through the blocks themselves; every operation but iteration is O(1).

    A block is in at most one list. Asking to remove one that is in none, or to insert one that is
    in some list already, is a BlockError and changes nothing.
    """

    __slots__ = ("_length", "_sentinel")

    def __init__(self, blocks: Iterable[Block] = ()) -> None:
        self._sentinel = Block(block_id=-1)
        self._sentinel.prev_free = self._sentinel
        self._sentinel.next_free = self._sentinel
        self._length = 0
        for block in blocks:
            self.append(block)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Block]:
        """From the next block to be taken to the last; the list must not change meanwhile."""
        block = self._sentinel.next_free
        while block is not None and block is not self._sentinel:
            yield block
            block = block.next_free

    def popleft(self) -> Block:
        """Remove and return the first block; BlockError if there is none."""
        first = self._sentinel.next_free
        if first is None or first is self._sentinel:
            raise BlockError("no block left on the free list")
        self.remove(first)
        return first

    def append(self, block: Block) -> None:
        """Insert as the last to be taken."""
        last = self._sentinel.prev_free
        assert last is not None
        self._insert(block, last, self._sentinel)

    def appendleft(self, block: Block) -> None:
        """Insert as the next to be taken."""
        first = self._sentinel.next_free
        assert first is not None
        self._insert(block, self._sentinel, first)

    def remove(self, block: Block) -> None:
        """Take the block out, wherever it stands; BlockError if it is in no list."""
        before, after = block.prev_free, block.next_free
        if before is None or after is None:
            raise BlockError(f"block {block.block_id} is not on the free list")
        before.next_free = after
        after.prev_free = before
        block.prev_free = None
        block.next_free = None
        self._length -= 1

    def _insert(self, block: Block, before: Block, after: Block) -> None:
        if block.next_free is not None:
            raise BlockError(f"block {block.block_id} is already on the free list")
        block.prev_free = before
        block.next_free = after
        before.next_free = block
        after.prev_free = block
        self._length += 1
