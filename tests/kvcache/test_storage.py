"""The KV tensors: their size, their memory, and life without them."""

import gc
import sys

import pytest
import torch

from kvcache.storage import KVReleased, KVShape, KVStorage, num_blocks
from tests.memory import own_memory

SHAPE = KVShape(num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype=torch.float32)
BIG = KVShape(num_layers=4, num_kv_heads=4, head_dim=64, block_size=16, dtype=torch.bfloat16)
BIG_BLOCKS = 256  # 16 MiB
CPU = torch.device("cpu")
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self")


def fill(storage: KVStorage, value: float) -> None:
    for pages in storage.pages:
        pages.fill_(value)


def test_pages_are_zero_and_as_large_as_said() -> None:
    """K3: a block, the scratch block included, has its slots in every layer; all finite."""
    storage = KVStorage(SHAPE, 5, CPU)
    assert [tuple(pages.shape) for pages in storage.pages] == [(2, 2, 20, 8)] * 3
    assert all(pages.count_nonzero() == 0 for pages in storage.pages)
    assert storage.num_bytes == sum(pages.nbytes for pages in storage.pages)
    assert storage.num_bytes == 5 * SHAPE.block_bytes
    assert storage.block_size == 4


@pytest.mark.parametrize(
    ("blocks", "size", "expected"),
    [
        (10, None, 11),
        (None, 10 * SHAPE.block_bytes + 1, 10),
        (None, None, 1 + 3 * 25),
    ],
)
def test_budget_in_blocks_in_bytes_or_neither(
    blocks: int | None, size: int | None, expected: int
) -> None:
    """K12, K3: a budget of blocks is of usable ones; of bytes, of all; else every row fits."""
    assert num_blocks(SHAPE, 3, 98, blocks, size) == expected


def test_bad_budgets_are_named() -> None:
    """K3: two budgets at once, and one that leaves no block beside the scratch block."""
    with pytest.raises(ValueError, match="num_kv_blocks or kv_cache_bytes, not both"):
        num_blocks(SHAPE, 1, 1, 1, 1)
    with pytest.raises(ValueError, match="the KV budget holds 1 blocks of 1536 bytes"):
        num_blocks(SHAPE, 1, 1, None, 2 * SHAPE.block_bytes - 1)
    with pytest.raises(ValueError, match="the KV budget holds 1 blocks"):
        num_blocks(SHAPE, 1, 1, 0, None)


def test_released_pages_are_refused_and_come_back_zeroed() -> None:
    """W11: what is asked while released says what to do; twice is as once; size stays known."""
    storage = KVStorage(SHAPE, 5, CPU)
    fill(storage, 1.0)
    pages = storage.pages
    storage.restore()
    assert storage.pages is pages and pages[0].min() == 1.0
    del pages
    for _ in range(2):
        storage.release()
        assert storage.released
        with pytest.raises(KVReleased, match=r"call restore\(\)"):
            _ = storage.pages
        assert storage.num_bytes == 5 * SHAPE.block_bytes
    for _ in range(2):
        storage.restore()
        assert not storage.released
        assert [tuple(pages.shape) for pages in storage.pages] == [(2, 2, 20, 8)] * 3
        assert all(pages.count_nonzero() == 0 for pages in storage.pages)


@needs_linux
def test_unused_budget_costs_nothing() -> None:
    """K12, W11: memory is taken for tokens that are stored, not for slots that are only read."""
    before = own_memory()
    storage = KVStorage(BIG, BIG_BLOCKS, CPU)
    assert all(pages.count_nonzero() == 0 for pages in storage.pages)
    assert own_memory() - before < 0.1 * storage.num_bytes
    for pages in storage.pages:
        pages[:, :, : 128 * BIG.block_size] = 1.0
    assert 0.45 * storage.num_bytes < own_memory() - before < 0.6 * storage.num_bytes


@needs_linux
def test_memory_returns_to_the_system() -> None:
    """W10, W11: at least 90 % of what was written, in each of 20 cycles, and none is kept."""
    storage = KVStorage(BIG, BIG_BLOCKS, CPU)
    unused = own_memory()
    after: list[int] = []
    for cycle in range(20):
        fill(storage, cycle + 1.0)
        full = own_memory()
        assert full - unused >= 0.9 * storage.num_bytes, "the pages were not written"
        storage.release()
        after.append(own_memory())
        assert full - after[-1] >= 0.9 * storage.num_bytes
        storage.restore()
    assert after[-1] - after[0] < 0.05 * storage.num_bytes


@needs_linux
def test_a_view_keeps_its_memory_until_it_is_dropped() -> None:
    """W11: whoever still holds one layer's view keeps that layer readable, and only that one."""
    storage = KVStorage(BIG, BIG_BLOCKS, CPU)
    fill(storage, 2.0)
    full = own_memory()
    view = storage.pages[1][0, :, 16:32]
    storage.release()
    layer = storage.num_bytes // BIG.num_layers
    held = own_memory()
    assert view.min() == view.max() == 2.0
    assert 2.8 * layer < full - held < 3.2 * layer
    del view
    assert held - own_memory() > 0.9 * layer


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_memory_returns_to_the_device() -> None:
    """W10, W11: torch's cache of free memory keeps nothing of the pages either."""
    device = torch.device("cuda")
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(device)
    allocated = torch.cuda.memory_allocated(device)
    # 64 MiB: layers of this size get memory segments of their own.
    storage = KVStorage(BIG, 4 * BIG_BLOCKS, device)
    for _ in range(20):
        fill(storage, 1.0)
        assert torch.cuda.memory_allocated(device) - allocated >= storage.num_bytes
        storage.release()
        assert torch.cuda.memory_allocated(device) - allocated < 0.1 * storage.num_bytes
        assert torch.cuda.memory_reserved(device) - before < 0.1 * storage.num_bytes
        storage.restore()
        assert all(pages.count_nonzero() == 0 for pages in storage.pages)
