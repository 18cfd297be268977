"""The block table of one request: which blocks hold its tokens, and how far they are published."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from kvcache.block import Block

NEVER = sys.maxsize
"""Number of tokens that no sequence reaches: publishing has nothing to do (any more)."""


@dataclass(slots=True)
class BlockTable:
    """Bookkeeping record without behaviour of its own; `KVCacheManager` alone changes it.

    root              key before the first block: version and salt
    num_query_tokens  tokens that were looked up when the table was opened
    blocks            head first; the request is one holder of each
    block_ids         the ids of blocks, kept beside them so that a step copies nothing
    keys              content keys of the leading full blocks, one per block dealt with; where
                      another block owns the key, or it was retired, the block itself has none
    num_matched       leading blocks that were found in the cache
    publish_at        tokens to be covered before publish() has anything to do
    is_counted        whether the prefix statistics know this request, or are not to know it
    """

    root: bytes
    policy_version: int
    num_query_tokens: int
    blocks: list[Block]
    block_ids: list[int]
    keys: list[bytes]
    num_matched: int
    publish_at: int
    is_counted: bool = False

    def fault(self, block_size: int) -> str | None:
        """What contradicts the description above, in words; None if nothing does."""
        if self.block_ids != [block.block_id for block in self.blocks]:
            return "block_ids are not the ids of its blocks"
        if len(set(self.block_ids)) != len(self.block_ids):
            return "one block is held twice"
        if not self.num_matched <= len(self.keys) <= len(self.blocks):
            return f"{len(self.keys)} keys for {len(self.blocks)} blocks"
        if self.publish_at not in (NEVER, (len(self.keys) + 1) * block_size):
            return f"publishes next at {self.publish_at} tokens, with {len(self.keys)} keys"
        for block, key in zip(self.blocks, self.keys, strict=False):
            if block.key not in (None, key):
                return f"block {block.block_id} has the key of other content"
        if any(block.key is not None for block in self.blocks[len(self.keys) :]):
            return "a block beyond the published ones is keyed"
        return None
