"""The decoder's own C++ kernels: matrix products, row operations, the vocabulary."""

from rollout.model.native.operators import NativeOperators

__all__ = ["NativeOperators"]
