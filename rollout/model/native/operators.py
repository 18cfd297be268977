"""`Operators` on the C++ kernels, with gradients.

Forward is the kernel that the engine runs; backward of the products is torch's own matmul, of the
row operations a kernel again. Tensors are fp32 on a CPU; whatever is not contiguous is made so.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attention.native.recording import AT_ONCE, Kernels
from rollout.model.fusion import linear_with
from rollout.model.native.library import library
from rollout.model.rotary import Rotation
from rollout.model.vocabulary import NativeVocabulary


class NativeOperators:
    """kernels: who calls the kernels, where no gradient is wanted; a `Recorder` writes them down.

    `BuildFailed` where the kernels cannot be compiled.
    """

    name = "native"
    exact = True
    vocabulary = NativeVocabulary()

    def __init__(self, kernels: Kernels = AT_ONCE) -> None:
        library()
        self.kernels = kernels

    def matmul(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        x, weight = x.contiguous(), weight.contiguous()
        (rows, depth), width = x.shape, weight.shape[0]
        out = self.kernels.empty(x, rows, width) if out is None else out[:rows]
        self.kernels.launch(
            library().linear,
            x.data_ptr(), rows, depth, weight.data_ptr(), width, _address(bias), out.data_ptr(),
        )  # fmt: skip
        return out

    def workspace(self, rows: int, weight: Tensor) -> Tensor | None:
        return weight.new_empty((rows, weight.shape[0]))

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear_with(self.matmul, x, weight, bias)

    def add_rms_norm(
        self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        if not torch.is_grad_enabled():
            return _add_rms_norm(self.kernels, x, delta, weight, eps)
        if delta is None:
            out: Tensor = _RMSNorm.apply(x, weight, eps)
            return x, out
        total, out = _AddRMSNorm.apply(x, delta, weight, eps)
        return total, out

    def rotate(
        self,
        qkv: Tensor,
        rotation: Rotation,
        kv_heads: int,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        arguments = (qkv, rotation, kv_heads, q_norm, k_norm, eps)
        if not torch.is_grad_enabled():
            return _rotate(self.kernels, *arguments)
        q, k, v = _Rotate.apply(*arguments)
        return q, k, v

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return _silu_mul(self.kernels, gate_up)
        out: Tensor = _SiluMul.apply(gate_up)
        return out


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _add_rms_norm(
    kernels: Kernels, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    x, out = x.contiguous(), kernels.empty(x, *x.shape)
    total = x
    if delta is not None:
        delta, total = delta.contiguous(), kernels.empty(x, *x.shape)
    kernels.launch(
        library().add_rms_norm,
        x.data_ptr(), _address(delta), weight.data_ptr(), x.shape[0], x.shape[1], eps,
        total.data_ptr(), out.data_ptr(),
    )  # fmt: skip
    return total, out


def _rms_norm_backward(
    x: Tensor, weight: Tensor, eps: float, grad: Tensor, grad_total: Tensor | None, wants: bool
) -> tuple[Tensor, Tensor | None]:
    """Gradients of x and, if it wants one, of the weight."""
    grad, grad_x = grad.contiguous(), torch.empty_like(x)
    grad_total = None if grad_total is None else grad_total.contiguous()
    grad_weight = torch.empty_like(weight) if wants else None
    library().rms_norm_backward(
        x.data_ptr(), weight.data_ptr(), x.shape[0], x.shape[1], eps, grad.data_ptr(),
        _address(grad_total), grad_x.data_ptr(), _address(grad_weight),
    )  # fmt: skip
    return grad_x, grad_weight


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):  # type: ignore[no-untyped-def]
        x = x.contiguous()
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return _add_rms_norm(AT_ONCE, x, None, weight, eps)[1]

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, weight = ctx.saved_tensors
        wants = ctx.needs_input_grad[1]
        return (*_rms_norm_backward(x, weight, ctx.eps, grad, None, wants), None)


class _AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, delta, weight, eps):  # type: ignore[no-untyped-def]
        total, out = _add_rms_norm(AT_ONCE, x, delta, weight, eps)
        ctx.save_for_backward(total, weight)
        ctx.eps = eps
        return total, out

    @staticmethod
    def backward(ctx, grad_total, grad):  # type: ignore[no-untyped-def]
        total, weight = ctx.saved_tensors
        wants = ctx.needs_input_grad[2]
        grad_x, grad_weight = _rms_norm_backward(
            total, weight, ctx.eps, grad, grad_total, wants
        )
        return grad_x, grad_x, grad_weight, None


def _rotate(
    kernels: Kernels,
    qkv: Tensor,
    rotation: Rotation,
    kv_heads: int,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    qkv = qkv.contiguous()
    tokens, all_heads, dim = qkv.shape
    heads = all_heads - 2 * kv_heads
    q, k = kernels.empty(qkv, tokens, heads, dim), kernels.empty(qkv, tokens, kv_heads, dim)
    kernels.launch(
        library().rotate,
        qkv.data_ptr(), tokens, heads, kv_heads, dim, rotation.positions.data_ptr(),
        rotation.cos.data_ptr(), rotation.sin.data_ptr(), _address(q_norm), _address(k_norm), eps,
        q.data_ptr(), k.data_ptr(),
    )  # fmt: skip
    return q, k, qkv[:, heads + kv_heads :]


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, rotation, kv_heads, q_norm, k_norm, eps):  # type: ignore[no-untyped-def]
        qkv = qkv.contiguous()
        ctx.save_for_backward(qkv if q_norm is not None else None, q_norm, k_norm)
        ctx.rotation, ctx.eps, ctx.shape = rotation, eps, qkv.shape
        q, k, v = _rotate(AT_ONCE, qkv, rotation, kv_heads, q_norm, k_norm, eps)
        return q, k, v.contiguous()

    @staticmethod
    def backward(ctx, grad_q, grad_k, grad_v):  # type: ignore[no-untyped-def]
        qkv, q_norm, k_norm = ctx.saved_tensors
        rotation, wants = ctx.rotation, ctx.needs_input_grad
        grad_q, grad_k, grad_v = (g.contiguous() for g in (grad_q, grad_k, grad_v))
        tokens, heads, dim = grad_q.shape
        grad_qkv = grad_q.new_empty(ctx.shape)
        grad_q_norm = torch.empty_like(q_norm) if wants[3] else None
        grad_k_norm = torch.empty_like(k_norm) if wants[4] else None
        library().rotate_backward(
            _address(qkv), tokens, heads, grad_k.shape[1], dim, rotation.positions.data_ptr(),
            rotation.cos.data_ptr(), rotation.sin.data_ptr(), _address(q_norm), _address(k_norm),
            ctx.eps, grad_q.data_ptr(), grad_k.data_ptr(), grad_v.data_ptr(), grad_qkv.data_ptr(),
            _address(grad_q_norm), _address(grad_k_norm),
        )  # fmt: skip
        return grad_qkv, None, None, grad_q_norm, grad_k_norm, None


def _silu_mul(kernels: Kernels, gate_up: Tensor) -> Tensor:
    gate_up, rows, size = gate_up.contiguous(), gate_up.shape[0], gate_up.shape[1] // 2
    out = kernels.empty(gate_up, rows, size)
    kernels.launch(library().silu_mul, gate_up.data_ptr(), rows, size, out.data_ptr())
    return out


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up):  # type: ignore[no-untyped-def]
        gate_up = gate_up.contiguous()
        ctx.save_for_backward(gate_up)
        return _silu_mul(AT_ONCE, gate_up)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (gate_up,) = ctx.saved_tensors
        grad, grad_gate_up = grad.contiguous(), torch.empty_like(gate_up)
        library().silu_mul_backward(
            gate_up.data_ptr(), grad.shape[0], grad.shape[1], grad.data_ptr(),
            grad_gate_up.data_ptr(),
        )  # fmt: skip
        return grad_gate_up
