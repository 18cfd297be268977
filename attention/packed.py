"""The trainer's side: rows packed end to end, keys and values are those of the pack itself."""

from __future__ import annotations

import torch
from torch import Tensor

from attention.backends import AttentionBackend
from attention.metadata import AttentionMetadata


class PackedAttention:
    """`Attention` over one pack of tokens, differentiable, nothing stored.

    `metadata` has block size 1 and slots that are indices of the pack's own tokens, so sequences
    that share a prompt name the same slots for it.
    """

    def __init__(
        self,
        metadata: AttentionMetadata,
        backend: AttentionBackend,
        group: int,
        device: torch.device,
    ) -> None:
        self._backend = backend
        self._plan = backend.plan(metadata, group, device)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = k.contiguous().transpose(0, 1), v.contiguous().transpose(0, 1)
        return self._backend.attend(q, keys, values, self._plan)
