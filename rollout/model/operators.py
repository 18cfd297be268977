"""The operations a decoder is made of, and the only place that decides who computes them.

    native    C++ kernels of this repository: fp32 on a CPU with a compiler; batch-invariant
    portable  stock operations arranged to be batch-invariant on a CPU in fp32; any device and dtype
    stock     torch's own layers: rows depend on their company; the control of every exactness test
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from attention.native import NativeAttention
from rollout.model.native import NativeOperators
from rollout.model.portable import PortableOperators, StockOperators
from rollout.model.rotary import Rotation
from rollout.model.vocabulary import Vocabulary


class Operators(Protocol):
    """Differentiable functions of flat tokens; parameters are read where they lie.

    With `exact`, a row of a result has the same bits whatever rows are beside it, in every process
    of this machine. Stateless: one object may serve any number of models.
    """

    name: str
    exact: bool

    @property
    def vocabulary(self) -> Vocabulary:
        """What is computed of rows of logits."""

    def matmul(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """x `[rows, in]`, weight `[out, in]` -> `[rows, out]`, outside of any graph.

        out: a `workspace`, whose first rows the result then overwrites.
        """

    def workspace(self, rows: int, weight: Tensor) -> Tensor | None:
        """Memory `[rows, out]` to give to one `matmul` after another; None where that gains
        nothing. For results as large as logits: fresh memory of such a size is mapped anew, page
        by page, whenever it is taken from a CPU's allocator."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """`matmul` with gradients."""

    def add_rms_norm(
        self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """(x + delta, RMSNorm(x + delta) · weight), rows `[rows, size]`; delta None counts as 0.

        RMSNorm(x) = x · (mean(x²) + eps)^-½ (Zhang and Sennrich 2019).
        """

    def rotate(
        self,
        qkv: Tensor,
        rotation: Rotation,
        kv_heads: int,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Split qkv `[tokens, heads + 2 kv_heads, head_dim]` into q, k, v; norm q and k per head
        where weights `[head_dim]` are given (Qwen3); rotate q and k (Su et al. 2021)."""

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) · up of `[rows, 2 size]`, gate first (Shazeer 2020)."""


NAMES = ("native", "portable", "stock")


def select_operators(
    choice: str | Operators | None, device: torch.device, dtype: torch.dtype
) -> Operators:
    """The operators of a name, an instance, or None for the best that serve the device and dtype.

    An explicit choice is strict: ValueError for an unknown name, `BuildFailed` where the native
    kernels cannot be compiled; nothing is replaced silently.
    """
    if choice is None:
        choice = "native" if NativeAttention.serves(device, dtype, 16) else "portable"
    if choice == "native":
        return NativeOperators()
    if choice == "portable":
        return PortableOperators(exact=device.type == "cpu" and dtype == torch.float32)
    if choice == "stock":
        return StockOperators()
    if isinstance(choice, str):
        raise ValueError(f"unknown operators {choice!r}; available: {', '.join(NAMES)}")
    return choice
