"""The KV tensors: the one file of this package that knows torch."""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass

import torch
from torch import Tensor


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


class KVStorage:
    """One page tensor per layer, `[2, kv_heads, num_blocks * block_size, head_dim]`, zeroed.

    Index 0 of the first dimension holds keys, 1 values. Block b owns the slots
    [b * block_size, (b + 1) * block_size). Contents are always finite: masked slots are read and
    multiplied by zero. On a CPU a page of memory is taken from the system when a token is first
    stored in it, so an unused budget costs nothing.
    """

    def __init__(self, shape: KVShape, num_blocks: int, device: torch.device) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        self.device = device
        size = (2, shape.num_kv_heads, num_blocks * shape.block_size, shape.head_dim)
        self.pages: list[Tensor] = [
            _zeros(size, shape.dtype, device) for _ in range(shape.num_layers)
        ]

    @property
    def block_size(self) -> int:
        return self.shape.block_size

    @property
    def num_bytes(self) -> int:
        return self.shape.block_bytes * self.num_blocks


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    # torch.zeros would write every byte; anonymous memory is zero until it is written.
    memory = mmap.mmap(-1, math.prod(size) * dtype.itemsize)
    return torch.frombuffer(memory, dtype=dtype).view(size)
