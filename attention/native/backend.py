"""The attention backend on the C++ kernels of this folder, differentiable."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attention.metadata import AttentionMetadata
from attention.native.kernels import Heads, Slots, Step, library, unavailable
from attention.native.recording import AT_ONCE, Kernels

HEAD_DIM_MULTIPLE = 16


class _Plan:
    """A step as the kernels read it. Keeps the arrays alive whose addresses it holds."""

    def __init__(self, metadata: AttentionMetadata, group: int) -> None:
        self.metadata = metadata
        self.group = group
        rows = metadata.table_rows
        if rows is None:
            rows = np.arange(len(metadata.seq_lens))
        self._arrays = [
            np.ascontiguousarray(a, np.int64)
            for a in (metadata.query_start_loc, metadata.seq_lens, rows, metadata.block_table)
        ]
        table = self._arrays[3]
        addresses = [a.ctypes.data for a in self._arrays]
        self._step = Step(len(metadata.seq_lens), *addresses, table.shape[1], metadata.block_size)
        self.step = ctypes.byref(self._step)

    def become(self, other: _Plan) -> None:
        """Calls that were recorded with this plan find `other`'s step from now on."""
        self._arrays = other._arrays
        ctypes.memmove(self.step, other.step, ctypes.sizeof(Step))

    @cached_property
    def components(self) -> Components:
        return Components.of(self.metadata)


@dataclass(frozen=True, slots=True)
class Components:
    """Sequences that share slots, side by side: component c is order[starts[c]:starts[c + 1]]."""

    starts: NDArray[np.int64]
    order: NDArray[np.int64]

    @staticmethod
    def of(metadata: AttentionMetadata) -> Components:
        """Sequences share slots by sharing a beginning; ValueError if any share others alone."""
        everyone = np.arange(len(metadata.seq_lens))
        first = metadata.slots(everyone, 0, 1)[:, 0]
        _, component = np.unique(first, return_inverse=True)
        order = np.argsort(component, kind="stable")
        starts = np.searchsorted(component[order], np.arange(component.max(initial=-1) + 2))
        width = int(metadata.seq_lens.max(initial=1))
        real = np.arange(width) < metadata.seq_lens[:, None]
        slots = metadata.slots(everyone, 0, width)[real]
        owner = np.broadcast_to(component[:, None], real.shape)[real]
        pairs = slots * (int(component.max(initial=0)) + 1) + owner
        if len(np.unique(pairs)) != len(np.unique(slots)):
            raise ValueError("sequences that share slots must share their first slot too")
        return Components(starts.astype(np.int64), order.astype(np.int64))


class NativeAttention:
    """The default on a CPU with a C++ compiler: fp32, head_dim a multiple of 16.

    Reads pages where they lie, prefill and decode in one call. kernels: who calls the kernels,
    where no gradient is wanted. `BuildFailed` where the kernels cannot be compiled.
    """

    name = "native"
    exact = True

    def __init__(self, kernels: Kernels = AT_ONCE) -> None:
        library()
        self.kernels = kernels

    @staticmethod
    def serves(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
        """Whether it can be used here; the first time on a machine this compiles the kernels."""
        fits = device.type == "cpu" and dtype == torch.float32
        return fits and head_dim % HEAD_DIM_MULTIPLE == 0 and not unavailable()

    def plan(self, metadata: AttentionMetadata, group: int, device: torch.device) -> _Plan:
        return _Plan(metadata, group)

    def store(self, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, plan: _Plan) -> None:
        heads, slots = _layout(k, keys, values, 1)
        k, v = _dense_rows(k), _dense_rows(v)
        self.kernels.launch(
            library().store_step,
            plan.step, heads, slots, k.data_ptr(), k.stride(0), v.data_ptr(),
            v.stride(0), keys.data_ptr(), values.data_ptr(),
        )  # fmt: skip

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, plan: _Plan) -> Tensor:
        if torch.is_grad_enabled() and (
            q.requires_grad or keys.requires_grad or values.requires_grad
        ):
            out: Tensor = _Attend.apply(q, keys, values, plan)
            return out
        return _forward(self.kernels, q, keys, values, plan, None)


