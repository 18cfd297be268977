"""Kernels called at once, or written down and called again without Python in between.

On a CPU the Python around the kernels of a step is dear, more so than it looks alone: the weights
that stream through the caches throw it out between two calls. A `Recorder` stands where `Kernels`
stood while a module's forward runs once, without computing anything; what it wrote down, `replay`
does again in one call, for any smaller number of rows and whatever now lies in the same memory.

    forward(ops, …) ──► ops.kernels.launch(kernel, *arguments) ──► kernel        Kernels
                                                              └──► Recording     Recorder

The forward stays the only description of the model. What it does beside kernels cannot be written
down, and is found out: a kernel that is handed memory of unknown origin ends the recording.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from bisect import bisect_right, insort
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attention.native.kernels import library

ALIGNMENT = 64
"""bytes; a cache line, and a register of AVX-512"""


class NotRecordable(RuntimeError):
    """A forward did more than call kernels one after the other; the message says where."""


class Kernels:
    """Calls kernels at once; results are fresh memory."""

    def launch(self, kernel: Any, *arguments: Any) -> None:
        """Call a function of one of the libraries."""
        kernel(*arguments)

    def empty(self, like: Tensor, *shape: int) -> Tensor:
        """Memory for a result, of `like`'s dtype and device."""
        return like.new_empty(shape)


AT_ONCE = Kernels()


class Recorder(Kernels):
    """Writes calls down and makes none; results are memory of the recording.

    known: every tensor that the forward reads or writes and no kernel has made, fp32 or int64 on
        a CPU. They are not kept: whoever replays sees to it that they are still where they were.

    What no tensor uses any more is given out again for the same size, so that a layer's results
    lie where those of the layer before did.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        self._calls: list[NDArray[np.int64]] = []
        self._kept: list[object] = []
        self._free: dict[int, list[NDArray[np.uint8]]] = {}
        self._ends: dict[int, int] = {}  # of known memory, by where it starts
        self._starts: list[int] = []  # sorted
        for tensor in known:
            self._know(tensor.data_ptr(), tensor.numel() * tensor.element_size())

    def empty(self, like: Tensor, *shape: int) -> Tensor:
        floats = math.prod(shape)
        size = -(-floats * 4 // ALIGNMENT) * ALIGNMENT
        free = self._free.setdefault(size, [])
        if not free:
            memory = np.empty(size + ALIGNMENT, np.uint8)
            start = -memory.ctypes.data % ALIGNMENT
            free.append(memory[start : start + size])
            self._know(free[-1].ctypes.data, size)
        block = free.pop()
        array = np.frombuffer(block, np.float32, floats)
        weakref.finalize(array, free.append, block)  # when every tensor made of it is gone
        return torch.from_numpy(array).view(shape)

    def launch(self, kernel: Any, *arguments: Any) -> None:
        if not hasattr(kernel, "slots_address"):
            raise NotRecordable(f"{kernel.__name__} cannot be recorded: it is not RECORDABLE")
        slots = np.zeros(2 + len(arguments), np.int64)
        slots[:2] = kernel.slots_address, kernel.rows_argument
        for index, (kind, value) in enumerate(zip(kernel.argtypes, arguments, strict=True)):
            if kind is ctypes.c_float:
                slots[2 + index : 3 + index].view(np.float32)[0] = value
            elif kind is ctypes.c_int64:
                slots[2 + index] = value
            elif isinstance(value, int):
                if value and not self._is_known(value):
                    raise NotRecordable(
                        f"argument {index} of {kernel.__name__} is memory that no kernel of this "
                        "forward made: something else was computed, or copied, in between"
                    )
                slots[2 + index] = value
            else:  # byref(structure)
                self._kept.append(value)
                slots[2 + index] = ctypes.addressof(value._obj)
        self._calls.append(slots)

    def recording(self) -> Recording:
        calls = np.zeros((len(self._calls), max(map(len, self._calls), default=2)), np.int64)
        for row, call in zip(calls, self._calls, strict=True):
            row[: len(call)] = call
        return Recording(calls, [self._free, *self._kept])

    def _know(self, address: int, size: int) -> None:
        self._ends[address] = address + size
        insort(self._starts, address)

    def _is_known(self, address: int) -> bool:
        index = bisect_right(self._starts, address) - 1
        return index >= 0 and address < self._ends[self._starts[index]]


class Recording:
    """Calls in order, and what keeps their memory."""

    def __init__(self, calls: NDArray[np.int64], kept: list[object]) -> None:
        self._calls, self._kept = calls, kept

    def __len__(self) -> int:
        return len(self._calls)

    def replay(self, rows: int) -> None:
        """Make all calls for so many rows, at most those that were recorded."""
        library().replay(self._calls.ctypes.data, *self._calls.shape, rows)
