"""What the tests of block tables share."""

from collections.abc import Iterator

import pytest

from kvcache import BlockPool, KVCacheManager


@pytest.fixture
def manager() -> Iterator[KVCacheManager[str]]:
    """Twenty usable blocks of 16; the books must be right at the end."""
    manager: KVCacheManager[str] = KVCacheManager(BlockPool(num_blocks=21), block_size=16)
    yield manager
    manager.check_integrity()
