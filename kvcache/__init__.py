"""Paged KV cache bookkeeping: blocks, content keys, the pool and per-request block tables.

Nothing imported here knows tensors; the KV storage itself is `kvcache.storage`.
"""

from kvcache.block import SCRATCH_BLOCK_ID, Block, BlockError, FreeBlockList
from kvcache.keys import TokenIds, block_keys, child_key, root_key
from kvcache.manager import BlockCopy, KVCacheManager
from kvcache.pool import BlockPool, OutOfBlocks
from kvcache.prefix_stats import PrefixStats
from kvcache.table import NEVER

__all__ = [
    "NEVER",
    "SCRATCH_BLOCK_ID",
    "Block",
    "BlockCopy",
    "BlockError",
    "BlockPool",
    "FreeBlockList",
    "KVCacheManager",
    "OutOfBlocks",
    "PrefixStats",
    "TokenIds",
    "block_keys",
    "child_key",
    "root_key",
]