def _forward(
    kernels: Kernels, q: Tensor, keys: Tensor, values: Tensor, plan: _Plan, lse: Tensor | None
) -> Tensor:
    heads, slots = _layout(q, keys, values, plan.group)
    q, out = _dense_rows(q), kernels.empty(q, *q.shape)
    kernels.launch(
        library().attend,
        plan.step, heads, slots, q.data_ptr(), q.stride(0), keys.data_ptr(), values.data_ptr(),
        q.shape[2] ** -0.5, out.data_ptr(), 0 if lse is None else lse.data_ptr(),
    )  # fmt: skip
    return out


class _Attend(torch.autograd.Function):
    """Keeps the output and one log-normalizer per token and head; weights are computed again."""

    @staticmethod
    def forward(ctx, q, keys, values, plan):  # type: ignore[no-untyped-def]
        lse = q.new_empty(q.shape[:2])
        out = _forward(AT_ONCE, q, keys, values, plan, lse)
        ctx.save_for_backward(q, keys, values, out, lse)
        ctx.plan = plan
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        q, keys, values, out, lse = ctx.saved_tensors
        plan = ctx.plan
        heads, slots = _layout(q, keys, values, plan.group)
        q, grad = _dense_rows(q), grad.contiguous()
        grad_q = torch.empty_like(out)
        # They lie as keys and values do: one pair of strides describes all four.
        grad_keys, grad_values = torch.zeros_like(keys), torch.zeros_like(values)
        components = plan.components
        library().attend_backward(
            plan.step, heads, slots, len(components.starts) - 1, components.starts.ctypes.data,
            components.order.ctypes.data, q.data_ptr(), q.stride(0), keys.data_ptr(),
            values.data_ptr(), q.shape[2] ** -0.5, out.data_ptr(), lse.data_ptr(),
            grad.data_ptr(), grad_q.data_ptr(), grad_keys.data_ptr(), grad_values.data_ptr(),
        )  # fmt: skip
        return grad_q, grad_keys, grad_values, None


def _dense_rows(x: Tensor) -> Tensor:
    """`[tokens, heads, head_dim]` whose heads lie side by side; tokens may lie further apart."""
    _, head_stride, stride = x.stride()
    return x if stride == 1 and head_stride == x.shape[2] else x.contiguous()


def _layout(x: Tensor, keys: Tensor, values: Tensor, group: int) -> tuple[Any, Any]:
    """Pointers to `Heads` and `Slots` for queries (or keys, group 1) and the slots they meet."""
    strides, others = keys.stride(), values.stride()
    alike = strides == others or all(
        a == b or size == 1 for size, a, b in zip(keys.shape, strides, others, strict=True)
    )
    if not alike or strides[2] != 1 or keys.dtype != torch.float32:
        raise ValueError(
            f"keys and values must be fp32 and lie alike, head_dim last: they are {keys.dtype} "
            f"with strides {keys.stride()} and {values.stride()}"
        )
    _, all_heads, dim = x.shape
    if dim % HEAD_DIM_MULTIPLE or x.dtype != torch.float32 or x.device.type != "cpu":
        raise ValueError(
            f"native attention is for fp32 on a CPU and head_dim a multiple of "
            f"{HEAD_DIM_MULTIPLE}, got {x.dtype} on {x.device} and {dim}; "
            'take attention_backend="tiled"'
        )
    return _structures(all_heads, all_heads // group, dim, strides[0], strides[1])


@functools.lru_cache(maxsize=64)
def _structures(query: int, key_value: int, dim: int, head: int, slot: int) -> tuple[Any, Any]:
    return ctypes.byref(Heads(query, key_value, dim)), ctypes.byref(Slots(head, slot))
