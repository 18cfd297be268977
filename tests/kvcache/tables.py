"""Requests that compute all their tokens, and what of them a lookup finds."""

from kvcache import KVCacheManager, block_keys, root_key

PROMPT = list(range(100, 148))  # three blocks of 16


def run(
    manager: KVCacheManager[str],
    request_id: str,
    token_ids: list[int],
    version: int = 0,
    salt: str | None = None,
) -> int:
    """Begin a request and compute all its tokens; the number of cached tokens."""
    num_cached = manager.begin(request_id, token_ids, version, salt)
    assert manager.grow(request_id, len(token_ids)) is not None
    manager.publish(request_id, token_ids, len(token_ids))
    return num_cached


def findable(manager: KVCacheManager[str], token_ids: list[int], version: int = 0) -> int:
    """Blocks of token_ids that a lookup finds, gaps included."""
    keys = block_keys(root_key(version), token_ids, manager.block_size)
    return sum(manager.pool.lookup(key) is not None for key in keys)
