"""The engine's side: this step's keys and values are stored in pages, then all pages are read."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from attention.backends import AttentionBackend
from attention.metadata import AttentionMetadata


class PagedAttention:
    """`Attention` over one scheduler step.

    `pages[layer]` is `[2, kv_heads, num_slots, head_dim]` (keys, values). `attend` stores the
    step's keys and values before any sequence is attended to, so a sequence may read blocks that
    another sequence of the same step has just filled.
    """

    def __init__(
        self,
        metadata: AttentionMetadata,
        pages: Sequence[Tensor],
        backend: AttentionBackend,
        group: int,
    ) -> None:
        self._pages = pages
        self._backend = backend
        self.plan = backend.plan(metadata, group, pages[0].device)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self._pages[layer]
        self._backend.store(k, v, keys, values, self.plan)
        return self._backend.attend(q, keys, values, self.plan)
