"""Linear layers: one batch-invariant matmul, and projections fused by adjacency in memory.

A fused projection never copies: when the weights of `q_proj, k_proj, v_proj` lie back to back
(the weight arena and `pack_adjacent` place them so), one matmul reads all of them through a view
over the same memory. Where they do not lie so, the same rows come from separate matmuls, with the
same bits: an output element depends on its row of x and its row of w alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

_HAS_ONEDNN = torch.backends.mkldnn.is_available()


def matmul_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias` whose rows do not depend on the other rows. No autograd.

    x `[rows, in]`, weight `[out, in]`, result `[rows, out]`. On a CPU in fp32 this is oneDNN's
    linear as torch ships it: a row's result was found bitwise equal for every number of rows
    from 2 to 8,192, any position and 1 or 2 threads; a single row takes another path and is
    therefore padded to two. tests/rollout/test_fusion.py checks it on the machine at hand.
    Elsewhere it is torch's own linear, whose rows may depend on their number.
    """
    if x.device.type != "cpu" or x.dtype != torch.float32 or not _HAS_ONEDNN:
        return torch.nn.functional.linear(x, weight, bias)
    rows = x.shape[0]
    if rows == 1:
        return matmul_rows(x.expand(2, -1), weight, bias)[:1]
    if rows == 0:
        return x.new_empty((0, weight.shape[0]))
    out: Tensor = torch.ops.mkldnn._linear_pointwise(
        x.contiguous(), weight, bias, "none", [], ""
    )
    return out


def adjacent_view(parts: Sequence[Tensor]) -> Tensor | None:
    """A view over tensors that lie back to back in CPU memory, stacked along dim 0; else None.

    The view owns nothing: it is valid while the parts live where they are. Its storage is its
    own, so it may span parts that each have a storage of their own.
    """
    first = parts[0]
    if first.device.type != "cpu":
        return None
    address, rows = first.data_ptr(), 0
    for part in parts:
        if part.data_ptr() != address or not part.is_contiguous() or part.dtype != first.dtype:
            return None
        address += part.numel() * part.element_size()
        rows += part.shape[0]
    size = address - first.data_ptr()
    memory = (ctypes.c_char * size).from_address(first.data_ptr())
    return torch.frombuffer(memory, dtype=first.dtype).view(rows, *first.shape[1:])


def pack_adjacent(module: nn.Module, groups: Sequence[Sequence[str]]) -> None:
    """Re-bind the named CPU parameters so that each group lies back to back. Keeps values.

    Every parameter keeps a storage of its own (views of one storage are dropped silently by
    safetensors-based savers). For models outside an arena; call it before any optimizer exists.
    """
    for names in groups:
        owners = [module.get_submodule(name.rpartition(".")[0]) for name in names]
        leaves = [name.rpartition(".")[2] for name in names]
        old = [getattr(owner, leaf) for owner, leaf in zip(owners, leaves, strict=True)]
        if any(p.device.type != "cpu" or not p.numel() for p in old):
            continue
        memory = bytearray(sum(p.numel() * p.element_size() for p in old))
        offset = 0
        for owner, leaf, p in zip(owners, leaves, old, strict=True):
            new = torch.frombuffer(memory, dtype=p.dtype, count=p.numel(), offset=offset)
            new = new.view(p.shape)
            new.copy_(p.detach())
            setattr(owner, leaf, nn.Parameter(new, requires_grad=p.requires_grad))
            offset += p.numel() * p.element_size()


Matmul = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""(x `[rows, in]`, weight `[out, in]`, bias `[out]` or None) -> `[rows, out]`, no autograd."""


class _Linear(torch.autograd.Function):
    """Forward through a `Matmul` over one weight that stands for `num_parts` stacked parameters.

    The parameters come after the fused weight so that autograd hands each its own gradient.
    """

    @staticmethod
    def forward(ctx, matmul, x, weight, bias, num_parts, *parameters):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, weight)
        ctx.sizes = [p.shape[0] for p in parameters[:num_parts]]
        ctx.has_bias = bias is not None
        return matmul(x, weight, bias)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, weight = ctx.saved_tensors
        needs = ctx.needs_input_grad
        parts = len(ctx.sizes)
        grad_x = grad @ weight if needs[1] else None
        grad_w: list[Tensor | None] = [None] * parts
        grad_b: list[Tensor | None] = [None] * (parts if ctx.has_bias else 0)
        if any(needs[5 : 5 + parts]):
            grad_w = list((grad.t() @ x).split(ctx.sizes))
        if ctx.has_bias and any(needs[5 + parts :]):
            grad_b = list(grad.sum(0).split(ctx.sizes))
        return (None, grad_x, None, None, None, *grad_w, *grad_b)


def linear_with(matmul: Matmul, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A `Matmul` with gradients: x `[rows, in]`, weight `[out, in]` -> `[rows, out]`."""
    if not torch.is_grad_enabled():
        return matmul(x, weight, bias)
    parameters = (weight,) if bias is None else (weight, bias)
    out: Tensor = _Linear.apply(matmul, x, weight, bias, 1, *parameters)
    return out


class ManyParts(Protocol):
    """What `FusedLinear` needs of `Operators`."""

    def matmul(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor: ...

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor: ...


class FusedLinear:
    """One matmul over several `nn.Linear`-shaped parameter holders that read the same input.

    Not a module: it owns no parameters. It caches the fused view and rebuilds it when a parameter
    moves, so it stays right after any re-binding.
    """

    def __init__(self, *layers: Linear) -> None:
        self._layers = layers
        self._key: tuple[int, ...] = ()
        self._weight: Tensor | None = None
        self._bias: Tensor | None = None

    def __call__(self, ops: ManyParts, x: Tensor) -> Tensor:
        """x `[tokens, in]` -> `[tokens, sum of outs]`, the layers' outputs side by side."""
        weights = [layer.weight for layer in self._layers]
        biases = [layer.bias for layer in self._layers if layer.bias is not None]
        key = tuple([p.data_ptr() for p in (*weights, *biases)])
        if key != self._key or weights[0].device.type != "cpu":
            self._weight = adjacent_view([w.detach() for w in weights])
            self._bias = adjacent_view([b.detach() for b in biases]) if biases else None
            self._key = key
        if self._weight is None or (biases and self._bias is None):
            return torch.cat(
                [ops.linear(x, layer.weight, layer.bias) for layer in self._layers], dim=-1
            )
        if not torch.is_grad_enabled():
            return ops.matmul(x, self._weight, self._bias)
        out: Tensor = _Linear.apply(
            ops.matmul, x, self._weight, self._bias, len(weights), *weights, *biases
        )
        return out


class Linear(nn.Module):
    """Parameters of a linear layer under Hugging Face's names; `Operators` computes it."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self, in_features: int, out_features: int, bias: bool, dtype: torch.dtype, device: str
    ) -> None:
        super().__init__()
        weight = torch.empty(out_features, in_features, dtype=dtype, device=device)
        self.weight = nn.Parameter(weight)
        zeros = torch.zeros(out_features, dtype=dtype, device=device) if bias else None
        self.register_parameter("bias", None if zeros is None else nn.Parameter(zeros))
