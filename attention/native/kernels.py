"""The attention kernels as ctypes functions; argument for argument what forward.cpp names."""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Sequence
from pathlib import Path

from attention.native.build import BuildFailed, load_library

logger = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
SOURCES = tuple(FOLDER / f"{name}.cpp" for name in ("forward", "backward", "replay"))
SIMD, RECORDING = FOLDER / "simd.h", FOLDER / "recording.h"

_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class Step(ctypes.Structure):
    """`Step` of step.h. Holds addresses only: whoever makes one keeps the arrays alive."""

    _fields_ = (
        ("sequences", _INT),
        ("query_start_loc", _POINTER),
        ("seq_lens", _POINTER),
        ("table_rows", _POINTER),
        ("block_table", _POINTER),
        ("table_width", _INT),
        ("block_size", _INT),
    )


class Heads(ctypes.Structure):
    """`Heads` of step.h."""

    _fields_ = (("query", _INT), ("key_value", _INT), ("head_dim", _INT))


class Slots(ctypes.Structure):
    """`Slots` of step.h, strides in floats."""

    _fields_ = (("head_stride", _INT), ("slot_stride", _INT))


_LAYOUT = [_POINTER, _POINTER, _POINTER]


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled kernels; raises `BuildFailed`."""
    loaded = load_library("attention", SOURCES, [SIMD, RECORDING, FOLDER / "step.h"])
    declare(
        loaded,
        "attend",
        [*_LAYOUT, _POINTER, _INT, _POINTER, _POINTER, _FLOAT, _POINTER, _POINTER],
        recordable=True,
    )
    declare(
        loaded,
        "store_step",
        [*_LAYOUT, _POINTER, _INT, _POINTER, _INT, _POINTER, _POINTER],
        recordable=True,
    )
    declare(
        loaded,
        "attend_backward",
        [*_LAYOUT, _INT, _POINTER, _POINTER, _POINTER, _INT, _POINTER, _POINTER, _FLOAT]
        + [_POINTER] * 6,
    )
    declare(loaded, "replay", [_POINTER, _INT, _INT, _INT])
    return loaded


def declare(
    library: ctypes.CDLL,
    name: str,
    arguments: Sequence[type],
    *,
    recordable: bool = False,
    rows: int = -1,
) -> None:
    """Tell ctypes a function's arguments; it returns nothing.

    recordable: it is `RECORDABLE` in its source, and a `Recorder` may write it down. rows: which
    argument is the number of rows, -1 = none; a recording is replayed with another one there.
    """
    function = getattr(library, name)
    function.argtypes, function.restype = list(arguments), None
    if recordable:
        address = ctypes.cast(getattr(library, f"{name}_slots"), ctypes.c_void_p).value
        function.slots_address, function.rows_argument = address, rows


@functools.cache
def unavailable() -> str:
    """Why there are no native kernels on this machine; empty when there are. Logged once."""
    try:
        library()
    except BuildFailed as error:
        logger.warning("no native kernels, portable operations are used instead: %s", error)
        return str(error)
    return ""
