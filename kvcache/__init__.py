"""Paged KV cache bookkeeping: blocks, content keys, the pool and per-request block tables.

Nothing imported here knows tensors; the KV storage itself is `kvcache.storage`.
"""

from kvcache.block import SCRATCH_BLOCK_ID, Block, BlockError, FreeBlockList
from kvcache.keys import block_keys, child_key, root_key
from kvcache.manager import KVCacheManager, PrefixStats
from kvcache.pool import BlockPool, OutOfBlocks

__all__ = [
    "SCRATCH_BLOCK_ID",
    "Block",
    "BlockError",
    "BlockPool",
    "FreeBlockList",
    "KVCacheManager",
    "OutOfBlocks",
    "PrefixStats",
    "block_keys",
    "child_key",
    "root_key",
]
