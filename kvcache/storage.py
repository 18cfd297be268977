"""The KV tensors: the one file of this package that knows torch."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcache.manager import BlockCopy

DEFAULT_KV_BYTES = 2 << 30


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one block of KV holds, over all layers."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        per_token = 2 * self.num_layers * self.num_kv_heads * self.head_dim
        return per_token * self.block_size * self.dtype.itemsize


def num_blocks(
    shape: KVShape,
    max_batch_size: int,
    max_seq_len: int,
    num_kv_blocks: int | None,
    kv_cache_bytes: int | None,
) -> int:
    """Blocks for a budget given as usable blocks or as bytes, the scratch block included.

    With neither: enough for `max_batch_size` full sequences, at most `DEFAULT_KV_BYTES`.
    """
    if num_kv_blocks is not None and kv_cache_bytes is not None:
        raise ValueError("give num_kv_blocks or kv_cache_bytes, not both")
    if num_kv_blocks is not None:
        blocks = num_kv_blocks + 1
    elif kv_cache_bytes is not None:
        blocks = kv_cache_bytes // shape.block_bytes
    else:
        full = max_batch_size * -(-max_seq_len // shape.block_size) + 1
        blocks = min(full, DEFAULT_KV_BYTES // shape.block_bytes)
    if blocks < 2:
        raise ValueError(
            f"the KV budget holds {blocks} blocks of {shape.block_bytes} bytes; "
            "it needs one scratch block and at least one more"
        )
    return blocks


class KVReleased(RuntimeError):
    """The pages were asked for while they are released."""


class KVStorage:
    """One page tensor per layer, `[2, kv_heads, num_blocks * block_size, head_dim]`, zeroed.

    Index 0 of the first dimension holds keys, 1 values. Block b owns the slots
    [b * block_size, (b + 1) * block_size). Contents are always finite: masked slots are read and
    multiplied by zero. On a CPU a page of memory is taken from the system when a token is first
    stored in it, not when it is read, so an unused budget costs nothing.
    """

    def __init__(self, shape: KVShape, num_blocks: int, device: torch.device) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        self.device = device
        self._pages: list[Tensor] | None = None
        self.restore()

    @property
    def block_size(self) -> int:
        return self.shape.block_size

    @property
    def num_bytes(self) -> int:
        """Bytes of all pages, whether they are there or released."""
        return self.shape.block_bytes * self.num_blocks

    @property
    def released(self) -> bool:
        return self._pages is None

    @property
    def pages(self) -> list[Tensor]:
        """The page tensors, valid until release(); KVReleased while there are none."""
        if self._pages is None:
            raise KVReleased("the KV pages are released; call restore() before using them")
        return self._pages

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy the beginnings of blocks into other blocks, in all layers. No target is a source."""
        if not copies:
            return
        size = self.block_size
        spans = [(c.source * size, c.target * size, c.num_tokens) for c in copies]
        sources = torch.cat([torch.arange(s, s + n) for s, _, n in spans]).to(self.device)
        targets = torch.cat([torch.arange(t, t + n) for _, t, n in spans]).to(self.device)
        for pages in self.pages:
            pages.index_copy_(2, targets, pages.index_select(2, sources))

    def release(self) -> None:
        """Give the memory of the pages back to the system; a second call does nothing.

        All KV is gone, so forget what the bookkeeping knows of it: `KVCacheManager.reset()`.
        On a CPU the mappings are removed, on CUDA torch's cache of free memory is emptied. A page
        tensor, or a view of one, that a caller still holds keeps its memory until it is dropped.
        """
        self._pages = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def restore(self) -> None:
        """Have pages again, zeroed and at other addresses; does nothing while there are some."""
        if self._pages is not None:
            return
        shape = self.shape
        size = (2, shape.num_kv_heads, self.num_blocks * shape.block_size, shape.head_dim)
        self._pages = [_zeros(size, shape.dtype, self.device) for _ in range(shape.num_layers)]


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    # torch.zeros would write every byte; anonymous memory is zero until it is written. It must be
    # a private mapping: reading a page that was never written takes memory in a shared one.
    memory = mmap.mmap(-1, math.prod(size) * dtype.itemsize, access=mmap.ACCESS_COPY)
    return torch.frombuffer(memory, dtype=dtype).view(size)
