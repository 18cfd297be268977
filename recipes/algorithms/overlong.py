"""What a completion loses for coming close to the length limit."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def overlong_penalty(
    lengths: NDArray[np.integer], max_length: int, buffer: int, factor: float = 1.0
) -> NDArray[np.float64]:
    """min(-(length - (max_length - buffer)) / buffer * factor, 0) of each rollout, `float64[N]`.

    0 up to max_length - buffer tokens, then linear down to -factor at `max_length`. "Soft overlong
    punishment" of Yu et al. 2025 (DAPO), arXiv:2503.14476, eq. 13, which ends at max_length here
    because no completion is longer. To be added to the rewards.
    """
    if not 1 <= buffer <= max_length:
        raise ValueError(f"buffer must lie in 1..max_length ({max_length}), got {buffer}")
    if factor < 0:
        raise ValueError(f"factor must be at least 0, got {factor}")
    beyond = np.asarray(lengths, dtype=np.float64) - (max_length - buffer)
    return np.minimum(-beyond / buffer * factor, 0.0)
