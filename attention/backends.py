"""The attention protocol, and the only place that decides which backend runs.

A backend is one file with one class. To add one: implement `AttentionBackend`, add it to
`BACKENDS`, and run `pytest tests/attention`; the equality tests there take every entry.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from attention.metadata import AttentionMetadata
from attention.native import NativeAttention
from attention.reference import ReferenceAttention
from attention.tiled import TiledAttention


class Attention(Protocol):
    """What the decoder sees: one call per layer, bound to one step."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention of this step's tokens.

        q `[num_tokens, heads, head_dim]`, k and v `[num_tokens, kv_heads, head_dim]`; returns
        `[num_tokens, heads, head_dim]`. May store k and v; never changes its arguments.
        """


class AttentionBackend(Protocol):
    """Computes attention over slots. Stateless: everything about a step is in its plan."""

    name: str
    exact: bool
    """Whether a token's bits depend on its own keys and values alone (tests/attention checks)."""

    def plan(self, metadata: AttentionMetadata, group: int, device: torch.device) -> Any:
        """Prepare one step, once for all layers. `group` = query heads per key/value head."""

    def store(self, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, plan: Any) -> None:
        """Put the step's own k and v `[num_tokens, kv_heads, head_dim]` into their slots."""

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, plan: Any) -> Tensor:
        """q `[num_tokens, heads, head_dim]`; keys, values `[kv_heads, num_slots, head_dim]`.

        Scores are scaled by head_dim ** -0.5. Differentiable in all three tensors. keys and values
        may be transposed views. Every slot the plan can reach must hold finite numbers, also those
        that are masked.
        """


BACKENDS: dict[str, type[AttentionBackend]] = {
    "native": NativeAttention,
    "tiled": TiledAttention,
    "reference": ReferenceAttention,
}


def select_backend(
    choice: str | type[AttentionBackend] | AttentionBackend | None = None,
    *,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    head_dim: int = 64,
) -> AttentionBackend:
    """The backend for a name, a class, an instance, or None for the best that serves here.

    device (default: CPU), dtype and head_dim are those of the model. An explicit choice is
    strict: an unknown name is a ValueError, nothing is replaced silently.
    """
    if choice is None:
        serves = NativeAttention.serves(device or torch.device("cpu"), dtype, head_dim)
        return NativeAttention() if serves else TiledAttention()
    if isinstance(choice, str):
        if choice not in BACKENDS:
            raise ValueError(
                f"unknown attention backend {choice!r}; available: {', '.join(BACKENDS)}"
            )
        return BACKENDS[choice]()
    if isinstance(choice, type):
        return choice()
    return choice
