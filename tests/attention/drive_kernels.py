"""Calls every kernel with NumPy memory alone: run by `test_native.py` under the sanitizers.

    python drive_kernels.py FOLDER      FOLDER has 0.so (attention) and 1.so (decoder)
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import numpy as np

KEEP: list[np.ndarray] = []
RNG = np.random.default_rng(0)


def floats(*shape: int) -> ctypes.c_void_p:
    return address(RNG.standard_normal(shape).astype(np.float32))


def ints(values) -> ctypes.c_void_p:
    return address(np.array(values, np.int64))


def address(array: np.ndarray) -> ctypes.c_void_p:
    KEEP.append(array)
    return ctypes.c_void_p(array.ctypes.data)


def call(function, *arguments) -> None:
    function(*(ctypes.c_int64(a) if isinstance(a, int) else a for a in arguments))


class Step(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in "sequences starts lens rows table table_width block_size".split()
    )


def attention(library: ctypes.CDLL, heads: int, kv: int, dim: int, block: int) -> None:
    new, cached = [1, 5, 37, 1], [0, 3, 20, 90]
    lens = [a + b for a, b in zip(new, cached, strict=True)]
    width = -(-max(lens) // block)
    blocks = len(lens) * width
    table = RNG.permutation(blocks).reshape(len(lens), width)
    starts = np.concatenate(([0], np.cumsum(new)))
    tokens, slots = int(starts[-1]), blocks * block
    arrays = [starts, np.array(lens), np.arange(len(lens))[::-1].copy(), table]
    arrays = [np.ascontiguousarray(a, np.int64) for a in arrays]
    KEEP.extend(arrays)
    step = Step(len(lens), *(a.ctypes.data for a in arrays), width, block)
    shape = (ctypes.c_int64 * 3)(heads, kv, dim)
    strides = (ctypes.c_int64 * 2)(slots * dim, dim)
    layout = (ctypes.byref(step), shape, strides)
    keys, values = floats(kv, slots, dim), floats(kv, slots, dim)
    k, v, q = floats(tokens, kv, dim), floats(tokens, kv, dim), floats(tokens, heads, dim)
    scale = ctypes.c_float(dim**-0.5)
    out, lse = floats(tokens, heads, dim), floats(tokens, heads)
    call(library.store_step, *layout, k, kv * dim, v, kv * dim, keys, values)
    call(library.attend, *layout, q, heads * dim, keys, values, scale, out, lse)
    gradients = floats(tokens, heads, dim), floats(kv, slots, dim), floats(kv, slots, dim)
    call(
        library.attend_backward, *layout, len(lens), ints(range(len(lens) + 1)),
        ints(range(len(lens))), q, heads * dim, keys, values, scale, out, lse,
        floats(tokens, heads, dim), *gradients,
    )  # fmt: skip


def decoder(library: ctypes.CDLL, rows: int, depth: int, width: int) -> None:
    eps = ctypes.c_float(1e-6)
    def rows_by(columns: int) -> ctypes.c_void_p:
        return floats(rows, columns)

    x, weight, out = rows_by(depth), floats(depth), rows_by(width)
    for bias in (None, floats(width)):
        call(library.linear, x, rows, depth, floats(width, depth), width, bias, out)
    shape = (rows, depth)
    total, normed = rows_by(depth), rows_by(depth)
    for delta in (None, rows_by(depth)):
        call(library.add_rms_norm, x, delta, weight, *shape, eps, total, normed)
        for grad_weight in (None, floats(depth)):
            call(
                library.rms_norm_backward, x, weight, *shape, eps, normed, delta, rows_by(depth),
                grad_weight,
            )  # fmt: skip
    gate_up = rows_by(2 * depth)
    call(library.silu_mul, gate_up, *shape, rows_by(depth))
    call(library.silu_mul_backward, gate_up, *shape, x, rows_by(2 * depth))
    heads, kv, dim = 5, 2, 2 * (depth % 40 + 1)
    qkv, positions = floats(rows, heads + 2 * kv, dim), ints([r % 7 for r in range(rows)])
    head = (qkv, rows, heads, kv, dim, positions, floats(7, dim), floats(7, dim))
    for norms in ((None, None), (floats(dim), floats(dim))):
        call(library.rotate, *head, *norms, eps, floats(rows, heads, dim), floats(rows, kv, dim))
        call(
            library.rotate_backward, *head, *norms, eps, floats(rows, heads, dim),
            floats(rows, kv, dim), floats(rows, kv, dim), floats(rows, heads + 2 * kv, dim),
            *(None if n is None else floats(dim) for n in norms),
        )  # fmt: skip


def main() -> None:
    folder = Path(sys.argv[1])
    first, second = (ctypes.CDLL(str(folder / f"{i}.so")) for i in (0, 1))
    for heads, kv, dim, block in ((4, 4, 16, 1), (6, 2, 48, 16), (14, 2, 64, 4), (8, 1, 80, 64)):
        attention(first, heads, kv, dim, block)
    for rows, depth, width in ((1, 1, 1), (2, 17, 5), (17, 513, 49), (70, 64, 100), (300, 31, 7)):
        decoder(second, rows, depth, width)


if __name__ == "__main__":
    main()
