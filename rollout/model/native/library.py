"""The kernels of this folder as ctypes functions; argument for argument what the sources name."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

from attention.native.build import load_library
from attention.native.kernels import RECORDING, SIMD, declare

FOLDER = Path(__file__).parent
SOURCES = tuple(FOLDER / f"{name}.cpp" for name in ("linear", "rows", "vocabulary"))

_P, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_ROWS = [_P, _INT, _INT, _P]
_HEADS = [_P, _INT, _INT, _INT, _INT, _P, _P, _P, _P, _P, _FLOAT]


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled kernels; raises `BuildFailed`."""
    loaded = load_library("decoder", SOURCES, [SIMD, RECORDING])
    declare(loaded, "linear", [_P, _INT, _INT, _P, _INT, _P, _P], recordable=True, rows=1)
    declare(
        loaded, "add_rms_norm", [_P, _P, _P, _INT, _INT, _FLOAT, _P, _P], recordable=True, rows=3
    )
    declare(loaded, "rms_norm_backward", [_P, _P, _INT, _INT, _FLOAT, _P, _P, _P, _P])
    declare(loaded, "rotate", [*_HEADS, _P, _P], recordable=True, rows=1)
    declare(loaded, "rotate_backward", [*_HEADS, *[_P] * 6])
    declare(loaded, "silu_mul", [_P, _INT, _INT, _P], recordable=True, rows=1)
    declare(loaded, "silu_mul_backward", [_P, _INT, _INT, _P, _P])
    declare(loaded, "log_normalizers", [*_ROWS, _P, _P])
    declare(loaded, "sample_rows", [*_ROWS, _P, _P, _P, _P, _P])
    declare(loaded, "gather_logprobs", [*_ROWS, _P, _P, _P])
    declare(loaded, "score_gradient", [*_ROWS, _P, _P, _P, _P, _P])
    return loaded
