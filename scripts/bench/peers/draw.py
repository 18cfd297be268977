"""Tokens and log-probs from rows of logits in NumPy, for engines that hand over logits."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BLOCK = 128


def draw(
    logits: NDArray[np.float32], rng: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """One token per row at temperature 1, and its log-prob. logits `[rows, vocab]`, not changed.

    The inverse of the cumulative distribution: the block of 128 ids in which it crosses a uniform
    number is found from the blocks' sums, then the id inside the block.
    """
    rows, vocab = logits.shape
    highest = logits.max(axis=1, keepdims=True)
    weights = logits - highest
    np.exp(weights, out=weights)
    blocks = np.add.reduceat(weights, np.arange(0, vocab, BLOCK), axis=1)
    ends = blocks.cumsum(axis=1, dtype=np.float64)
    target = rng.random(rows) * ends[:, -1]
    tokens = np.empty(rows, np.int64)
    for row in range(rows):
        block = np.searchsorted(ends[row], target[row], side="right")
        block = min(int(block), blocks.shape[1] - 1)
        start = block * BLOCK
        inside = weights[row, start : start + BLOCK].cumsum(dtype=np.float64)
        rest = target[row] - (ends[row, block] - blocks[row, block])
        within = min(int(np.searchsorted(inside, rest, side="right")), len(inside) - 1)
        tokens[row] = start + within
    drawn = (logits[np.arange(rows), tokens] - highest[:, 0]).astype(np.float64)
    return tokens, drawn - np.log(ends[:, -1])
