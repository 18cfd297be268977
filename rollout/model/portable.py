"""Stock operations behind `Operators`: `portable` is batch-invariant on a CPU, `stock` is not."""

from __future__ import annotations

import torch
from torch import Tensor

from rollout.model.fusion import linear_with, matmul_rows
from rollout.model.rotary import Rotation
from rollout.model.vocabulary import PortableVocabulary


class PortableOperators:
    """oneDNN's linear and element-wise operations whose bits are each element's own.

    exact: whether that holds for the device and dtype they are to serve (fp32 on a CPU).
    """

    name = "portable"
    vocabulary = PortableVocabulary()

    def __init__(self, exact: bool) -> None:
        self.exact = exact

    def matmul(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        return matmul_rows(x, weight, bias)

    def workspace(self, rows: int, weight: Tensor) -> Tensor | None:
        return None

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear_with(matmul_rows, x, weight, bias)

    def add_rms_norm(
        self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        if delta is not None:
            x = x + delta
        return x, rms_norm(x, weight, eps)

    def rotate(
        self,
        qkv: Tensor,
        rotation: Rotation,
        kv_heads: int,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = qkv.split((qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)
        if q_norm is not None and k_norm is not None:
            q, k = rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)
        cos, sin = (
            table.index_select(0, rotation.positions).unsqueeze(1).to(qkv.dtype)
            for table in (rotation.cos, rotation.sin)
        )
        return rotate_half(q, cos, sin), rotate_half(k, cos, sin), v

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        out: Tensor = _SiluMul.apply(*gate_up.chunk(2, dim=-1))
        return out


class StockOperators:
    """What a model library would call: `F.linear` (MKL), `F.rms_norm`, `F.silu`."""

    name = "stock"
    exact = False
    vocabulary = PortableVocabulary()

    def matmul(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        with torch.no_grad():
            return torch.nn.functional.linear(x, weight, bias)

    def workspace(self, rows: int, weight: Tensor) -> Tensor | None:
        return None

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return torch.nn.functional.linear(x, weight, bias)

    def add_rms_norm(
        self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        if delta is not None:
            x = x + delta
        return x, torch.nn.functional.rms_norm(x, weight.shape, weight, eps)

    def rotate(
        self,
        qkv: Tensor,
        rotation: Rotation,
        kv_heads: int,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return PortableOperators(exact=False).rotate(
            qkv, rotation, kv_heads, q_norm, k_norm, eps
        )

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension, in fp32 at least; see `Operators.add_rms_norm`."""
    wide = x if x.dtype == torch.float64 else x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)


def rotate_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x `[num_tokens, heads, head_dim]` by cos and sin `[num_tokens, 1, head_dim]`."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


class _SiluMul(torch.autograd.Function):
    """silu(gate) · up, written with `exp` so that each element's bits are its own.

    `torch.sigmoid` and `F.silu` take a scalar path at the tail of a vector and differ there in
    the last bit (seen on AVX-512 for widths that are no multiple of 32); `exp`, + and / do not.
    """

    @staticmethod
    def forward(ctx, gate, up):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(gate, up)
        return gate / (1 + torch.exp(-gate)) * up

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        gate, up = ctx.saved_tensors
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        return grad * up * (sigmoid + silu * (1 - sigmoid)), grad * silu
