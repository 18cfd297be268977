"""CPU kernels in C++: attention over slots, and what it takes to build and load such kernels."""

from attention.native.backend import NativeAttention
from attention.native.build import BuildFailed, load_library

__all__ = ["BuildFailed", "NativeAttention", "load_library"]
