"""From a loss per token to one number: a weight for every token of a sequence.

The loss of a minibatch is the plain sum over its tokens of `weight[sequence] * loss[token]`. The
weights are computed once, from the lengths of the *whole* minibatch, so it does not matter into
how many micro-batches or processes the tokens are split.
"""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

Aggregation: TypeAlias = Literal[
    "token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"
]
AGGREGATIONS: tuple[str, ...] = get_args(Aggregation)


def token_weights(
    lengths: ArrayLike, mode: str, max_completion_length: int | None = None
) -> NDArray[np.float32]:
    """Weight of each token of sequence i, `float32[N]`, for `lengths[N]` in response tokens.

    With S the number of sequences that have tokens, n_i their lengths:

    - `token_mean`: 1 / sum(n): every token alike (DAPO, arXiv:2503.14476, eq. 8)
    - `seq_mean_token_mean`: 1 / (S n_i): every sequence alike (GRPO, arXiv:2402.03300, eq. 3)
    - `seq_mean_token_sum`: 1 / S: the gradient of the sequence's log-probability (RLOO)
    - `seq_mean_token_sum_norm`: 1 / (S max_completion_length): a constant normaliser, without
      the length bias of the mean (Dr. GRPO, arXiv:2503.20783)

    A sequence without tokens weighs 0 and is not counted, so a rejected request changes nothing
    for its neighbours. ValueError for an unknown mode, a negative length, or a missing maximum.
    """
    counts = np.asarray(lengths)
    if counts.ndim != 1:
        raise ValueError(f"lengths must have one dimension [sequences], got shape {counts.shape}")
    counts = counts.astype(np.float64)
    if (counts < 0).any():
        raise ValueError(f"lengths must be at least 0, got {int(counts.min())}")
    filled = counts > 0
    num_sequences = max(int(filled.sum()), 1)
    if mode == "token_mean":
        weights = np.full(len(counts), 1.0 / max(counts.sum(), 1.0))
    elif mode == "seq_mean_token_mean":
        weights = 1.0 / (num_sequences * np.maximum(counts, 1.0))
    elif mode == "seq_mean_token_sum":
        weights = np.full(len(counts), 1.0 / num_sequences)
    elif mode == "seq_mean_token_sum_norm":
        if max_completion_length is None or max_completion_length < 1:
            raise ValueError(
                "max_completion_length must be a positive number for "
                f"seq_mean_token_sum_norm, got {max_completion_length}"
            )
        weights = np.full(len(counts), 1.0 / (num_sequences * max_completion_length))
    else:
        raise ValueError(f"aggregation must be one of {', '.join(AGGREGATIONS)}, got {mode!r}")
    return np.where(filled, weights, 0.0).astype(np.float32)
