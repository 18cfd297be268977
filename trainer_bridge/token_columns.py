"""Columns of one number per response token that go to a training step with its batch."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from rollout.rollout_batch import RolloutBatch

Column = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class TokenColumns:
    """fp32 `[total tokens]` each, rollouts end to end, or None.

    reference_logprobs: of the frozen reference policy. values: the critic's, before the step.
    Both are what `Learner.score_tokens` says. returns: what the critic is to predict.
    """

    reference_logprobs: Column | None = None
    values: Column | None = None
    returns: Column | None = None

    def select(self, of_token: NDArray[np.bool_]) -> TokenColumns:
        """The columns of the tokens where `of_token` `[total tokens]` is true."""
        return replace(self, **{name: column[of_token] for name, column in self._present()})

    def check(self, num_tokens: int) -> None:
        """ValueError naming a column of another length, or with a number that is not finite."""
        for name, column in self._present():
            if column.shape != (num_tokens,):
                raise ValueError(f"{name} has shape {column.shape}, the batch {num_tokens} tokens")
            if not np.isfinite(column).all():
                token = int(np.flatnonzero(~np.isfinite(column))[0])
                raise ValueError(f"{name} of token {token} is {column[token]}; it must be finite")

    def _present(self) -> list[tuple[str, Column]]:
        named = ((field.name, getattr(self, field.name)) for field in fields(self))
        return [(name, column) for name, column in named if column is not None]


def advantages_per_token(
    batch: RolloutBatch, advantages: NDArray[np.float32] | None
) -> NDArray[np.float32]:
    """`[N]` or `[total tokens]` to `[total tokens]`, checked; None to zeros."""
    if advantages is None:
        return np.zeros(batch.num_tokens, dtype=np.float32)
    values = np.asarray(advantages, dtype=np.float32)
    if values.shape not in ((len(batch),), (batch.num_tokens,)):
        raise ValueError(
            f"advantages have shape {values.shape}, the batch has {len(batch)} rollouts of "
            f"{batch.num_tokens} tokens; pass one number per rollout or one per token"
        )
    if len(batch) == batch.num_tokens and (batch.lengths == 0).any():
        raise ValueError(
            f"the batch has as many rollouts as tokens ({len(batch)}), some without any: one "
            "advantage per rollout and one per token look alike. Drop the rollouts without tokens"
        )
    per_rollout = len(values) == len(batch)
    bad = np.flatnonzero(~np.isfinite(values))
    if len(bad):
        raise ValueError(
            f"the advantage of {'rollout' if per_rollout else 'token'} {bad[0]} is "
            f"{values[bad[0]]}; it must be finite"
        )
    return np.repeat(values, batch.lengths) if per_rollout else values
